"""Traces of torch.profiler, of jobs with torch.distributed.pipelining, as measured steps. No torch."""

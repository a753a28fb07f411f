"""Checkpoints by torch.distributed.checkpoint, under the module's own names."""

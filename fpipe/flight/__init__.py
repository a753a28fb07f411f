"""The flight recorder: the last effects of each rank, in files that outlive the processes. No torch."""

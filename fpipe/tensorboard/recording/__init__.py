"""Record timelines and scalars of a run."""

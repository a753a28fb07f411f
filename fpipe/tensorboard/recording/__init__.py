"""What records timelines and scalars of a run."""

"""Write and read timelines in TensorBoard's event files. No torch."""

"""Split a module without changes to its code: export, partition, and write stages as pure functions."""

"""Pure functions over pytrees, put together into a pipeline."""

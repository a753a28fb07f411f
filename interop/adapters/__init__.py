"""Low-rank adapters of frozen params."""

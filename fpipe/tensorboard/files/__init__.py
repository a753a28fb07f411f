"""Timelines in event files: their bytes, written and read. No torch."""

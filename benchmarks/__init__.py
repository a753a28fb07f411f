"""Benchmarks: each compares side by side in one run, and prints medians and ratios. They are not tests."""

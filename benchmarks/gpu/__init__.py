"""Checks of fpipe on a machine with one GPU: correctness, failures, numbers. docs/gpu.md describes them."""

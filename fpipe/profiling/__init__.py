"""Measure runs: observers that record them, and the costs of stages."""

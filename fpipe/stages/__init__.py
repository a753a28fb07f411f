"""Stages, and pipelines of stages: pure functions over pytrees."""

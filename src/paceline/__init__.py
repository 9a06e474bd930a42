"""Paceline plans, runs and rescues distributed training."""

__version__ = "0.1.0"

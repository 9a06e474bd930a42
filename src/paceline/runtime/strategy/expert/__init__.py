"""Routed experts shared among ranks."""

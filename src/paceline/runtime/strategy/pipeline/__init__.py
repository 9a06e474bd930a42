"""Blocks in stages, and micro-batches through them."""

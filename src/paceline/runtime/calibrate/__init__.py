"""Measure what this machine reaches: products, attention, memory and collectives."""

"""Whole runs: the command line, agents, workers over gloo, real faults."""

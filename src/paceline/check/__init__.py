"""Judge it: facts in, findings out. Probes nothing itself."""

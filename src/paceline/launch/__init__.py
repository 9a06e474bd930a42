"""Start it: a plan becomes a running job, one module for each place."""

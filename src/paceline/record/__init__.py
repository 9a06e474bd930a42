"""What is kept: a run's folder, its events and metrics, and the registry of runs."""

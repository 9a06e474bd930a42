"""Do it: what runs inside each worker. Importing this package imports no torch."""

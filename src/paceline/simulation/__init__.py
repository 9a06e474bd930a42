"""A month of failures in seconds: the controller's core under a virtual clock."""

"""What a rank's state can be checked against, and where it can be brought back from."""

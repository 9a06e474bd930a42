"""What the ranks that read different tokens share, and exchange."""

"""How one kind of model may be split."""

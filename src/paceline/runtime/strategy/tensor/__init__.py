"""Matrices, and the tokens between them, split over the tensor ranks."""

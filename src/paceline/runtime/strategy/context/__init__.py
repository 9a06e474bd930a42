"""A sample's tokens split over the context ranks."""

"""Bench of models whose layers are split over ranks."""

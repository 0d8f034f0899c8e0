"""Bench of operations that ranks match by name."""

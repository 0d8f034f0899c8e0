"""Optimizers of matrices: loss against bytes, and the time of a step."""

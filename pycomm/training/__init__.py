"""Data-parallel training: reduced gradients, elastic groups, checkpoints, asynchronous methods, and what they cost."""

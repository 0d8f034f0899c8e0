"""Reductions: what the Reducer, DistributedDataParallel's hook and averaging methods have in common."""

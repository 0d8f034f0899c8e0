"""Pipelines: the time that a table takes on real ranks, beside its simulation."""

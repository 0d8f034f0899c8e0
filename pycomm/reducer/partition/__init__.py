"""Optimizer steps that the ranks of a host take together, each for its own part, in memory that all of them reach."""

from pycomm.reducer.partition.partition import StepPartition

__all__ = ["StepPartition"]

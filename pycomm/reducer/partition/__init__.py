"""Optimizer steps that ranks take together, each for its own part of the parameters."""

from pycomm.reducer.partition.partition import StepPartition

__all__ = ["StepPartition"]

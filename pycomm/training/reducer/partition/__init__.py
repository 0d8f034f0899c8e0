"""Optimizer steps that ranks take together, each for its own part of the parameters."""

from pycomm.training.reducer.partition.partition import StepPartition

__all__ = ["StepPartition"]

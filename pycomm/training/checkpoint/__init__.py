"""Checkpoints of the training state: atomic, checksummed, written in the background, for any number of ranks."""

from pycomm.training.checkpoint.loading import load
from pycomm.training.checkpoint.saving import PendingSave, save

__all__ = ["PendingSave", "load", "save"]

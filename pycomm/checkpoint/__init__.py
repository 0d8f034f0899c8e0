"""Checkpoints of the whole of training: atomic, with checksums, written in the background, for any number of ranks."""

from pycomm.checkpoint.loading import load
from pycomm.checkpoint.saving import save
from pycomm.checkpoint.writing import PendingSave

__all__ = ["PendingSave", "load", "save"]

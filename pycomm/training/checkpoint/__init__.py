"""Checkpoints of the training state: atomic, checksummed, written in the background, for any number of ranks."""

from pycomm.checks import public_names as _public_names
from pycomm.training.checkpoint.loading import load as load
from pycomm.training.checkpoint.saving import PendingSave as PendingSave
from pycomm.training.checkpoint.saving import save as save

__all__ = _public_names(globals())

"""Checkpoints of the training state: atomic, checksummed, written in the background, for any number of ranks."""

from pycomm.checks import public_names as _public_names
from pycomm.training.checkpoint.folder import StateDicts as StateDicts
from pycomm.training.checkpoint.folder import state_dicts as state_dicts
from pycomm.training.checkpoint.loading import load as load
from pycomm.training.checkpoint.saving import PendingSave as PendingSave
from pycomm.training.checkpoint.saving import save as save

__all__ = _public_names(globals())

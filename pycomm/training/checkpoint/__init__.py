"""Checkpoints of the training state: atomic, checksummed, written in the background, for any number of ranks."""

from pycomm.training.checkpoint.loading import load as load
from pycomm.training.checkpoint.saving import PendingSave as PendingSave
from pycomm.training.checkpoint.saving import save as save

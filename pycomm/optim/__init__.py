"""Optimizer steps: fused rules, LARS, LAMB, master weights, loss scaling, learning rates, batch shards."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from pycomm.checks import lazy_names as _lazy_names

if _TYPE_CHECKING:  # imported at first use: `attach` needs few of them
    from pycomm.optim.batch_shards import Shard as Shard
    from pycomm.optim.batch_shards import shard_batch as shard_batch
    from pycomm.optim.fused import FusedStep as FusedStep
    from pycomm.optim.fused import fuse as fuse
    from pycomm.optim.lamb import LAMB as LAMB
    from pycomm.optim.lars import LARS as LARS
    from pycomm.optim.loss_scaler import LossScaler as LossScaler
    from pycomm.optim.lr_schedules import BatchSizeGrowth as BatchSizeGrowth
    from pycomm.optim.lr_schedules import WarmupLR as WarmupLR
    from pycomm.optim.lr_schedules import linear_scaled_lr as linear_scaled_lr
    from pycomm.optim.lr_schedules import sqrt_scaled_lr as sqrt_scaled_lr
    from pycomm.optim.masters import MasterWeights as MasterWeights
    from pycomm.optim.masters import master_weights as master_weights

_HOMES = {
    "fused": "FusedStep fuse",
    "lamb": "LAMB",
    "lars": "LARS",
    "loss_scaler": "LossScaler",
    "lr_schedules": "BatchSizeGrowth WarmupLR linear_scaled_lr sqrt_scaled_lr",
    "masters": "MasterWeights master_weights",
    "batch_shards": "Shard shard_batch",
}

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())

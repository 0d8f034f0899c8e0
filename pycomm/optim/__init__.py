"""Optimizer steps: fused rules, LARS, LAMB, master weights, loss scaling, learning rates, batch shards."""

from pycomm.checks import public_names as _public_names
from pycomm.optim.fused import FusedStep as FusedStep
from pycomm.optim.fused import fuse as fuse
from pycomm.optim.lamb import LAMB as LAMB
from pycomm.optim.lars import LARS as LARS
from pycomm.optim.loss_scaler import LossScaler as LossScaler
from pycomm.optim.lr_schedules import BatchSizeGrowth as BatchSizeGrowth
from pycomm.optim.lr_schedules import WarmupLR as WarmupLR
from pycomm.optim.lr_schedules import linear_scaled_lr as linear_scaled_lr
from pycomm.optim.lr_schedules import sqrt_scaled_lr as sqrt_scaled_lr
from pycomm.optim.master_weights import MasterWeights as MasterWeights
from pycomm.optim.master_weights import master_weights as master_weights
from pycomm.optim.shard_batch import Shard as Shard
from pycomm.optim.shard_batch import shard_batch as shard_batch

__all__ = _public_names(globals())

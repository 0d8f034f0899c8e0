"""Optimizer steps: fused rules, LARS and LAMB, master weights, loss scaling, learning-rate schedules, batch shards."""

from pycomm.optim.fused import FusedStep, fuse
from pycomm.optim.lamb import LAMB
from pycomm.optim.lars import LARS
from pycomm.optim.loss_scaler import LossScaler
from pycomm.optim.lr_schedules import (
    BatchSizeGrowth,
    CosineDecay,
    PolynomialDecay,
    StepDecay,
    WarmupLR,
    linear_scaled_lr,
    sqrt_scaled_lr,
)
from pycomm.optim.master_weights import MasterWeights, master_weights
from pycomm.optim.shard_batch import Shard, shard_batch

__all__ = [
    "LAMB",
    "LARS",
    "BatchSizeGrowth",
    "CosineDecay",
    "FusedStep",
    "LossScaler",
    "MasterWeights",
    "PolynomialDecay",
    "Shard",
    "StepDecay",
    "WarmupLR",
    "fuse",
    "linear_scaled_lr",
    "master_weights",
    "shard_batch",
    "sqrt_scaled_lr",
]

"""Optimizer steps: fused rules, LARS, LAMB, Muon, master weights, loss scaling, learning rates, batch shards."""

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
from pycomm.optim.matrices import muon_groups
from pycomm.optim.muon import Muon
from pycomm.optim.shard_batch import Shard, shard_batch

__all__ = [
    "LAMB",
    "LARS",
    "BatchSizeGrowth",
    "CosineDecay",
    "FusedStep",
    "LossScaler",
    "MasterWeights",
    "Muon",
    "PolynomialDecay",
    "Shard",
    "StepDecay",
    "WarmupLR",
    "fuse",
    "linear_scaled_lr",
    "master_weights",
    "muon_groups",
    "shard_batch",
    "sqrt_scaled_lr",
]

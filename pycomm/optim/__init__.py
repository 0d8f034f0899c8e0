"""pycomm in a training loop: ``attach`` and what it returns; optimizers, mixed precision, large batches."""

from pycomm.optim.attach import attach
from pycomm.optim.batches import Shard, shard_batch
from pycomm.optim.broadcast import broadcast_optimizer_state, broadcast_parameters
from pycomm.optim.fused import fuse
from pycomm.optim.lamb import LAMB
from pycomm.optim.lars import LARS
from pycomm.optim.master import MasterWeights, master_weights
from pycomm.optim.reducer import Reducer
from pycomm.optim.scaler import LossScaler
from pycomm.optim.schedules import (
    BatchSizeGrowth,
    CosineDecay,
    PolynomialDecay,
    StepDecay,
    WarmupLR,
    linear_scaled_lr,
    sqrt_scaled_lr,
)

__all__ = [
    "LAMB",
    "LARS",
    "BatchSizeGrowth",
    "CosineDecay",
    "LossScaler",
    "MasterWeights",
    "PolynomialDecay",
    "Reducer",
    "Shard",
    "StepDecay",
    "WarmupLR",
    "attach",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "fuse",
    "linear_scaled_lr",
    "master_weights",
    "shard_batch",
    "sqrt_scaled_lr",
]

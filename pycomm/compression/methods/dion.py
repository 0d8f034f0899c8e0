"""Directions of low rank, orthonormalised, in place of averages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.methods.powersgd import LowRankCodec


class DionCodec(LowRankCodec):
    """Codec that leaves P Q^T with columns of length 1, and keeps ``momentum`` of what it sent."""

    def __init__(self, bucket: Bucket, communicator: Communicator, rank: int, seed: int, momentum: float) -> None:
        super().__init__(bucket, communicator, rank, seed)
        self.share = 1.0 - momentum

    def received_qs(self) -> list[torch.Tensor]:
        return [torch.nn.functional.normalize(q, dim=0) for q in super().received_qs()]


@dataclass(frozen=True)
class DionFactors(CodecMethod):
    """Communication of :class:`pycomm.Dion`, whose ``factors`` this is: ``.grad`` of its matrices becomes P Q^T.

    Args:
        rank, momentum, seed: see there.
        optimizer: the optimizer, whose groups say which parameters are matrices.
    """

    rank: int
    momentum: float
    seed: int
    optimizer: torch.optim.Optimizer = field(repr=False, compare=False)

    averages = False
    """``.grad`` is no average: clipping it would change the length of a step."""

    def __post_init__(self) -> None:
        checks.integer("rank", self.rank, 1)
        checks.real("momentum", self.momentum, 0.0, 1.0)
        checks.integer("seed", self.seed, 0)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizer:
            raise ValueError(
                f"compression is the factors of another optimizer than this {type(optimizer).__name__}, wanted "
                "pycomm.attach(optimizer, model, compression=optimizer.factors) with a pycomm.Dion"
            )
        for group in optimizer.param_groups:
            for key in ("rank", "momentum", "seed"):
                if group["use_muon"] and group[key] != getattr(self, key):
                    raise ValueError(
                        f"{key} of a group of matrices is {group[key]}, and its factors have {getattr(self, key)}, as "
                        "the constructor was given: they do not follow a change of the group"
                    )
            for param in group["params"]:
                if self.applies_to(param) and param.stride(0) * param.shape[0] != param.numel():
                    raise ValueError(
                        f"a matrix of shape {list(param.shape)} has strides {list(param.stride())}, wanted rows one "
                        "after the other: give the optimizer a parameter of its .contiguous()"
                    )

    def applies_to(self, param: torch.Tensor) -> bool:
        groups = (group["params"] for group in self.optimizer.param_groups if group["use_muon"])
        return param.numel() > 0 and any(param is matrix for params in groups for matrix in params)

    def codec(self, bucket: Bucket, communicator: Communicator) -> DionCodec:
        return DionCodec(bucket, communicator, self.rank, self.seed, self.momentum)

"""Dion: orthonormalised updates of low rank, whose factors are averaged instead of gradients."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.compression.methods.dion import DionFactors
from pycomm.optim.attached import reducer_of
from pycomm.optim.matrices import MatrixOptimizer, Params, adjusted
from pycomm.optim.targets import Group

_OF_ALL = ("rank", "momentum", "seed")
"""Options that all groups share."""


class Dion(MatrixOptimizer):
    """Orthonormalised updates of low rank, whose factors the ranks average *instead of* gradients.

    ::

        optimizer = pycomm.Dion(pycomm.muon_groups(model, adamw={"lr": 3e-4}), lr=0.01, rank=32)
        reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)

    The step of each matrix W of m rows and n columns is (Ahn et al., "Dion: Distributed Orthonormalized Updates", 2025,
    algorithm 1; G is this rank's gradient, and a bar the mean over the ranks)::

        B = M + G
        P = the orthonormal columns of a QR decomposition of mean(B Q)     Q: that of the last step
        R = B^T P
        M = B - (1 - momentum) P R^T                                       what is not applied stays
        Q = mean(R), each column divided by its length
        W = (1 - lr * weight_decay) * W - lr * adjust(m, n) * P Q^T

    Each rank sends (m + n) * rank numbers per matrix, in two all-reduces. M differs between the ranks, and its mean is
    that of one process which has all samples, since each line is linear in B. Parameters in groups with
    ``use_muon=False`` are averaged as they are, and stepped by AdamW.

    It is a compression with an optimizer, since everything that compression has is required: factors are sent
    while backward runs; a step that is not finite on one rank leaves M and Q of all ranks as they were; M and Q are
    saved by name, and the sum of M is kept when the number of ranks changes. ``.grad`` of a matrix is P Q^T, and
    ``step()`` needs no communication. Hence clipping averages is refused (``clip_local_norm`` works), and so
    are ``average=False`` and a step without ``attach``.

    Args:
        params: parameters, or groups of them, as :func:`muon_groups` makes them. ``lr``, ``weight_decay``, ``adjust``,
            ``betas`` and ``eps`` may differ between groups.
        lr: learning rate. A group with ``use_muon=False`` sets its own.
        rank: number of columns of P and Q; the smaller dimension of the matrix if that is less.
        momentum: fraction of the applied part of B that stays in M.
        weight_decay, adjust, betas: as in :class:`Muon`.
        eps: that of AdamW.
        seed: seed of the first Q, equal on all ranks.

    Raises:
        TypeError: a parameter is complex, or a DTensor.
        ValueError: a number is out of range, a name is unknown, or a parameter is not a matrix.
        RuntimeError: from ``step``: it is not attached with its ``factors``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 0.01,
        *,
        rank: int,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        adjust: str | None = "spectral_norm",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            rank=rank,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn=adjust,
            betas=betas,
            eps=eps,
            seed=seed,
        )

    @property
    def factors(self) -> DionFactors:
        """Compression for ``attach``, which reduces this optimizer's matrices to their factors."""
        return DionFactors(**{key: self.defaults[key] for key in _OF_ALL}, optimizer=self)

    def check_matrix_group(self, group: Group) -> None:
        _ = self.factors  # checks its numbers
        for key in _OF_ALL:
            if group[key] != self.defaults[key]:
                raise ValueError(f"{key} of a group is {group[key]}, wanted that of all groups, {self.defaults[key]}")

    def step_matrices(self, group: Group, params: Params) -> None:
        reducer: Any = reducer_of(self)
        method = None if reducer is None else reducer.attached.method
        if method != self.factors or method.optimizer is not self:
            raise RuntimeError(
                "the gradients of these matrices are no factors: call "
                "pycomm.attach(optimizer, model, compression=optimizer.factors) before the backward pass"
            )
        torch._foreach_mul_(params, 1 - float(group["lr"]) * group["weight_decay"])
        for p in params:
            p.add_(p.grad, alpha=-adjusted(group, p.shape[0], p[0].numel()))  # type: ignore[arg-type]

"""Muon: momentum whose update of each matrix is orthogonalised."""

from __future__ import annotations

from typing import Any

import torch

from pycomm import checks
from pycomm.optim.matrices import MatrixOptimizer, Params, adjusted
from pycomm.optim.orthogonal import COEFFICIENTS, in_stacks, orthogonalized
from pycomm.optim.targets import Group


class Muon(MatrixOptimizer):
    """Momentum whose update of each matrix is orthogonalised by a Newton-Schulz iteration.

    The update of each matrix W of gradient G is (Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025)::

        B = momentum * B + (1 - momentum) * G
        U = momentum * B + (1 - momentum) * G        without nesterov: U = B
        O = U after ns_steps Newton-Schulz steps, whose singular values are all about 1
        W = (1 - lr * weight_decay) * W - lr * adjust(rows, columns) * O

    With the same options it takes the steps of ``torch.optim.Muon`` up to rounding, and loads its state. Matrices of
    one shape are multiplied in batches. Groups with ``use_muon=False`` are stepped by AdamW; :func:`muon_groups`
    makes the groups of a model. Parameters of more than two dimensions, such as weights of convolutions, are matrices
    of the first dimension by the rest.

    Args:
        params: parameters, or groups of them. Groups may set every option below, and ``use_muon``.
        lr: learning rate. A group with ``use_muon=False`` sets its own, unless ``adjust`` is "match_rms_adamw".
        weight_decay: decoupled weight decay, for both kinds of groups.
        momentum, nesterov: as above.
        ns_steps, ns_coefficients: steps of the Newton-Schulz iteration, and the three coefficients of its polynomial.
        eps: lower bound of the norm by which a matrix is divided first; the eps of AdamW in its groups, where 1e-8 is
            the default.
        adjust: factor of ``lr`` for a matrix. "original" (or ``None``), Keller Jordan's:
            sqrt(max(1, rows / columns)); "match_rms_adamw", Moonshot's: 0.2 * sqrt(max(rows, columns)), which makes
            the update as large as AdamW's; "spectral_norm": sqrt(rows / columns); "none": 1. In ``param_groups``
            its key is torch's, ``adjust_lr_fn``.
        split: number of equal blocks of rows that are orthogonalised separately, such as the heads of a matrix for
            queries, keys and values. Then ``adjust`` sees the blocks.
        ns_dtype: dtype of the iteration: float32, bfloat16 or float64; ``None``: float64 for float64 parameters; else
            bfloat16 where the processor multiplies in it, and float32 where it does not.
        betas: those of AdamW.

    Raises:
        TypeError: a parameter is complex, or a DTensor; a gradient is sparse, from ``step``.
        ValueError: a number is out of range, a name is unknown, or a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        adjust: str | None = "original",
        split: int = 1,
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            eps=eps,
            adjust_lr_fn=adjust,
            split=split,
            ns_dtype=ns_dtype,
            betas=betas,
        )

    def check_matrix_group(self, group: Group) -> None:
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum is {group['momentum']}, wanted 0 <= momentum < 1")
        checks.integer("ns_steps", group["ns_steps"], 1, 99)
        checks.integer("split", group["split"], 1)
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients is {group['ns_coefficients']}, wanted three numbers")
        if group["ns_dtype"] not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise ValueError(
                f"ns_dtype is {group['ns_dtype']}, wanted torch.float32, torch.bfloat16, torch.float64 or None"
            )

    def step_matrices(self, group: Group, params: Params) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        for p, grad in zip(params, grads, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        torch._foreach_lerp_([self.state[p]["momentum_buffer"] for p in params], grads, 1 - group["momentum"])
        torch._foreach_mul_(params, 1 - float(group["lr"]) * group["weight_decay"])
        for some in in_stacks(params):  # one stack after another, so that temporary memory is small
            self._step_stack(group, [params[i] for i in some], [grads[i] for i in some])

    def _step_stack(self, group: Group, params: Params, grads: Params) -> None:
        buffers, split = [self.state[p]["momentum_buffer"] for p in params], group["split"]
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        blocks = [block for update in updates for block in update.flatten(1).tensor_split(split)]
        options = [group[key] for key in ("ns_steps", "ns_coefficients", "eps", "ns_dtype")]
        blocks = orthogonalized(blocks, *options)
        for i, p in enumerate(params):
            rows, columns = blocks[split * i].shape
            direction = torch.cat(blocks[split * i : split * (i + 1)]) if split > 1 else blocks[i]
            p.add_(direction.reshape(p.shape), alpha=-adjusted(group, rows, columns))

"""Base of Muon and Dion, which step matrices as matrices and other parameters by AdamW; which parameter is which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from pycomm import checks
from pycomm.optim.layerwise import require_not_negative
from pycomm.optim.step_override import evaluate
from pycomm.optim.targets import Group
from pycomm.torch_internals import is_dtensor

ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "spectral_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}
"""Factors of the learning rate by name, for a matrix of so many rows and columns."""

Params = list[torch.Tensor]


class MatrixOptimizer(torch.optim.Optimizer):
    """Optimizer of matrices; groups with ``use_muon=False`` are stepped by AdamW.

    Parameters of more than two dimensions are matrices of the first dimension by the rest.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {**defaults, "use_muon": True})

    def check_matrix_group(self, group: Group) -> None:
        """Raise TypeError or ValueError if an option of ``group``, whose parameters are matrices, is out of range."""
        raise NotImplementedError

    def step_matrices(self, group: Group, params: Params) -> None:
        """Step ``params``, those of ``group`` that have a gradient."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options are checked; TypeError or ValueError if one is out of range."""
        if "adjust" in param_group:
            param_group["adjust_lr_fn"] = param_group.pop("adjust")
        group = {**self.defaults, **param_group}
        checks.flag("use_muon", group["use_muon"])
        if not group["use_muon"]:
            if "lr" not in param_group and group["adjust_lr_fn"] != "match_rms_adamw":
                raise ValueError(
                    "lr of a group with use_muon=False is missing, wanted one of its own: AdamW takes the same lr only "
                    'beside adjust="match_rms_adamw"'
                )
            param_group.setdefault("eps", 1e-8)
            group["eps"] = param_group["eps"]
        self._check(group)
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            _check_parameter(param, self.param_groups[-1])

    def _check(self, group: Group) -> None:
        require_not_negative(group, "lr", "weight_decay", "eps")
        for i, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{i}] is {beta}, wanted 0 <= beta < 1")
        if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(f"adjust is {group['adjust_lr_fn']!r}, wanted one of {', '.join(map(str, ADJUSTMENTS))}")
        if group["use_muon"]:
            self.check_matrix_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the loss that ``closure`` computes, if it is given."""
        loss = evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.layout != torch.strided for p in params):
                raise TypeError("a gradient is sparse, wanted dense gradients")
            if params and group["use_muon"]:
                self.step_matrices(group, params)
            elif params:
                self._step_by_adamw(group, params)
        return loss

    def _step_by_adamw(self, group: Group, params: Params) -> None:
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
        beta1, beta2 = group["betas"]
        averages, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        grads = [p.grad for p in params if p.grad is not None]
        adamw(
            *(params, grads, averages, squares, [], steps),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        before: list[Group] = vars(self).get("param_groups", [])  # none if this is being unpickled
        super().__setstate__(state)
        for number, group in enumerate(self.param_groups):  # torch's Muon and others save fewer options
            known = before[number] if number < len(before) else {}
            for key, value in self.defaults.items():
                group.setdefault(key, known.get(key, value))


def _check_parameter(param: torch.Tensor, group: Group) -> None:
    shape = list(param.shape)
    if param.is_complex():
        raise TypeError(f"a parameter of shape {shape} has dtype {param.dtype}, wanted real numbers")
    if not group["use_muon"]:
        return
    if param.dim() < 2:
        raise ValueError(
            f"a parameter has shape {shape}, wanted a matrix: put it into a group with use_muon=False, as "
            "pycomm.muon_groups does"
        )
    if is_dtensor(param):
        raise TypeError(f"a parameter of shape {shape} is a DTensor, wanted one that this rank has whole")
    if shape[0] % group.get("split", 1) != 0:
        raise ValueError(f"split is {group['split']}, wanted a divisor of the {shape[0]} rows of each matrix")


def adjusted(group: Group, rows: int, columns: int) -> float:
    """Return the learning rate of ``group`` for a matrix of so many rows and columns."""
    adjust = ADJUSTMENTS[group["adjust_lr_fn"] or "original"]
    return float(group["lr"]) * adjust(rows, max(1, columns))


def muon_groups(
    model: torch.nn.Module,
    *,
    adamw: Mapping[str, Any],
    head: str | None = None,
    by_adamw: Collection[str] = (),
    split: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of ``model`` for :class:`pycomm.Muon` and :class:`pycomm.Dion`: matrices, and the rest.

    These go to AdamW; all other trainable parameters are matrices:

    - parameters of fewer than two dimensions: biases, parameters of norm layers;
    - those of a single row or column, also convolutions and positions that have one if flattened;
    - weights of ``nn.Embedding`` and ``nn.EmbeddingBag``, also if another layer shares them;
    - the output head, which is the last module with a matrix, in the model's order;
    - parameters under a name in ``by_adamw``, such as positions that are a matrix outside ``nn.Embedding``.

    Args:
        model: the module to train.
        adamw: options of the group for AdamW: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        head: name of the output head instead; ``""`` if there is none.
        by_adamw: names of parameters, or of modules.
        split: number of equal row blocks by name of a parameter or module, or by the last part of it: ``{"qkv": 3}``
            orthogonalises queries, keys and values separately, and 3 times the number of heads each head.

    Raises:
        ValueError: a name is none of the model's.
    """
    embeddings = [part for part in model.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    shared = {id(p) for part in embeddings for p in part.parameters(recurse=False)}
    owners = [name for name, part in model.named_modules() if any(map(_is_matrix, part.parameters(recurse=False)))]
    head = (owners[-1] if owners else "") if head is None else head
    elsewhere, blocks = [*by_adamw, *([head] if head else [])], dict(split or {})
    groups: dict[int, list[torch.Tensor]] = {0: []}
    met: set[str] = set()
    for name, param in model.named_parameters():
        met.update(_names_of(name))
        if not param.requires_grad:
            continue
        is_other = id(param) in shared or not _is_matrix(param) or any(n in _paths_of(name) for n in elsewhere)
        parts = 0 if is_other else next((blocks[n] for n in _names_of(name) if n in blocks), 1)
        groups.setdefault(parts, []).append(param)
    met.update(name for name, _ in model.named_parameters(remove_duplicate=False))
    met.update(name for name, _ in model.named_modules(remove_duplicate=False))
    for name in (*elsewhere, *blocks):
        if name not in met:
            raise ValueError(f"the model has no parameter or module {name!r}, wanted names of its parts")
    others = {"params": groups.pop(0), **adamw, "use_muon": False}
    matrices: list[dict[str, Any]] = [
        {"params": params, "use_muon": True} | ({"split": parts} if parts != 1 else {})
        for parts, params in sorted(groups.items())
    ]
    return [group for group in (*matrices, others) if group["params"]]


def _is_matrix(param: torch.Tensor) -> bool:
    return param.dim() >= 2 and param.shape[0] > 1 and param.numel() > param.shape[0]


def _paths_of(name: str) -> list[str]:
    """Return the names of a parameter and of the modules around it: "a.b.weight", "a.b", "a"."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _names_of(name: str) -> list[str]:
    """Return those, and the last part of each."""
    return [given for path in _paths_of(name) for given in (path, path.rpartition(".")[2])]

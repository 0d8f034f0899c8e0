"""Checks of the arguments of ``local_sgd``, ``gossip`` and ``parameter_server``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pycomm import checks
from pycomm.collectives.broadcasting import signature
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_dense
from pycomm.compression.base import Compression
from pycomm.compression.dense import NoCompression
from pycomm.optim.attached import refuse_second_average
from pycomm.optim.parameter_checks import refuse_overlaps
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import HALF
from pycomm.training.cost.named import checked_method, refuse_local_norm
from pycomm.training.reducer import Ignored


def checked_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, every: Any, fragments: Any = 1, call: str = "local_sgd()"
) -> dict[str, torch.Tensor]:
    """Return the parameters by name. Raise TypeError or ValueError if these cannot be averaged."""
    checks.count("every", every, 1)
    checks.instance("model", model, torch.nn.Module)
    named: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if checks.count("fragments", fragments, 1) > min(every, len(met_once(named, call))):
        raise ValueError(f"fragments={fragments}, wanted at most every={every} and the {len(named)} parameters")
    refuse_second_average(named, call)
    own = {id(p) for p in optimizer_parameters(optimizer)}
    left = next((name for name, p in named.items() if id(p) not in own), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    there = {id(p) for p in model.parameters()}
    alone = next((p for p in optimizer_parameters(optimizer) if p.requires_grad and id(p) not in there), None)
    if alone is not None:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(alone.shape)} that is not in the model, so it would not be "
            "averaged: pass a module that has all of them"
        )
    halves = HALF if call == "local_sgd()" else ()
    wide = {(torch.float32 if p.dtype in halves else p.dtype, p.device) for p in named.values()}
    if len(wide) != 1 or next(iter(wide))[0] not in (torch.float32, torch.float64):
        kinds = ", ".join(sorted({f"{p.dtype} on {p.device}" for p in named.values()}))
        wanted = "all float64, or float32 and half types," if halves else "all float32 or all float64"
        raise ValueError(f"parameters are {kinds}, wanted {wanted} on one device")
    return named


def met_once(named: Mapping[str, torch.Tensor], call: str) -> dict[str, torch.Tensor]:
    """Return ``named`` without parameters in the memory of another (tied by ``.data``), which is averaged for both.

    Raises:
        ValueError: two have only a part of their memory in common; ``call`` is the refused function.
    """
    met: dict[Any, tuple[str, torch.Tensor]] = {}
    for name, p in named.items():
        met.setdefault((p.data_ptr(), p.nbytes) if p.numel() > 0 and is_dense(p) else name, (name, p))
    refuse_overlaps(dict(met.values()), call)
    return dict(met.values())


def lines_of(named: Mapping[str, torch.Tensor], call: str) -> list[str]:
    """Return properties of ``named`` that all ranks must share."""
    met = met_once(named, call)
    return [f"{name}: {signature(p)}{'' if name in met else ', in the memory of another'}" for name, p in named.items()]


def checked_per_rank(per_rank: Any, optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> Ignored:
    """Return the names. Raise TypeError or ValueError if one names neither numbers of groups nor buffers."""
    if isinstance(per_rank, str) or not isinstance(per_rank, Iterable):
        raise TypeError(f'per_rank is {per_rank!r}, wanted names of numbers of parameter groups, like ("lr",)')
    names = tuple(per_rank)
    known = {key for group in ([] if optimizer is None else optimizer.param_groups) for key in group} - {"params"}
    buffers = dict(model.named_buffers())
    for name in names:
        if name not in known and not fnmatch.filter(buffers, str(name)):
            raise ValueError(f"per_rank has {name!r}, wanted {', '.join(['buffers', *sorted(known)])}")
    return Ignored(names, {name: x for name, x in buffers.items() if Ignored(names).matches(name)})


def name_of_not_finite(communicator: Communicator, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return which tensor of which rank is not finite, for errors. Collective."""
    mine = next((name for name, x in named if not torch.isfinite(x).all()), "")
    for rank, name in enumerate(communicator.channel.all_gather_bytes(mine.encode())):
        if name:
            return f"{name.decode()!r} is not finite on rank {rank}"
    return "they are finite, but too large to be added"


SELDOM = "measures many steps, and ranks that meet this seldom have few"


def named_method(compression: Any, why_not_auto: str = SELDOM) -> Compression | None:
    """Return the method; ``None`` for no compression. Raise ValueError for "auto", with the reason."""
    method = checked_method(compression)
    refuse_local_norm(method, "an average over several steps")
    if method.measures:
        raise ValueError(f'compression="auto" {why_not_auto}: name a method')
    return None if isinstance(method, NoCompression) else method


def check_outer(method: Compression | None, outer: Any) -> None:
    """Raise ValueError, which names ``outer``, if ``method`` does not suit the outer optimizer, where there is one."""
    if method is None or not hasattr(outer, "optimizer"):
        return
    try:
        method.check(outer.optimizer([torch.zeros(1)]))
    except ValueError as error:
        raise ValueError(f"outer={outer!r}: {error}") from error

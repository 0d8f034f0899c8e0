"""Methods that ``bench.slow_network`` compares: how each keeps the ranks' gradients equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm

COMPUTE = "compute"
DENSE, FP16, DGC, AUTO, CONTROL = "dense", "fp16", "dgc", "auto", "control"
DDP, DDP_FP16, DDP_POWERSGD = "ddp", "ddp-fp16", "ddp-powersgd"
_POWERSGD_START = 2  # the first pass that the hook may compress
_BYTES_PER_MB = 2**20


class MissingMethodError(Exception):
    """pycomm as it is installed has no such method; says which."""


@dataclass(frozen=True)
class Knobs:
    """Settings of the methods, equal on all ranks.

    Attributes:
        momentum: every method trains by SGD with this momentum.
        ratio: the part of the gradient that sparse methods send.
        rank: of the matrices that PowerSGD sends.
        dgc_warmup: steps in which DGC comes down to its ratio.
        patience: seconds, for every wait of a rank for another.
    """

    momentum: float
    ratio: float
    rank: int
    dgc_warmup: int
    patience: float


@dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
        label: for people.
        hook: DistributedDataParallel with this; ``None``: not DDP. Gets the model wrapped by DDP.
        one_bucket: all gradients that are compressed travel in one piece.
        compression: what ``pycomm.attach`` is given; ``None``: not pycomm.
        needs: what pycomm must have for that.
        own_momentum: the method applies momentum; the optimizer must have none.
        varies: what it sends, and so what it learns, depends on the link.
        shard: what the ranks step together, as ``pycomm.attach`` has it.
    """

    label: str
    hook: Callable[[DistributedDataParallel, Knobs], None] | None = None
    one_bucket: bool = False
    compression: Callable[[Knobs], Any] | None = None
    needs: str | None = None
    own_momentum: bool = False
    varies: bool = False
    shard: str | None = None


def _no_hook(_module: DistributedDataParallel, _knobs: Knobs) -> None:
    pass


def _fp16_hook(module: DistributedDataParallel, _knobs: Knobs) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module.register_comm_hook(None, fp16_compress_hook)


def _powersgd_hook(module: DistributedDataParallel, knobs: Knobs) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=knobs.rank, start_powerSGD_iter=_POWERSGD_START
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _by_name(name: str, *arguments: Any, **settings: Any) -> Any:
    """Return ``pycomm.NAME(...)``, looked up when it is wanted: not every pycomm has all of them."""
    return getattr(pycomm, name)(*arguments, **settings)


def _dgc(knobs: Knobs) -> Any:
    return _by_name("DGC", knobs.ratio, momentum=knobs.momentum, warmup_steps=knobs.dgc_warmup)


METHODS: dict[str, Method] = {
    DDP: Method("DDP", hook=_no_hook),
    DDP_FP16: Method("DDP, fp16 hook", hook=_fp16_hook),
    # Several buckets make the hook send from several threads at once, which Gloo does not survive.
    DDP_POWERSGD: Method("DDP, PowerSGD hook", hook=_powersgd_hook, one_bucket=True),
    DENSE: Method("pycomm, dense", compression=lambda _: None),
    "shard": Method("pycomm, shard", compression=lambda _: None, shard="optimizer"),
    FP16: Method("pycomm, FP16", compression=lambda _: _by_name("FP16"), needs="FP16"),
    "bf16": Method("pycomm, BF16", compression=lambda _: _by_name("BF16"), needs="BF16"),
    "fp8": Method("pycomm, FP8", compression=lambda _: _by_name("FP8"), needs="FP8"),
    "int8": Method("pycomm, Int8", compression=lambda _: _by_name("Int8"), needs="Int8"),
    "int4": Method("pycomm, Int4", compression=lambda _: _by_name("Int4"), needs="Int4"),
    "powersgd": Method("pycomm, PowerSGD", compression=lambda k: _by_name("PowerSGD", k.rank), needs="PowerSGD"),
    # Where the cores are busy anyway, nothing is gained by sending in pieces what is little.
    DGC: Method("pycomm, DGC", one_bucket=True, compression=_dgc, needs="DGC", own_momentum=True),
    AUTO: Method("pycomm, auto", one_bucket=True, compression=lambda _: "auto", varies=True),
    CONTROL: Method(
        "control: TopK, no feedback",
        one_bucket=True,
        compression=lambda k: _by_name("TopK", k.ratio, error_feedback=False),
        needs="TopK",
    ),
}


def label_of(name: str) -> str:
    return "no communication" if name == COMPUTE else METHODS[name].label


def check_present(names: Sequence[str]) -> None:
    """Check that pycomm has all that ``names`` need.

    Raises:
        MissingMethodError: it lacks one.
    """
    for name in names:
        needs = METHODS[name].needs
        if needs is not None and not hasattr(pycomm, needs):
            raise MissingMethodError(f"method {name!r} needs pycomm.{needs}, which this pycomm does not have")


class Synchronized:
    """A model whose gradients are averaged by one of the ``METHODS``, or left alone (``COMPUTE``).

    Collective: every rank makes it. ``forward`` is what to call in place of the model.
    """

    def __init__(self, name: str, model: nn.Module, learning_rate: float, knobs: Knobs) -> None:
        method = None if name == COMPUTE else METHODS[name]
        momentum = 0.0 if method is not None and method.own_momentum else knobs.momentum
        self.forward = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, fused=True)
        self._reducer: pycomm.Reducer | None = None
        if method is not None and method.hook is not None:
            self.forward = _distributed(model, method.one_bucket)
            method.hook(self.forward, knobs)
        elif method is not None and method.compression is not None:
            self._reducer = pycomm.attach(
                self.optimizer,
                model,
                compression=method.compression(knobs),
                tuning=pycomm.Tuning(
                    bucket_mb=_whole_mb(model) if method.one_bucket else 25, timeout=timedelta(seconds=knobs.patience)
                ),
                shard=method.shard,
            )

    def stats(self) -> dict[str, Any]:
        """Return what pycomm says of itself; nothing of the others.

        Raises:
            RuntimeError: pycomm does not go over the network.
        """
        if self._reducer is None:
            return {}
        stats = self._reducer.stats()
        if stats["transport"] not in ("tcp", "hierarchical"):
            raise RuntimeError(f"pycomm's transport is {stats['transport']}, wanted one over the network")
        return stats

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.detach()


def _distributed(model: nn.Module, one_bucket: bool) -> DistributedDataParallel:
    # DDP at its best: its default copies every gradient once more.
    if not one_bucket:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=2 * _whole_mb(model) + 1)


def _whole_mb(model: nn.Module) -> float:
    return sum(parameter.nbytes for parameter in model.parameters()) / _BYTES_PER_MB

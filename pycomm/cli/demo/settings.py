"""Settings of a demo run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pycomm

if TYPE_CHECKING:
    from pycomm.compression import Compression

COMPRESSIONS = ("topk", "fp16", "bf16", "none")
HEAD_WIDTH = 64
TURN_STEPS = 10
"""Number of steps in a turn: the runs take turns, so that other load on the machine affects all of them alike."""
WARM_UP_STEPS = 5
"""Steps of each run that are not timed: first allocations and connections, pycomm's first pass, which only learns."""
MIN_STEPS = 2 * TURN_STEPS


@dataclass(frozen=True)
class Method:
    """Method to average gradients.

    Attributes:
        label: a name for people.
        uses_ddp: by torch's DistributedDataParallel; else by pycomm with ``compression``.
    """

    label: str
    uses_ddp: bool = False
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one demo run, equal on all ranks.

    Attributes:
        batch: windows of text per rank and step.
        context: bytes per window.
        width, layers: the size of the model.
    """

    ranks: int
    methods: tuple[Method, ...]
    steps: int
    seed: int
    batch: int
    context: int
    width: int
    layers: int
    output: Path


def methods_for(compressions: Sequence[str], ratio: float) -> tuple[Method, ...]:
    """Return DDP, pycomm dense, and pycomm with each of ``compressions``, without repetitions."""
    compressed = {
        "topk": Method(f"pycomm TopK {100 * ratio:g} %", compression=pycomm.TopK(ratio)),
        "fp16": Method("pycomm FP16", compression=pycomm.FP16()),
        "bf16": Method("pycomm BF16", compression=pycomm.BF16()),
    }
    chosen = [compressed[name] for name in dict.fromkeys(compressions) if name != "none"]
    return (Method("DDP over Gloo", uses_ddp=True), Method("pycomm dense"), *chosen)


def ranks_of(settings: Settings) -> str:
    return "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks"

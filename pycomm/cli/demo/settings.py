"""What a demo run is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pycomm
from pycomm.compression import Compression

COMPRESSIONS = ("topk", "fp16", "bf16", "none")
HEAD_WIDTH = 64
TURN_STEPS = 10
"""The runs take turns of this many steps, so that whatever else the machine does meets all of them alike."""
WARM_UP_STEPS = 5
"""Of each run; no timing counts them: first allocations, first connections, pycomm's pass that only learns."""
MIN_STEPS = 2 * TURN_STEPS


@dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
        label: for people.
        uses_ddp: torch's DistributedDataParallel; pycomm with ``compression`` otherwise.
    """

    label: str
    uses_ddp: bool = False
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One demo run, equal on all ranks.

    Attributes:
        batch: windows of text per rank and step.
        context: bytes per window.
        width, layers: of the model.
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
    """DDP, pycomm dense, and pycomm with each of ``compressions``, without repetitions."""
    compressed = {
        "topk": Method(f"pycomm TopK {100 * ratio:g} %", compression=pycomm.TopK(ratio)),
        "fp16": Method("pycomm FP16", compression=pycomm.FP16()),
        "bf16": Method("pycomm BF16", compression=pycomm.BF16()),
    }
    chosen = [compressed[name] for name in dict.fromkeys(compressions) if name != "none"]
    return (Method("DDP over Gloo", uses_ddp=True), Method("pycomm dense"), *chosen)


def ranks_of(settings: Settings) -> str:
    return "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks"

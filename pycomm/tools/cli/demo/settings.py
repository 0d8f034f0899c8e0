"""Settings of a demo run, and the methods that each of its parts compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEAD_WIDTH = 64
MOMENTUM = 0.9
DGC_RATIO = 0.01


@dataclass(frozen=True)
class DemoMethod:
    """Method to average gradients.

    Attributes:
        label: name to display.
        ddp: by torch's DistributedDataParallel; else by pycomm.
        fp16_hook: with DDP's hook that compresses to float16.
        dgc: with DGC that sends this fraction of the entries.
        shard: as for ``pycomm.attach``.
    """

    label: str
    ddp: bool = False
    fp16_hook: bool = False
    dgc: float | None = None
    shard: str | None = None

    @property
    def advice(self) -> str:
        """What a script writes for it."""
        options = f", shard={self.shard!r}".replace("'", '"') if self.shard else ""
        if self.dgc is None:
            return f"pycomm.attach(optimizer, model{options})"
        options += f", compression=pycomm.DGC({self.dgc:g}, momentum={MOMENTUM:g})"
        return f"pycomm.attach(optimizer, model{options}), with an SGD optimizer without momentum"


HOST_METHODS = (
    DemoMethod("DDP over Gloo", ddp=True),
    DemoMethod("pycomm.attach"),
    DemoMethod('attach(shard="optimizer")', shard="optimizer"),
)
LINK_METHODS = (
    DemoMethod("DDP", ddp=True),
    DemoMethod("DDP, fp16 hook", ddp=True, fp16_hook=True),
    DemoMethod("pycomm dense"),
    DemoMethod(f"pycomm DGC {100 * DGC_RATIO:g} %", dgc=DGC_RATIO),
)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of one demo run, equal on all ranks.

    Attributes:
        megabits: rate of the slow link.
        hosts: namespaces that the ranks move to for the slow link, by rank; empty: it is simulated.
        seconds: of training, all runs together.
        batch: windows of text per rank and step.
        context: bytes per window.
        width, layers: the size of the model.
    """

    ranks: int
    megabits: float
    hosts: tuple[str, ...]
    seconds: float
    kill: bool
    seed: int
    batch: int
    context: int
    width: int
    layers: int
    output: Path

    @property
    def link(self) -> str:
        """Name of the slow link."""
        rate = f"{self.megabits / 1000:g} Gbit/s" if self.megabits >= 1000 else f"{self.megabits:g} Mbit/s"
        return f"{'' if self.hosts else 'simulated '}link of {rate}"

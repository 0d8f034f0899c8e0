"""Sorting parameters into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression import Compression, NoCompression
from pycomm.compression.base import Exchange
from pycomm.reducer.autograd_hooks import GradientHook
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


@dataclass(eq=False)
class Slot:
    """A parameter and where its gradient is in the current pass."""

    name: str
    param: torch.Tensor
    lane: Lane | None = None
    index: int = 0
    """Of the parameter in its lane's bucket."""
    expected: int = 0
    """How often its gradient is accumulated in one pass; 0 until one pass has been seen."""
    fired: int = 0
    version: int = -1
    """Of the averaged gradient, when it was handed out."""
    hook: GradientHook | None = None

    def fire(self) -> None:
        """Its gradient has been accumulated, once more."""
        self.fired += 1
        lane = self.lane
        if self.fired == self.expected and lane is not None and lane.num_awaited is not None:
            lane.num_awaited -= 1

    def adopt(self) -> None:
        """Let later passes of this window accumulate in the bucket itself."""
        grad, lane = self.param.grad, self.lane
        assert grad is not None
        assert lane is not None
        view = lane.bucket.views[self.index]
        if grad is not view and not lane.bucket.holds(self.index, grad):
            view.copy_(grad)
            self.param.grad = view

    def show_bucket(self) -> None:
        """Let ``.grad``, if there is one, be what lies in the bucket."""
        if self.param.grad is not None and self.lane is not None:
            self.param.grad = self.lane.bucket.views[self.index]

    def untouched(self) -> bool:
        """Whether ``.grad`` is what was handed out last."""
        grad = self.param.grad
        if grad is None or self.lane is None:
            return grad is None
        bucket = self.lane.bucket
        same = grad is bucket.views[self.index] and grad._version == self.version
        return same and bucket.holds(self.index, grad)  # .grad.data may be something else by now


@dataclass(eq=False)
class Lane:
    """A bucket on its way: who is in it, how it travels, how far it has come in this pass."""

    slots: list[Slot]
    bucket: Bucket
    exchange: Exchange
    compressed: bool
    work: Work | GpuWork | None = field(default=None)
    producers: set[int] = field(default_factory=set)
    """The streams, as integers, that this pass's gradients came from; on a GPU."""
    squares: torch.Tensor | None = None
    """The squared norm of each gradient, as it was received, if ``measured`` in this step; float64."""
    measured: bool = False
    norm_scratch: kernels.Scratch = field(default_factory=kernels.Scratch)
    num_awaited: int | None = None
    """Gradients that this pass has yet to bring; ``None`` while it is unknown how often they come."""

    def begin_pass(self) -> None:
        self.measured = False
        known = True
        for slot in self.slots:
            slot.fired = 0
            known = known and slot.expected > 0
        self.num_awaited = len(self.slots) if known else None
        self.bucket.repair()
        self.bucket.leave_to_users()

    def ready(self) -> bool:
        return self.num_awaited == 0


def make_lanes(
    slots: Sequence[Slot],
    compression: Compression,
    communicator: Communicator,
    bucket_bytes: int,
    algorithm: str = "auto",
) -> list[Lane]:
    """Buckets in the reverse order of ``slots``, which is about the order in which gradients come.

    A function of the parameters alone, so all ranks make the same buckets. Each holds parameters of
    one dtype that travel one way, up to ``bucket_bytes`` (or one larger parameter).
    """
    lanes = []
    for members, compressed in _groups(reversed(slots), compression, bucket_bytes):
        bucket = Bucket([s.name for s in members], [s.param for s in members], communicator, algorithm)
        method = compression if compressed else compression.otherwise or NoCompression()
        lane = Lane(members, bucket, method.make(bucket, communicator), compressed)
        for index, slot in enumerate(members):
            slot.lane, slot.index = lane, index
        lanes.append(lane)
    return lanes


def _groups(slots: Iterable[Slot], compression: Compression, bucket_bytes: int) -> list[tuple[list[Slot], bool]]:
    closed: list[tuple[list[Slot], bool]] = []
    open_: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    sizes: dict[tuple[torch.dtype, bool], int] = {}
    for slot in slots:
        key = (slot.param.dtype, compression.applies_to(slot.param))
        if key in open_ and sizes[key] + slot.param.nbytes > bucket_bytes:
            closed.append((open_.pop(key), key[1]))
        if key not in open_:
            open_[key], sizes[key] = [], 0
        open_[key].append(slot)
        sizes[key] += slot.param.nbytes
    return closed + [(members, compressed) for (_, compressed), members in open_.items()]


def method_stats(lanes: Iterable[Lane]) -> dict[str, float]:
    """What the exchanges have counted, added up, and how often selection missed."""
    total: dict[str, float] = {}
    for lane in lanes:
        for key, value in lane.exchange.stats().items():
            total[key] = total.get(key, 0) + value
    if total.get("selections"):
        total["miss_rate"] = total["selections_missed"] / total["selections"]
    return total


def nonfinite_source(lanes: Iterable[Lane]) -> str:
    """Where the non-finite values of the last step that had any came from."""
    return next((found for lane in lanes if (found := lane.exchange.nonfinite_source())), "a sum over the ranks")

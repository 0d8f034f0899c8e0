"""A kernel to measure, described once for every device: its memory, its calls, and the bytes it has to move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from bench.kernels.resnet50 import Shape

SCALE = 0.5  # a power of two: both sides' results are then equal to the bit
CPU = torch.device("cpu")

Call = Callable[[], object]
_T = TypeVar("_T")


class Arrays:
    """Memory for the calls of a case, normally distributed and made when it is first used.

    Cases may share one, so that a small machine can hold them all; calls that must not find their data in the cache
    take turns on several.

    Args:
        shapes: shapes of the gradients; flat arrays have as many elements as all of them.
        generator: source of the random numbers, a new one by default.
    """

    def __init__(
        self, shapes: Sequence[Shape], device: torch.device = CPU, generator: torch.Generator | None = None
    ) -> None:
        self.shapes, self.device = list(shapes), device
        self.generator = torch.Generator(device).manual_seed(0) if generator is None else generator
        self.count = sum(math.prod(shape) for shape in shapes)
        self._made: dict[Any, Any] = {}

    @cached_property
    def flat(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return self.normal(self.count)

    @cached_property
    def grads(self) -> list[torch.Tensor]:
        """The gradients, each in memory of its own."""
        return [part.clone() for part in self.views(self.flat)]

    @cached_property
    def half(self) -> torch.Tensor:
        """``flat`` in float16."""
        return self.flat.half()

    @cached_property
    def others(self) -> list[torch.Tensor]:
        """Three more flat arrays to read from."""
        return [self.normal(self.count) for _ in range(3)]

    @cached_property
    def out(self) -> torch.Tensor:
        """A flat array to write to."""
        return self.normal(self.count)

    @cached_property
    def outs(self) -> list[torch.Tensor]:
        """``out``, cut up like the gradients."""
        return self.views(self.out)

    def once(self, make: Callable[[Arrays], _T]) -> _T:
        """Return ``make(self)``, which is made once for all cases that share this memory."""
        if make not in self._made:
            self._made[make] = make(self)
        found: _T = self._made[make]
        return found

    def normal(self, shape: int | Shape) -> torch.Tensor:
        """Return a new random tensor."""
        size = (shape,) if isinstance(shape, int) else shape
        return torch.randn(size, generator=self.generator, device=self.device)

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a new flat tensor that is yet to be written."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut ``flat`` up like the gradients."""
        parts = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True)
class Calls:
    """Both sides of a case, on memory that they have.

    Attributes:
        verify: raises ``AssertionError`` if either side is wrong.
        prepare: runs before each timed call of the peer, outside the time; only where arrays have one user.
    """

    ours: Call
    peer: Call
    verify: Callable[[], None]
    prepare: Call = field(default=lambda: None)


@dataclass(frozen=True)
class Case:
    """One kernel, or one step of an optimizer, and the best that torch has for the same.

    Attributes:
        floor_bytes: bytes that have to move, whoever does it, each once.
        make: makes the calls, on any device.
        floor: speed that the floor is computed from: of a copy (bytes read + bytes written), or of reading alone.
        num_arrays: how many :class:`Arrays` are enough, however many calls take turns; ``None``: one for each.
    """

    name: str
    peer_name: str
    floor_bytes: int
    make: Callable[[Arrays], Calls]
    floor: Literal["copy", "read"] = "copy"
    num_arrays: int | None = None


def require(good: bool, what: str) -> None:
    """Raise ``AssertionError`` unless ``good``."""
    if not good:
        raise AssertionError(f"{what}: wrong")


def require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raise ``AssertionError`` unless both are equal to the bit."""
    if not torch.equal(got, wanted):
        differ = int((got != wanted).sum()) if got.shape == wanted.shape else got.numel()
        raise AssertionError(f"{what}: {differ} of {wanted.numel()} elements are wrong")


def require_written(out: torch.Tensor, wanted: torch.Tensor, calls: Sequence[Call], what: str) -> None:
    """Raise ``AssertionError`` unless each of ``calls``, ours and perhaps torch's, fills ``out`` with ``wanted``."""
    for call, side in zip(calls, ("ours", "torch's"), strict=False):
        out.zero_()
        call()
        require_equal(out, wanted, f"{what}, {side}")


def require_finite_check(tensors: Sequence[torch.Tensor], call: Call, what: str) -> None:
    """Raise ``AssertionError`` unless ``call`` tells ``tensors`` with an infinity from those without one."""
    place = tensors[-1].view(-1)[-1:]
    kept = place.clone()
    place.fill_(math.inf)
    seen = not bool(call())
    place.copy_(kept)
    if not seen or not bool(call()):
        raise AssertionError(f"{what}: the finite check is wrong")

"""Settings and counters of a registration, and whether this rank still takes part."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.compression import Compression
from pycomm.compression.base import Exchange, Flag, Scaling, method_stats
from pycomm.compression.nonfinite import NonfiniteSource, Sent
from pycomm.optim.loss_scaler import checked_scaler, scale_of
from pycomm.optim.parameters import unwrapped
from pycomm.training.cost.auto import checked_method
from pycomm.training.reducer import Tuning


@dataclass(frozen=True)
class HookSettings:
    """Arguments of a registration; equal on all ranks, except that some may not name their optimizer."""

    method: Compression
    loss_scaler: Any
    algorithm: str
    optimizer: torch.optim.Optimizer | None
    comparison: Tuning

    def lines(self) -> list[str]:
        """Return one line per setting, to be compared between the ranks."""
        return [
            f"compression={self.method!r}",
            f"loss_scaler={type(self.loss_scaler).__name__}",
            f"algorithm={self.algorithm}",
            f"comparison={self.comparison!r}",
        ]


def checked_settings(
    compression: Any, loss_scaler: Any, optimizer: Any, algorithm: Any, **comparison: Any
) -> HookSettings:
    """Return the arguments of a registration as checked settings; ``comparison``: those of ``Tuning``."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm is {algorithm!r}, wanted a name")
    method = checked_method(compression)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer or None")
        optimizer = unwrapped(optimizer)
        method.check(optimizer)
    return HookSettings(method, checked_scaler(loss_scaler), algorithm, optimizer, Tuning(**comparison))


class HookProgress:
    """Progress of the steps of a model.

    Args:
        communicators: communicators that this rank leaves after an error; the first one averages gradients.

    Attributes:
        committed, nonfinite: numbers of steps that changed state, and of those that were not finite: 0-d int64 tensors
            on ``device``.
        source: rank and parameter of the last non-finite gradient.
        num_steps: number of backward passes that were averaged.
        wait_seconds: time for which communication held up ``backward()``.
        is_open: whether a step has begun and not ended.
        stopped: error after which this rank no longer takes part; "" without one.
    """

    def __init__(self, communicators: Sequence[Communicator], settings: HookSettings, device: torch.device) -> None:
        self._communicators, self.device, self.on_gpu = communicators, device, device.type == "cuda"
        self._scaler = settings.loss_scaler
        self.committed = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self.source = NonfiniteSource()
        self._count, self.wait_seconds = [0], 0.0
        for communicator in communicators:
            communicator.channel.farewell = functools.partial(_farewell, self._count)  # keeps nothing else alive
        self.is_open, self.stopped = False, ""

    @property
    def num_steps(self) -> int:
        return self._count[0]

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._count[0] = number

    def scaling(self) -> Scaling:
        """Return the scaling of the step that begins."""
        # A copy on a GPU: the count may be incremented before the GPU has read it for this step.
        step = self.committed.clone() if self.on_gpu else int(self.committed)
        loss_scale = scale_of(self._scaler, self.device, self.on_gpu)
        return Scaling(self._communicators[0].size, loss_scale=loss_scale, step=step)

    def count(self, finite: Flag) -> None:
        """Count one more step of a method with state."""
        self.committed += torch.as_tensor(finite, device=self.device)
        self.nonfinite += ~torch.as_tensor(finite, device=self.device)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time inside. After an error there, this rank no longer takes part."""
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start

    def require_taking_part(self) -> None:
        """Raise RuntimeError if this rank has stopped after an earlier error."""
        if self.stopped:
            raise RuntimeError(f"pycomm's hook no longer takes part after an earlier error: {self.stopped}")

    def stop(self, error: BaseException) -> None:
        """Stop taking part, and raise ``error`` on ranks that wait for this one."""
        if self.stopped or all(communicator.size == 1 for communicator in self._communicators):
            return
        self.stopped = str(error) or type(error).__name__
        for communicator in self._communicators:
            communicator.channel.abandon(self.stopped, in_step=False)

    def require_between_steps(self, what: str, is_removed: bool) -> None:
        """Raise RuntimeError inside a step, or after ``remove()``; ``what`` is the method that was called."""
        if is_removed:
            raise RuntimeError(f"{what}() after remove()")
        if self.is_open and not self.stopped:
            raise RuntimeError(f"{what}() inside backward: call it between steps")

    def stats(self, parts: Sequence[Sent], bytes_sent: int, num_buckets: int, otherwise: str) -> dict[str, Any]:
        """Return the counters of ``HookHandle.stats``; ``otherwise`` describes an unknown source."""
        nonfinite_steps = int(self.nonfinite)
        return {
            "bytes_sent": bytes_sent,
            "steps": self.num_steps,
            "wait_seconds": self.wait_seconds,
            "nonfinite_steps": nonfinite_steps,
            "last_nonfinite": self.source.of(parts) or (otherwise if nonfinite_steps else None),
            "num_buckets": num_buckets,
            "transport": "nccl" if self.on_gpu else self._communicators[0].transport,
            **method_stats(part.exchange for part in parts),
        }

    def close(self) -> None:
        for communicator in self._communicators:
            communicator.close(self.stopped or None)


def _farewell(count: Sequence[int]) -> str:
    """Return the message of a rank that ends its training to those that wait for it."""
    return f"it has ended its training after step {count[0]}"


def all_finite(exchanges: Sequence[Exchange]) -> Flag:
    """Return whether all that was received is finite; the same on all ranks, since all have received the same bits."""
    flags = [torch.as_tensor(exchange.finite()) for exchange in exchanges]
    finite = torch.stack(flags).all()
    return finite if finite.is_cuda else bool(finite)

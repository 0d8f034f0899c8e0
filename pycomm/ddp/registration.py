"""Registration: what the handles of DistributedDataParallel and of ``fully_shard`` have in common."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import on_gpu
from pycomm.collectives.transport.nccl import tell_of_late_order
from pycomm.compression.base import Compression, Scaling, method_stats
from pycomm.compression.saved_state import gather_state, select_state
from pycomm.optim.loss_scaler import checked_scaler, scale_of
from pycomm.optim.parameters import checked_optimizer
from pycomm.training.cost.named import checked_method, refuse_local_norm
from pycomm.training.reducer import Tuning
from pycomm.training.reductions.exchanges import ExchangesByIndex
from pycomm.training.reductions.phase import Phase, StepState
from pycomm.training.reductions.reduction import Reduction


@dataclass(frozen=True)
class HookSettings:
    """Arguments of a registration; equal on all ranks, except that some may not name their optimizer."""

    method: Compression
    loss_scaler: Any
    optimizer: torch.optim.Optimizer | None
    tuning: Tuning

    def lines(self) -> list[str]:
        """Return one line per setting, to be compared between the ranks."""
        return [
            f"compression={self.method!r}",
            f"loss_scaler={type(self.loss_scaler).__name__}",
            f"tuning={self.tuning}",
        ]


def checked_settings(compression: Any, loss_scaler: Any, optimizer: Any, **tuning: Any) -> HookSettings:
    """Return the arguments of a registration as checked settings; ``tuning``: arguments of ``Tuning``."""
    method = checked_method(compression)
    refuse_local_norm(method, "DistributedDataParallel")
    if optimizer is not None:
        optimizer = checked_optimizer(optimizer)
        method.check(optimizer)
    return HookSettings(method, checked_scaler(loss_scaler), optimizer, Tuning(**tuning))


class Registration:
    """Exchanges, state and counters of one registration, and whether this rank still takes part.

    Args:
        communicators: communicators that this rank leaves after an error; the first one averages gradients.
        settings: arguments of the registration.
        like: a tensor where the gradients are.
        names: the parameters' names, by ``id``.
        otherwise: description of an unknown source of non-finite gradients.

    Attributes:
        communicator, method: communicator that averages gradients, and compression method.
        exchanges: exchanges of all buckets.
        reduction: reductions of the gradients, one after the other.
        wait_seconds: time for which communication held up ``backward()``.
        state: phase of this rank's step. SENDING: its backward has begun and not ended.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator],
        settings: HookSettings,
        like: torch.Tensor,
        names: Mapping[int, str],
        otherwise: str,
    ) -> None:
        self._communicators, self.communicator, self.method = communicators, communicators[0], settings.method
        self.device, self.on_gpu = like.device, on_gpu(like)
        if self.on_gpu:
            tell_of_late_order()
        self.exchanges = ExchangesByIndex(names, settings.method, self.communicator, settings.tuning.algorithm)
        self._scaler, self._otherwise = settings.loss_scaler, otherwise
        self.reduction = Reduction(self.communicator, self.device, on_gpu=self.on_gpu)
        self.state, self.wait_seconds = StepState(), 0.0
        for communicator in communicators:
            communicator.channel.farewell = functools.partial(_farewell, self.state)  # keeps nothing else alive
        self._last_stats: dict[str, Any] = {}

    def scaling(self, *, zeros_are_unused: bool = False) -> Scaling:
        """Return the scaling of the step that begins."""
        loss_scale, number = scale_of(self._scaler, self.device, self.on_gpu), self.reduction.number()
        return Scaling(self.communicator.size, loss_scale=loss_scale, step=number, zeros_are_unused=zeros_are_unused)

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
        if self.state.reason:
            raise RuntimeError(f"pycomm's hook no longer takes part after an earlier error: {self.state.reason}")

    def stop(self, error: BaseException) -> None:
        """Stop taking part, and raise ``error`` on ranks that wait for this one."""
        if self.state.reason or all(communicator.size == 1 for communicator in self._communicators):
            return
        self.state.stops(str(error) or type(error).__name__)
        for communicator in self._communicators:
            communicator.channel.abandon(self.state.reason, in_step=False)

    def _require_between_steps(self, what: str) -> None:
        """Raise RuntimeError inside a step, or after ``remove()``; ``what`` is the method that was called."""
        if self.is_closed:
            raise RuntimeError(f"{what}() after remove()")
        if self.state.is_sending:
            raise RuntimeError(f"{what}() inside backward: call it between steps")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of compression on this rank, as ``Reducer.state_dict`` does."""
        self._require_between_steps("state_dict")
        return gather_state(self.exchanges.state(), self.method, self.communicator, int(self.reduction.committed))

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], strict: bool) -> None:
        """Load state, with the arguments and errors of ``Reducer.load_state_dict``."""
        self._require_between_steps("load_state_dict")
        given = state if isinstance(state, dict) else list(state)
        chosen, steps = select_state(given, self.exchanges.state(), self.method, self.communicator, strict)
        self.exchanges.load_state(chosen)
        self.reduction.committed.fill_(steps)

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``HookHandle.stats``."""
        if self.is_closed:
            return dict(self._last_stats)
        parts = list(self.exchanges.parts())
        return {
            "bytes_sent": self.exchanges.bytes_sent,
            "steps": self.state.reductions,
            "wait_seconds": self.wait_seconds,
            **self.reduction.stats(parts, self._otherwise),
            "num_buckets": len(self.exchanges),
            "transport": "nccl" if self.on_gpu else self.communicator.transport,
            **method_stats(part.exchange for part in parts),
        }

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.state.phase is Phase.CLOSED

    def close(self) -> None:
        """Release all resources, but for the counters."""
        self._last_stats = self.stats()
        self.state.closes()
        for communicator in self._communicators:
            communicator.close(self.state.reason or None)
        self.exchanges.clear()


def _farewell(state: StepState) -> str:
    """Return the message of a rank that ends its training to those that wait for it."""
    return f"it has ended its training after step {state.reductions}"

"""Flags of a registration: with every step each rank sends a hash of what all must do alike.

It covers the numbers in the groups of the optimizers (learning rate, momentum, ...), the number of their steps, and
forwards that no backward followed. If it differs, ranks exchange what is behind it, and all raise the same error.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pycomm.collectives.bucket import FINGERPRINT_BITS, FingerprintBits
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Exchange
from pycomm.descriptions import counts_text
from pycomm.optim.hyperparameters import Hyperparameters, require_equal_groups
from pycomm.optim.loop_index import LoopIndex
from pycomm.optim.module_hooks import ForwardWatch, StepWatch
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import current_graph_task, local_of
from pycomm.training.reducer import (
    Hashes,
    HostCopy,
    Record,
    ReplicaDifferences,
    StopRequest,
    first_stop,
    is_comparison_due,
    raise_left_out,
)

_STOP = FINGERPRINT_BITS - 1
"""Number of the bit that asks to stop. The others are a hash."""
_MOST_STEPS = 8
"""Most steps since the last pass that was averaged: a few may be made with the same gradients on purpose."""


class SteppedOptimizers:
    """Optimizers that step parameters of a model. They are found by their steps, and held weakly.

    These steps do not count: without a gradient of the model, or with learning rates of 0 (distributed checkpointing
    makes some, on one rank if that rank saves alone), and inside the step of another optimizer (which may hold the
    shard of one rank).

    Attributes:
        counts: number of steps since the last :meth:`restart`, by the name of the optimizer's first parameter. An
            optimizer may be gone before they are compared.
        requires_passes: whether many steps without a pass that is averaged are an error.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], given: torch.optim.Optimizer | None, per_rank: Sequence[str]
    ) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._params, self._per_rank = list(params.values()), per_rank  # keeps the ids valid
        self._given = (lambda: None) if given is None else weakref.ref(given)
        self._found: weakref.WeakKeyDictionary[torch.optim.Optimizer, Hyperparameters] = weakref.WeakKeyDictionary()
        self._unconcerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._open: list[weakref.ref[torch.optim.Optimizer]] = []  # in their steps, the outermost first
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        self.counts: dict[str, int] = {}
        self.requires_passes = False
        self._watch = StepWatch(self._begin, self._end)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._close(optimizer)  # the step before may have ended with an exception
        self._open.append(weakref.ref(optimizer))

    def _close(self, optimizer: torch.optim.Optimizer) -> bool:
        """Forget the open step of ``optimizer``; return whether it was the outermost one."""
        depth = next((i for i, ref in enumerate(self._open) if ref() is optimizer), -1)
        if depth >= 0:
            del self._open[depth:]
        return depth == 0

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._close(optimizer):
            return
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._unconcerned.get(optimizer) == size:
            return
        name = self._name_of(optimizer)
        if not name:
            self._unconcerned[optimizer] = size
        elif any(True for _ in self._gradients(optimizer)) and any(
            not _is_zero(group.get("lr")) for group in optimizer.param_groups
        ):
            self.counts[name] = self.counts.get(name, 0) + 1
            if all(ref() is not optimizer for ref in self._stepped):
                self._stepped.append(weakref.ref(optimizer))
            has_many = self.requires_passes and self.counts[name] > _MOST_STEPS
            # All gradients are 0 if the model takes no part, and zero_grad() keeps them.
            if has_many and any(bool(local_of(grad).any()) for grad in self._gradients(optimizer)):
                raise RuntimeError(
                    f"the optimizer of {name!r} has made {self.counts[name]} steps since the last backward pass that "
                    "was averaged: gradients are averaged if the DistributedDataParallel itself is called, not its "
                    "module, and backward() makes them. If you average them yourself, write check_replicas=0"
                )

    def _name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of the optimizer's first parameter that is the model's; "" without one."""
        return next(
            (self._names[id(param)] for param in optimizer_parameters(optimizer) if id(param) in self._names), ""
        )

    def _gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        return (p.grad for p in optimizer_parameters(optimizer) if p.grad is not None and id(p) in self._names)

    def readers(self) -> dict[str, Hyperparameters]:
        """Return readers of the given optimizer, and of those that have stepped since the last :meth:`restart`."""
        readers = {}
        for ref in (self._given, *self._stepped):
            if (optimizer := ref()) is not None:
                reader = self._found.get(optimizer)
                if reader is None:  # it must not keep its key alive
                    reader = self._found[optimizer] = Hyperparameters(weakref.proxy(optimizer), self._per_rank)
                reader.refresh()
                readers[self._name_of(optimizer)] = reader
        return readers

    def restart(self) -> None:
        self._stepped.clear()
        self.counts = {}


def _is_zero(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor) and not rate.is_cpu:
        return False  # the host would wait
    return rate is not None and not bool(rate)


@dataclass(frozen=True)
class SentFlags:
    """Flags that this rank has sent, and what is behind them.

    Attributes:
        record: what is compared, but for the numbers of the optimizers' groups.
        readers: readers of these, by the names of the optimizers' first parameters.
        compares: number of passes before this one, if parameters were hashed, too; else 0.
    """

    record: Record = field(default_factory=Record)
    readers: Mapping[str, Hyperparameters] = field(default_factory=dict)
    compares: int = 0

    @functools.cached_property
    def digest(self) -> int:
        """Hash of 63 bits, the same in every process."""
        loop, steps = self.record.loop or (0, 0, False), self.record.steps
        groups = tuple(self.readers[name].digest for name in sorted(self.readers))
        return hash((loop, tuple(steps[name] for name in sorted(steps)), groups)) & ((1 << _STOP) - 1)

    def exchanged(self, communicator: Communicator) -> dict[int, Record]:
        """Return what is behind the flags of all ranks. Collective."""
        groups = {}
        for name, reader in self.readers.items():
            with contextlib.suppress(ReferenceError):  # the optimizer is gone, and is not compared
                groups[name] = reader.groups()
        gather = communicator.channel.all_gather_bytes
        return replace(self.record, groups=groups).exchanged(gather, range(communicator.size))


class TrainingLoop:
    """What this rank has done since ranks were compared last: forwards, and steps of optimizers."""

    def __init__(self, model: torch.nn.Module, optimizers: SteppedOptimizers) -> None:
        self.optimizers, self._index, self._model = optimizers, LoopIndex(), weakref.ref(model)
        self._forwards = ForwardWatch(model, self._note_forward)

    def _note_forward(self, output: Any, called: str) -> None:
        if current_graph_task() == -1:  # else a checkpointed piece is being recomputed
            self._index.note_forward(output, called)
        if not getattr(self._model(), "require_backward_grad_sync", True):  # in no_sync(): ranks may mean to step alone
            self.optimizers.requires_passes = False

    def remove(self) -> None:
        self._forwards.remove()

    def fix(self, record: Record, compares: int) -> SentFlags:
        """Return what is compared now, ``record`` with this rank's counts, and count from zero."""
        loop, steps = (self._index.num_unused, 0, False), self.optimizers.counts
        fixed = SentFlags(replace(record, loop=loop, steps=steps), self.optimizers.readers(), compares)
        self._forwards.trained(self._index.has_forwards)
        self._index.restart()
        self.optimizers.restart()
        return fixed


_ADVICE = (
    "Gradients of different batches would be averaged: leave it out on all ranks. A forward that is no training step "
    "belongs in torch.no_grad()"
)


def raise_differences(records: Mapping[int, Record], whose: str = "") -> None:
    """Raise RuntimeError or ValueError if ranks have done different things.

    Args:
        records: those of the ranks that are compared.
        whose: what the ranks are counted among.
    """
    passes = {rank: of.reductions for rank, of in records.items()}
    raise_left_out(passes, max(passes.values()), "backward passes were averaged so far", _ADVICE, whose)
    unused = {rank: 0 if of.loop is None else of.loop[0] for rank, of in records.items()}
    what = "forwards in training mode, since the last pass that was averaged, that no backward() followed"
    raise_left_out(unused, min(unused.values()), what, _ADVICE, whose)
    for name in {name: None for of in records.values() for name in of.steps}:
        counts = {rank: of.steps.get(name, 0) for rank, of in records.items()}
        if len(set(counts.values())) > 1:
            raise RuntimeError(
                f"the ranks{whose} are out of step: calls of step() of the optimizer of {name!r} since the last "
                f"backward pass that was averaged: {counts_text(counts)}. Take the same steps on all ranks"
            )
    names = {name: None for of in records.values() for name in of.groups}
    for name in names:
        groups = {rank: of.groups.get(name) for rank, of in records.items()}
        require_equal_groups(groups, whose=f" of the optimizer of {name!r}" if len(names) > 1 else "")


class ReplicaCheck:
    """Comparison of the parameters, after 1, 2, 4, 8, ... passes up to ``interval``, and then at that interval.

    Args:
        interval: number of passes; 0 to compare nothing.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], communicator: Communicator, device: torch.device, interval: int
    ) -> None:
        self._params = {name: param for name, param in params.items() if param.requires_grad}
        self._interval = interval
        self._hashes = Hashes(device, _STOP)
        self._differences = ReplicaDifferences(communicator, self._named, lambda: range(communicator.size))

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, local_of(param).detach()) for name, param in self._params.items()]

    def is_due(self, num_passes: int) -> bool:
        """Return whether parameters are compared in the pass after ``num_passes`` others."""
        return is_comparison_due(num_passes, self._interval)

    def bits(self) -> torch.Tensor:
        """Return a hash of the parameters: 63 bools. Does not wait for a GPU."""
        return self._hashes.bits(self._named())

    def number(self) -> int:
        """Return :meth:`bits` as a number. Waits for a GPU."""
        return sum(1 << i for i, bit in enumerate(self.bits().tolist()) if bit)

    def report(self, num_passes: int, joined: Sequence[bool]) -> None:
        """Raise an error, or warn, if parameters differ. Collective."""
        if self._differences.find(self._hashes, joined)[0]:
            self._differences.report(self._hashes, num_passes, joined)


class HookFlags:
    """Flags that ranks under DistributedDataParallel send with the last bucket of each step.

    On a GPU the host does not wait for those of other ranks, and reads them two steps later.

    Attributes:
        requested: the request to stop that all ranks have received; see ``pycomm.Reducer.stop_requested``.
    """

    def __init__(
        self, loop: TrainingLoop, replicas: ReplicaCheck, communicator: Communicator, device: torch.device
    ) -> None:
        self._loop, self._replicas, self._communicator, self._device = loop, replicas, communicator, device
        self._on_gpu = device.type == "cuda"
        self._bits = FingerprintBits(device)
        self._mine: str | None = None
        self._sent = SentFlags()
        self._late: deque[tuple[SentFlags, HostCopy]] = deque()
        self.requested = StopRequest()

    def request(self, reason: str) -> None:
        """Ask all ranks to stop."""
        if self._on_gpu:
            raise ValueError("request_stop() on a GPU requires pycomm.attach() in place of pycomm.ddp.register()")
        if self._mine is None:
            self._mine = reason

    def fix(self, joined: bool, num_passes: int) -> torch.Tensor:
        """Return this rank's flags of the pass after ``num_passes`` others. Having ``joined``, it goes on counting."""
        record = Record(stop=None if self.requested else self._mine, absent=joined)
        compares = num_passes if self._replicas.is_due(num_passes) else 0
        self._sent = SentFlags(record, compares=compares) if joined else self._loop.fix(record, compares)
        bits = self._bits.of(self._sent.digest | (record.stop is not None) << _STOP)
        if compares:
            bits[:_STOP] ^= self._replicas.bits()
        return bits

    def receive(self, exchange: Exchange) -> None:
        """Read the flags, sent with the last bucket. Collective if ranks differ, or one asks to stop.

        Raises:
            RuntimeError, ValueError: on all ranks: they have done different things.
        """
        if self._on_gpu:
            reused = self._late.popleft()[1] if len(self._late) > 1 else HostCopy(FINGERPRINT_BITS, self._device)
            reused.put(exchange.differing())
            self._late.append((self._sent, reused))
        elif self._sent.record.stop is not None or bool(exchange.differing().any()):
            self._compare(self._sent)

    def receive_late(self) -> None:
        """Read the flags of the step before the last on a GPU. Collective, and raises errors, as :meth:`receive`."""
        if len(self._late) > 1 and any(self._late[0][1].get()):
            self._compare(self._late[0][0])

    def _compare(self, sent: SentFlags) -> None:
        records = sent.exchanged(self._communicator)
        if there := {rank: record for rank, record in records.items() if not record.absent}:
            raise_differences(there)
        self.requested = self.requested or first_stop(records)
        if sent.compares:
            self._replicas.report(sent.compares, [record.absent for record in records.values()])

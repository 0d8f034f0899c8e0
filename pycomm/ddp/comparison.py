"""Comparison between the ranks of a registration: with every pass each sends a hash of what all must do alike.

It covers the numbers in the groups of the optimizers (learning rate, momentum, ...), the number of their steps, and
forwards that no backward followed; with some passes the parameters, too. See :mod:`pycomm.training.reducer.rank_flags`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Exchange
from pycomm.ddp.registration import HookSettings
from pycomm.descriptions import counts_text
from pycomm.optim.guard import StepWatch
from pycomm.optim.hyperparameters import Hyperparameters
from pycomm.optim.module_hooks import ForwardWatch
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import current_graph_task, local_of
from pycomm.training.reducer import (
    ALIKE,
    Compared,
    Hashes,
    RankFlags,
    Record,
    ReplicaDifferences,
    StepEvidence,
    loops_of,
    raise_different_groups,
    raise_out_of_loop,
)
from pycomm.training.reductions.phase import StepState

_PARAMETERS = slice(0, ALIKE.start)
"""Bits of the parameters' hash. The others are those of :class:`RankFlags`."""
_MOST_STEPS = 8
"""Most steps since the last pass that was averaged: a few may be made with the same gradients on purpose."""
_LEFT_OUT = (
    "Gradients of different batches would be averaged: leave it out on all ranks. A forward that is no training step "
    "belongs in torch.no_grad()"
)


class SteppedOptimizers:
    """Optimizers that step parameters of a model. They are found by their steps, and held weakly.

    These steps do not count: without a gradient of the model, or with learning rates of 0 (distributed checkpointing
    makes some, on one rank if that rank saves alone), and inside the step of another optimizer (which may hold the
    shard of one rank).

    Attributes:
        counts: number of steps since the last :meth:`restart`, by the name of the optimizer's first parameter. An
            optimizer may be gone before they are compared.
        requires_passes: whether many steps without a pass that is averaged are an error.

    Args:
        begins, ends: bound methods, held weakly, that are called before and after each step of such an optimizer; also
            inside the step of another one, which may be a wrapper.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        given: torch.optim.Optimizer | None,
        per_rank: Sequence[str],
        begins: Callable[[], None] | None = None,
        ends: Callable[[], None] | None = None,
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
        self._calls = [None if each is None else weakref.WeakMethod(each) for each in (begins, ends)]
        self._watch = StepWatch(self._begin, self._end)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._close(optimizer)  # the step before may have ended with an exception
        self._open.append(weakref.ref(optimizer))
        if self._concerns(optimizer):
            self._call(0)

    def _call(self, number: int) -> None:
        """Call the method that is called before (0) or after (1) a step, if it still exists."""
        reference = self._calls[number]
        method = None if reference is None else reference()
        if method is not None:
            method()

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` has parameters of the model; looked up until it has other parameters."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._unconcerned.get(optimizer) == size:
            return False
        if not self._name_of(optimizer):
            self._unconcerned[optimizer] = size
            return False
        return True

    def _close(self, optimizer: torch.optim.Optimizer) -> bool:
        """Forget the open step of ``optimizer``; return whether it was the outermost one."""
        depth = next((i for i, ref in enumerate(self._open) if ref() is optimizer), -1)
        if depth >= 0:
            del self._open[depth:]
        return depth == 0

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        is_outermost = self._close(optimizer)
        if not self._concerns(optimizer):
            return
        self._call(1)
        if not is_outermost:
            return
        name = self._name_of(optimizer)
        if any(True for _ in self._gradients(optimizer)) and any(
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


class PassComparison:
    """Comparison of what ranks have done since the last pass that was averaged, and with some passes of parameters.

    These are the 2nd, 3rd, 5th, 9th, ... pass, and then one in every ``check_replicas``. On a GPU the host does not
    wait for the flags of other ranks, and reads them two passes later.

    Args:
        model: module whose forwards count.
        params: the parameters, or this rank's parts of them, which must be equal on all ranks, by name.
        device: device of the flags.
        state: phase of this rank's step, and the number of passes that were averaged.
        whose: what the ranks are counted among, for errors.

    Attributes:
        flags: this rank's flags, and the request to stop that all ranks have received.
        optimizers: optimizers that step the parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Mapping[str, torch.Tensor],
        communicator: Communicator,
        settings: HookSettings,
        device: torch.device,
        state: StepState,
        whose: str = "",
    ) -> None:
        self._communicator, self._whose, self._model = communicator, whose, weakref.ref(model)
        self._trained = {name: param for name, param in params.items() if param.requires_grad}
        hashes = Hashes(next((param.device for _, param in self._named()), device), ALIKE.start)
        on_gpu = device.type == "cuda"
        compared = Compared(self._named, self._named, hashes, settings.tuning.check_replicas, on_gpu)
        evidence = StepEvidence(lambda: list(self._trained.items()), self._model, device)
        self._differences = ReplicaDifferences(communicator, lambda: range(communicator.size), compared, evidence)
        self._state, self._has_stepped = state, False
        self.flags = RankFlags(device, on_gpu, state)
        self.optimizers = SteppedOptimizers(
            params, settings.optimizer, tuple(settings.tuning.per_rank), self._before_step, self._after_step
        )
        self._differences.after_step(0)
        self._forwards = ForwardWatch(model, self._note_forward)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, local_of(param).detach()) for name, param in self._trained.items()]

    def _before_step(self) -> None:
        """Compare the parameters again, if the last pass has found a difference. Collective in that case."""
        self._differences.before_step(self._state.reductions)
        self._differences.look_again()

    def _after_step(self) -> None:
        self._has_stepped = True
        self._differences.after_step(self._state.reductions)

    def _note_forward(self, output: Any, called: str) -> None:
        if current_graph_task() == -1:  # else a checkpointed piece is being recomputed
            self.flags.loop.note_forward(output, called)
        if not getattr(self._model(), "require_backward_grad_sync", True):  # in no_sync(): ranks may mean to step alone
            self.optimizers.requires_passes = False

    def fix(self) -> torch.Tensor:
        """Return this rank's flags of the present pass, 64 bools. It then counts from zero.

        A rank that is absent, as it has no more inputs, is not compared.
        """
        flags, optimizers, num_passes = self.flags, self.optimizers, self._state.reductions
        has_pass = self._state.has_pass
        flags.steps, flags.readers = (optimizers.counts, optimizers.readers()) if has_pass else ({}, {})
        bits = flags.fix(num_passes)
        if self._differences.is_due(num_passes):
            bits = bits.clone()
            bits[_PARAMETERS] = self._differences.bits()()
        if has_pass:
            self._forwards.trained(flags.loop.has_forwards)
            flags.reduced()
            optimizers.restart()
        return bits

    def receive(self, exchange: Exchange) -> None:
        """Read the flags that ``exchange`` brought with the present pass; see :meth:`report`."""
        self.report(self.flags.received(exchange.differing()))

    def receive_late(self) -> None:
        """Read the flags of the pass before the last on a GPU, as the next one begins; see :meth:`report`."""
        self.report(self.flags.received_late(), ago=2)

    def report(self, differing: Sequence[bool], ago: int = 0) -> None:
        """Report what differs, given the bits that do, of the present pass, or of one ``ago``. Collective if any do.

        Raises:
            RuntimeError, ValueError: on all ranks: they have done different things, or their parameters differ.
        """
        num_passes = self._state.reductions - ago
        if not any(differing[_PARAMETERS]):
            self._differences.question = None
        if not any(differing):
            return
        gather, world = self._communicator.channel.all_gather_bytes, range(self._communicator.size)
        records = self.flags.exchange(num_passes, gather, world)
        there = {rank: record for rank, record in records.items() if not record.absent}
        raise_out_of_loop(loops_of(there), _LEFT_OUT, self._whose)
        self._raise_out_of_step(there)
        raise_different_groups(there, 'per_rank=("{}",)')
        self.flags.apply(records)
        absent = [record.absent for record in records.values()]
        if not any(differing[_PARAMETERS]):
            return
        if not self.flags.reads_late:
            if not any(absent):  # who is absent takes no step that could answer
                self._differences.ask(num_passes, has_stepped=self._has_stepped)
        elif self._differences.find(self._differences.hashes, absent)[0]:
            self._differences.report(num_passes, absent)

    def _raise_out_of_step(self, records: Mapping[int, Record]) -> None:
        """Raise RuntimeError if the optimizers have made different numbers of steps."""
        for name in {name: None for of in records.values() for name in of.steps}:
            counts = {rank: of.steps.get(name, 0) for rank, of in records.items()}
            if len(set(counts.values())) > 1:
                raise RuntimeError(
                    f"the ranks{self._whose} are out of step: calls of step() of the optimizer of {name!r} since the "
                    f"last backward pass that was averaged: {counts_text(counts)}. Take the same steps on all ranks"
                )

    def remove(self) -> None:
        """Remove the hooks of the model."""
        self._forwards.remove()

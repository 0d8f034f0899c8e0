"""Comparison between the ranks of a registration: every pass carries a hash of what must be the same on all ranks.

It covers the numbers in the groups of the optimizers (learning rate, momentum, ...), the number of their steps, and
forwards that no backward followed; with some passes the parameters, too. See :mod:`pycomm.training.reductions.record`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.ddp.registration import HookSettings
from pycomm.optim.guard import StepWatch
from pycomm.optim.hyperparameters import Hyperparameters
from pycomm.optim.loop_index import LoopIndex
from pycomm.optim.module_hooks import ForwardWatch
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import current_graph_task, local_of
from pycomm.training.reductions.fields import FieldWords, Source, groups_read
from pycomm.training.reductions.phase import StepState
from pycomm.training.reductions.record import Fingerprint
from pycomm.training.reductions.replicas import Compared, Replicas
from pycomm.training.reductions.requests import Requests

_MOST_STEPS = 8
"""Most steps since the last pass that was averaged: a few may be made with the same gradients on purpose."""
_LEFT_OUT = (
    "Gradients of different batches would be averaged: leave it out on all ranks. A forward that is no training step "
    "belongs in torch.no_grad()"
)


class SteppedOptimizers:
    """Optimizers that step parameters of a model. They are found by their steps, and held weakly.

    These steps do not count: without a gradient of the model, or with learning rates of 0 (distributed checkpointing
    takes some, on one rank if that rank saves alone), and inside the step of another optimizer (which may hold the
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

    On a GPU the host does not wait for the bits of other ranks, and reads them two passes later.

    Args:
        model: module whose forwards count.
        params: the parameters, or this rank's parts of them, which must be equal on all ranks, by name.
        device: device of the bits.
        state: phase of this rank's step, and the number of passes that were averaged.
        whose: what the ranks are counted among, for errors.
        reads_late: whether the host does not wait for them.

    Attributes:
        fingerprint: this rank's bits in each pass, and the verdict on all ranks' bits.
        requests: requests of this rank, and the request to stop that all ranks have received.
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
        *,
        reads_late: bool,
    ) -> None:
        self._model, self._state = weakref.ref(model), state
        trained = {name: param for name, param in params.items() if param.requires_grad}

        def parts() -> list[tuple[str, torch.Tensor]]:
            return [(name, local_of(param).detach()) for name, param in trained.items()]

        tuning, self._loop, self.requests, self._has_stepped = settings.tuning, LoopIndex(), Requests(), False
        compared = Compared(parts, lambda: list(trained.items()), tuning.check_replicas, reads_late, module=self._model)
        of_parameters = next((param.device for _, param in parts()), device)
        self._replicas = Replicas(communicator, lambda: range(communicator.size), compared, device, of_parameters)
        self.optimizers = SteppedOptimizers(
            params, settings.optimizer, tuple(tuning.per_rank), self._before_step, self._after_step
        )
        values: dict[str, Callable[[], Any]] = {
            "loop": self._loop.counts,
            "optimizer_steps": lambda: self.optimizers.counts,
            "groups": lambda: groups_read(self.optimizers.readers()) if state.has_pass else None,
            "stop": partial(getattr, self.requests, "stop"),
        }
        words = FieldWords(_LEFT_OUT, whose, permitting='per_rank=("{}",)')
        source = Source(values, module=self._model, words=words)
        self.fingerprint = Fingerprint(
            *(communicator, lambda: range(communicator.size), source, self.requests, state, self._replicas, device),
            reads_late=reads_late,
            has_stepped=lambda: self._has_stepped,
        )
        self._replicas.after_step(0)
        self._forwards = ForwardWatch(model, self._note_forward)

    def _before_step(self) -> None:
        """Compare the parameters again, if the last pass has found a difference. Collective in that case."""
        self._replicas.before_step(self._state.reductions)
        self._replicas.look_again()

    def _after_step(self) -> None:
        self._has_stepped = True
        self._replicas.after_step(self._state.reductions)

    def _note_forward(self, output: Any, called: str) -> None:
        if current_graph_task() == -1:  # otherwise a checkpointed piece is being recomputed
            self._loop.note_forward(output, called)
        if not getattr(self._model(), "require_backward_grad_sync", True):  # in no_sync(): ranks may mean to step alone
            self.optimizers.requires_passes = False

    def bits(self) -> torch.Tensor:
        """Return this rank's bits of the present pass, 64 bools. It then counts from zero.

        A rank that is absent, as it has no more inputs, is not compared.
        """
        make = self.fingerprint.bits(first=True, last=True)
        assert make is not None
        bits = make()
        if self._state.has_pass:
            self._forwards.trained(self._loop.has_forwards)
            self._loop.restart()
            self.optimizers.restart()
        return bits

    def remove(self) -> None:
        """Remove the hooks of the model."""
        self._forwards.remove()

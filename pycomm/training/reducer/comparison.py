"""What a Reducer compares between the ranks in each reduction: the values of its record."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Named
from pycomm.optim.hyperparameters import Hyperparameters
from pycomm.optim.loop_index import LoopIndex
from pycomm.torch_internals import parts_of, uncompiled
from pycomm.training.reducer.buckets import state_of
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options
from pycomm.training.reducer.window import AccumulationWindow
from pycomm.training.reductions.fields import IN_STEP, Source, groups_read
from pycomm.training.reductions.phase import StepState
from pycomm.training.reductions.record import Fingerprint
from pycomm.training.reductions.replicas import Compared, Replicas
from pycomm.training.reductions.requests import Requests


class RankComparison:
    """Comparison between ranks of their replicas, and of everything else that must be the same on all ranks.

    Attributes:
        fingerprint, replicas: bits of this rank's record in each reduction, and those among them of parameters.
        requests, loop: requests of this rank; counts of what its training loop has done.
        announces_new: whether new parameters are announced by a flag; otherwise the ranks meet to add them.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: ParameterTable,
        settings: Options,
        state: StepState,
        window: AccumulationWindow,
        buffers: Callable[[], Named],
        world: Callable[[], Sequence[int]],
    ) -> None:
        self._table, self._settings, self._state = table, settings, state
        self.requests, self.loop = Requests(), LoopIndex()
        # On a GPU the host learns too late; buckets launched after a commit would not be part of it.
        self.announces_new = not (table.on_gpu or settings.survive is not None)
        per_rank = tuple(settings.tuning.per_rank)
        ignores = table.ignored.covers if table.ignored else None
        self._readers = {when: Hyperparameters(table.optimizer, per_rank, ignores) for when in ("", IN_STEP)}
        self._has_modes = table.module is not None and "training" not in per_rank
        values: dict[str, Callable[[], Any]] = {
            "members": tuple,
            "loop": self.loop.counts,
            "groups": partial(groups_read, self._readers),
            "loss_scale": partial(getattr, window, "loss_scale"),
            "frozen": table.frozen_of_trained,
            "places": partial(getattr, table, "moved"),
            "modes": self._modes,
            "window": partial(getattr, window, "length"),
            "veto": partial(getattr, self.requests, "veto"),
            "skip": partial(getattr, window, "skips"),
            "stop": partial(getattr, self.requests, "stop"),
        }
        if self.announces_new:
            values["new"] = table.new_names
        details: dict[str, Callable[[], Any]] = {
            "members": table.names_in_optimizer,
            "modes": self._modes_by_name,
            "window": partial(getattr, state, "reductions"),
        }
        source = Source(values, details, lambda: table.module, warns=lambda: communicator.rank == 0)
        compared = Compared(
            table.locals,
            table.trained,
            settings.tuning.check_replicas,
            reads_late=table.on_gpu,
            by_parts=not table.on_gpu,
            buffers=buffers,
            # An exchange without state in this step may have no memory for it yet, and must not allocate any.
            carried=lambda: state_of(sent for sent in table.buckets if sent.exchange.transactional),
            module=lambda: table.module,
        )
        self.replicas = Replicas(communicator, world, compared, table.device, table.device)
        self.fingerprint = Fingerprint(
            communicator, world, source, self.requests, state, self.replicas, table.device, reads_late=table.on_gpu
        )

    def _modes(self) -> int:
        """Return training or evaluation mode of the module, or a hash of the modes of all modules in it."""
        module = self._table.module
        if module is None or not self._has_modes:
            return 0
        if not self.replicas.is_due(self._state.reductions):
            return module.training
        return zlib.crc32(bytes(part.training for part in parts_of(uncompiled(module))))

    def _modes_by_name(self) -> dict[str, bool]:
        module = self._table.module
        if module is None or not self._has_modes:
            return {}
        return {name: part.training for name, part in uncompiled(module).named_modules()}

    def require_suitable(self, *, in_step: bool = False) -> None:
        """Read the numbers of the optimizer's groups; with ``in_step`` they are the numbers that a step uses.

        Raises ValueError if they have changed, and compression does not support them.
        """
        if self._readers[IN_STEP if in_step else ""].refresh():
            self._settings.compression.check(self._table.optimizer)

    def bits_of(self, number: int) -> Callable[[], torch.Tensor] | None:
        """Return the function that makes the bits sent with the ``number``-th launched bucket, if it carries any."""
        return self.fingerprint.bits(first=number == 1, last=number == len(self._table.buckets))

    def before_step(self) -> None:
        """Note that a step of the parameters begins."""
        self.replicas.before_step(self._state.reductions, self._rewritten)

    def _rewritten(self) -> str:
        """Return the name of the first parameter whose gradient is not the averaged tensor; "" without one."""
        slots = self._table.slots()
        return next((s.name for s in slots if s.owner.grad is not None and not s.holds_average()), "")

    def after_step(self) -> None:
        """Note that a step of the parameters has ended, or that training begins."""
        self.replicas.after_step(self._state.reductions)

    def receive(self) -> None:
        """See :meth:`Fingerprint.receive`."""
        if not self._table.buckets:
            self.fingerprint.judge([])
            return
        first, last = self._table.buckets[0].exchange, self._table.buckets[-1].exchange
        self.fingerprint.receive(first.differing() if last is first else first.differing() | last.differing())

    def compare_replicas(self) -> None:
        """Report parameters that differ between the ranks now. Collective, and waits for a GPU."""
        self.replicas.compare_now(self._state.reductions)

    def restart(self) -> None:
        """Count from zero for the next reduction: gradients have been handed out, or discarded."""
        self.loop.restart()
        self.requests.veto = None

"""Comparison of the ranks in each reduction: which flags travel with which bucket, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycomm.communicator import Communicator
from pycomm.optim.hyperparameters import Hyperparameters
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.progress import Progress
from pycomm.reducer.rank_flags import Heard, RankFlags
from pycomm.reducer.replica_differences import Named
from pycomm.reducer.replicas import ReplicaCheck
from pycomm.reducer.settings import Settings
from pycomm.reducer.state_hashes import Taken


class RankComparison:
    """Comparison of what the ranks tell one another with their gradients.

    Args:
        communicator: the ranks.
        table: parameters and their buckets.
        settings: arguments of ``attach``.
        progress: counts of reductions and steps.
        buffers: returns the module's buffers that are compared, by name.
        world: returns the numbers by which the ranks are called.

    Attributes:
        flags: what this rank tells besides hashes of its replica, and what it hears.
        replicas: hashes of the replica.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: ParameterTable,
        settings: Settings,
        progress: Progress,
        buffers: Callable[[], Named],
        world: Callable[[], Sequence[int]],
    ) -> None:
        self._table, self._progress = table, progress
        ignores = table.ignored.covers if table.ignored else None
        self.flags = RankFlags(
            Hyperparameters(table.optimizer, tuple(settings.tuning.per_rank), ignores),
            table.device,
            lambda: settings.compression.check(table.optimizer),
        )
        self.flags.takes_new = not table.on_gpu  # there the host learns too late
        waits = not table.on_gpu
        self.replicas = ReplicaCheck(
            communicator, table.device, settings.tuning.check_replicas, waits, table.locals, buffers, world, self.flags
        )

    def fingerprint_of(self, number: int) -> Callable[[], torch.Tensor] | None:
        """Return what makes the flags that travel with the bucket launched as ``number``, the first as 1, if any do."""
        reductions = self._progress.num_reductions
        first = self.replicas.fingerprint(self._progress.num_steps, reductions) if number == 1 else None
        if number != len(self._table.flights):
            return first
        flags = self.flags.fix(reductions, self._table.frozen_of_trained(), self._table.new_names())
        return (lambda: flags) if first is None else (lambda: first() | flags)

    def compare(self) -> None:
        """Report what differs, and take note of what ranks ask for; collective if there is anything."""
        self.flags.heard = Heard()
        if not self._table.flights:
            return
        first, last = self._table.flights[0].exchange, self._table.flights[-1].exchange
        differing = first.differing() if last is first else first.differing() | last.differing()
        progress = self._progress
        progress.num_steps = self.replicas.check(differing, progress.num_steps, progress.num_reductions)

    def compare_previous(self) -> None:
        """Report what an earlier reduction found on a GPU."""
        progress = self._progress
        progress.num_steps = self.replicas.check_previous(progress.num_steps, progress.num_reductions)

    def taking(self) -> Taken | None:
        """Return what takes hashes of the state of compression, if the next reduction compares them."""
        return self.replicas.taking(self._table.flights, self._progress.num_reductions)

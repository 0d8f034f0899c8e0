"""Going on without ranks that are lost: a step is reduced again by those that are left, from gradients that were kept.

After a failure no rank uses the old memory or the old connections again. Those that are left agree on who they are
(:mod:`pycomm.elastic`), meet anew, move the state of compression into buckets that no lost rank has mapped, and
send what backward gave them once more. Backward itself is not repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pycomm.communicator import Communicator
from pycomm.elastic.join_requests import JoinListener
from pycomm.elastic.membership import Decision, Membership
from pycomm.elastic.reconvene import reconvene
from pycomm.errors import CommError
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.damage import DamageError
from pycomm.reducer.lanes import open_lanes
from pycomm.reducer.newcomers import Carried, share_state
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.settings import Settings

_LOG = logging.getLogger("pycomm")

World = tuple[int, ...]


class Survival:
    """Keeper of a step's gradients until all ranks have the averages, and guide of those that are left.

    Args:
        membership: who belongs to the group.
        communicator: their communicator, which moves with them.
        table: parameters and their buckets.
        settings: arguments of ``attach``.
        door: where newcomers ask to be let in.
        carry: objects whose state they get, by name.

    Attributes:
        recoveries, joins: what happened, a dict each; see ``Reducer.stats``.
        invited: number of a newcomer's request that the last commit has announced; 0 for none.
        arrivals: when ranks had all their gradients of the last step, in seconds before its commit.
    """

    def __init__(
        self,
        membership: Membership,
        communicator: Communicator,
        table: ParameterTable,
        settings: Settings,
        door: JoinListener,
        carry: Mapping[str, Any],
    ) -> None:
        self.membership, self.carry, self.invited = membership, carry, 0
        self._door = door
        self._newcomers: set[int] = set()  # of the present step
        self._communicator, self._table, self._settings = communicator, table, settings
        self.recoveries: list[dict[str, Any]] = []
        self.joins: list[dict[str, Any]] = []
        self._has_left = False
        self.arrivals: dict[int, float] = {}

    def stats(self) -> dict[str, Any]:
        """Return what happened to the world so far."""
        return {"recoveries": list(self.recoveries), "joins": list(self.joins)}

    # Keeping.

    @staticmethod
    def keep(flight: BucketInFlight, grads: list[torch.Tensor | None]) -> None:
        """Keep ``grads``, which are about to be sent; a gradient that lies in the bucket itself is copied."""
        for i, (slot, grad) in enumerate(zip(flight.slots, grads, strict=True)):
            if grad is not None and flight.bucket.holds(i, grad):
                slot.spare = torch.empty_like(grad) if slot.spare is None else slot.spare
                grad = slot.spare.copy_(grad)
            slot.kept = grad

    def kept(self, flight: BucketInFlight) -> list[torch.Tensor | None]:
        """Return what was kept of the gradients of ``flight``."""
        return [slot.kept for slot in flight.slots]

    def forget_newcomers(self) -> None:
        """Take newcomers for ranks like the others: the step is over."""
        self._newcomers.clear()

    def commit(self, microseconds_here: int = 0) -> None:
        """Return once all ranks have the results of this step. On the communication thread, with its results there.

        The first rank tells the others of a newcomer, if one waits; each tells for how long it has been there, 0 if it
        does not know.
        """
        words = np.zeros(1 + self._communicator.size, np.int64)
        words[1 + self._communicator.rank] = microseconds_here
        if self.membership.is_first and (waiting := self._door.waiting()) is not None:
            words[0] = waiting.number
        with self._communicator.channel.skip_checks():
            self._communicator.all_reduce(words, "max")
        self.invited = int(words[0])
        here = zip(self.membership.world, words[1:].tolist(), strict=True)
        self.arrivals = {rank: -1e-6 * microseconds for rank, microseconds in here if microseconds > 0}

    def take_arrivals(self) -> dict[int, float]:
        """Return when ranks had all their gradients of the last step, as they told in its commit; forget it."""
        arrivals, self.arrivals = self.arrivals, {}
        return arrivals

    # Losing ranks.

    def leave(self, reason: str) -> None:
        """Tell the others that this rank no longer takes part; the first reason counts."""
        if not self._has_left:
            self._has_left = True
            self.membership.leave(reason)

    def close(self, reason: str) -> None:
        """Leave, and release what the agreement needs."""
        self._door.close()
        self.leave(reason)
        self.membership.close()

    def run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job``; leave if it fails by itself: the next one would send what the others take for this one's."""
        try:
            job()
        except (CommError, ValueError):  # the latter is raised by all ranks alike
            raise
        except BaseException as error:
            try:
                self.leave(f"failed: {error}")
            finally:
                self._communicator.close(f"it failed: {error}")
            raise

    def recover(self, error: CommError, num_committed: int, complete: Callable[[], None]) -> tuple[bool, Any]:
        """Go on among those that are left. Collective among them.

        Args:
            error: how this rank learned that an operation failed.
            num_committed: number of steps that this rank has committed.
            complete: hands out the results of the present step, if another rank has committed it.

        Returns:
            Whether ``complete`` was called, and the lanes to go on with.

        Raises:
            CommError: this rank is left behind, or is damaged, or too few are left.
        """
        if isinstance(error, DamageError) and not error.spares(self.membership.me):
            if error.ranks:
                self.leave("is damaged")
                self._communicator.close(str(error))
            raise error
        start, old = time.monotonic(), self.membership.world
        found = reconvene(
            self.membership,
            self._communicator,
            error,
            num_committed,
            catch_up=lambda _: complete(),
            open_again=lambda: open_lanes(self._communicator, self._settings, self._table.on_gpu),
            nobody_waits=isinstance(error, DamageError),  # and a rank that was slower shall learn it, too
        )
        is_complete = found.committed > num_committed
        self._rebuild(found.opened, is_complete)
        self._note(old, found.decision, num_committed, time.monotonic() - start)
        return is_complete, found.opened

    # Gaining ranks.

    def let_in(self, carried: Carried) -> list[Communicator]:
        """Let in the newcomer that was announced; return the lanes to go on with. Collective, with it.

        Raises:
            CommError: it did not come, or a rank was lost meanwhile.
            ValueError: its state does not fit.
        """
        start = time.monotonic()
        number, self.invited = self.invited, 0
        self._door.pass_by(number)
        place = self.membership.admit(self._door.read(number))
        try:
            if self.membership.is_first:
                self._door.answer(number, self.membership.invitation())
            self._communicator.move(place)
            lanes = open_lanes(self._communicator, self._settings, self._table.on_gpu)
            self.membership.settle(self._communicator)
            self._rebuild(lanes, adopt=False)
            share_state(self._communicator, carried, newcomer=False)
        except BaseException:
            self.membership.dismiss()
            raise
        self.welcome(carried.progress.num_reductions, time.monotonic() - start)
        return lanes

    def welcome(self, step: int, seconds: float) -> None:
        """Note that the newest rank has come."""
        newcomer = self.membership.world[-1]
        self._newcomers.add(newcomer)
        self.joins.append({"seconds": seconds, "step": step, "rank": newcomer, "world": self.membership.world})
        if self.membership.is_first:
            _LOG.warning("rank %d has come: %d ranks go on at step %d", newcomer, len(self.membership.world), step)

    def num_newcomers(self) -> int:
        """Return the number of ranks that take part in the present step without gradients."""
        return len(self._newcomers.intersection(self.membership.world))

    def _rebuild(self, lanes: list[Communicator], adopt: bool) -> None:
        """Sort all parameters into new buckets, with the state of the old ones; ``adopt``: and their gradients."""
        self._table.rebuild(lanes, self._settings, adopt=adopt)

    def _note(self, old: World, decision: Decision, step: int, seconds: float) -> None:
        left = {rank: decision.gone.get(rank, "was lost while the others met") for rank in old}
        for rank in self.membership.world:
            del left[rank]
        self.recoveries.append({"seconds": seconds, "step": step, "left": left, "world": self.membership.world})
        if self.membership.is_first:
            fates = ", ".join(f"rank {rank} {fate}" for rank, fate in left.items())
            count = len(self.membership.world)
            _LOG.warning("%s: %d ranks go on at step %d, after %.2f s", fates, count, step, seconds)

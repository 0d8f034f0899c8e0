"""Agreement of the remaining ranks on who they are, and on the last step that counts.

Every rank whose operation fails writes a report with the last step that it has committed. Once each rank has reported
or is known to be lost, any rank may propose the new world. The store accepts the first proposal of a round, and all
ranks read it. The ranks of a decision then meet; if one of them does not come, the next round decides again. So a rank
may die at any time, also during the agreement: that only takes another round.

A step is committed after an exchange that every rank enters with all results of the step. If any rank has committed it,
all ranks have its results and commit it too. If none has, none will, and the step is reduced again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.own_group import Place
from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store
from pycomm.training.elastic.agreement_store import (
    AgreementStore,
    open_agreement_store,
    open_file,
)
from pycomm.training.elastic.liveness import (
    PATIENCE,
    PROCESS,
    STOPPED_PATIENCE,
    Heartbeat,
    ProcessWatch,
    is_called,
    round_store,
)
from pycomm.untrusted import COUNT, ListOf, OneOf, PairOf, escaped, parse

_POLL = 0.002  # seconds

_TO_MEET = 2.0
_TO_MEET_PER_RANK = 0.02
"""Seconds within which ranks meet once they have agreed. After that they agree again, with a longer limit."""
_TO_JOIN = 10.0
"""Seconds within which an admitted newcomer must connect."""

World = tuple[int, ...]

_FATES = ListOf(PairOf(COUNT, str))
_REPORT = {"committed": COUNT, "silent": _FATES, "why": str}
_DECISION = {"world": ListOf(COUNT, least=1), "committed": COUNT, "gone": _FATES}


@dataclass(frozen=True)
class Decision:
    """Decision of one round: the new world.

    Attributes:
        world: remaining ranks by their original numbers, sorted.
        committed: largest number of steps that any of them has committed.
        gone: lost ranks, each with the reason.
    """

    world: World
    committed: int
    gone: Mapping[int, str] = field(default_factory=dict)


class _Round:
    """One round of agreement between the ranks of ``world``: what the store has of it, and what this rank has read."""

    def __init__(
        self, agreement: AgreementStore, number: int, world: World, watch: ProcessWatch, patience: float
    ) -> None:
        self._agreement, self._world, self._watch = agreement, world, watch
        self._store = round_store(agreement.store, number)
        self._patience = patience
        self._begun = time.monotonic()
        self._alive: set[int] = set()
        self._reports: dict[int, dict[str, Any]] = {}
        self._gone: dict[int, str] = {}

    def report(self, rank: int, content: dict[str, Any]) -> None:
        self._agreement.ask(lambda: self._store.set(f"report/{rank}", json.dumps(content)))
        self._agreement.ask(lambda: self._store.set("called", ""))

    def note_gone(self, rank: int, fate: str) -> None:
        """Write that ``rank`` is lost, and why."""
        self._gone[rank] = fate
        self._agreement.ask(lambda: self._store.set(f"gone/{rank}", fate))

    def decision(self) -> Decision | None:
        """Return the decision; if there is none yet, read what other ranks have written and return ``None``."""
        return self._agreement.ask(self._look)

    def is_over(self, *, out_of_patience: bool) -> bool:
        """Return whether every rank has reported or counts as lost, as silent ones do when ``out_of_patience``."""
        accused = {rank: why for report in self._reports.values() for rank, why in report["silent"]}
        for rank in self._silent():
            fate = self._watch.fate_of(rank) or accused.get(rank)
            if fate is None and (out_of_patience or self._is_mute(rank)):
                fate = "did not answer"
            if fate is not None:
                self.note_gone(rank, fate)
        return not self._silent()

    def propose(self) -> None:
        """Propose the ranks that have reported as the new world, unless there is a decision already."""
        committed = max(report["committed"] for report in self._reports.values())
        decision = {"world": sorted(self._reports), "committed": committed, "gone": list(self._gone.items())}
        text = json.dumps(decision)
        self._agreement.ask(lambda: self._store.compare_set("decision", "", text))

    def _is_mute(self, rank: int) -> bool:
        """Return whether ``rank``, on another host, has shown no sign of life within the patience."""
        if self._watch.sees(rank) or rank in self._alive or time.monotonic() - self._begun < self._patience:
            return False
        if self._agreement.ask(lambda: self._store.check([f"alive/{rank}"])):
            self._alive.add(rank)
        return rank not in self._alive

    def _silent(self) -> list[int]:
        return [rank for rank in self._world if rank not in self._reports and rank not in self._gone]

    def _look(self) -> Decision | None:
        if self._store.check(["decision"]):
            told = self._read("decision", _DECISION)
            if not set(told["world"]) <= set(self._world):
                raise ValueError(f"decision is malformed: its world {told['world']} is no part of {list(self._world)}")
            return Decision(
                tuple(told["world"]), told["committed"], {rank: escaped(fate) for rank, fate in told["gone"]}
            )
        for rank in self._world:
            if rank not in self._reports and self._store.check([f"report/{rank}"]):
                self._reports[rank] = self._read(f"report/{rank}", _REPORT)
                self._gone.pop(rank, None)
        for rank in self._silent():
            if self._store.check([f"gone/{rank}"]):
                self._gone[rank] = escaped(self._store.get(f"gone/{rank}").decode())
        return None

    def _read(self, key: str, shape: Any) -> Any:
        return parse(self._store.get(key), shape, key)


class Membership:
    """Membership of this rank in a group that may lose and gain ranks.

    Args:
        agreement: the ranks' store, which this object then owns.
        first: place where the first ranks have met.
        me: this rank's number.
        min_ranks: fewest ranks that continue.
        timeout: seconds for which a living rank may be silent.

    Attributes:
        world: the ranks, by the numbers that they got when they joined.
        me: this rank's number.
        epoch: number of changes of the world.
        watch: the ranks' processes.
    """

    def __init__(self, agreement: AgreementStore, first: Place, me: int, min_ranks: int, timeout: float) -> None:
        self.world: World = tuple(range(first.size))
        self.me = me
        self.epoch = 0
        self.watch = ProcessWatch()
        self._agreement, self._first = agreement, first
        self._min_ranks, self._timeout = min_ranks, timeout
        self._round = 0
        self._meetings = 0  # attempts since the last complete one
        self._numbers = first.size  # handed out so far
        self._heartbeat: Heartbeat | None = None  # only with several hosts

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the world, which logs for all."""
        return self.world[0] == self.me

    @classmethod
    def found(cls, communicator: Communicator, min_ranks: int) -> Membership:
        """Return the initial membership: the ranks of ``communicator``. Collective."""
        store, first, timeout = open_agreement_store(communicator), communicator.place, communicator.channel.timeout
        made = cls(store, first, communicator.rank, min_ranks, timeout)
        made._meet(communicator)
        return made

    def agree(self, committed: int, silent: Mapping[int, str] | None = None, why: str = "") -> Decision:
        """Agree on the remaining ranks. Collective among them; they then meet at :meth:`place`.

        Args:
            committed: number of steps that this rank has committed.
            silent: ranks that this one has waited for in vain, with reasons; excluded unless they report.
            why: what happened, for ranks that are excluded.
        """
        self._round += 1
        if self._heartbeat is not None:
            self._heartbeat.expect(self._round + 1)
        attempt = self._attempt(self._round)
        attempt.report(self.me, {"committed": committed, "silent": list((silent or {}).items()), "why": why})
        start = time.monotonic()
        while (decision := attempt.decision()) is None:
            if attempt.is_over(out_of_patience=time.monotonic() - start > self._timeout):
                attempt.propose()
            else:
                time.sleep(_POLL)
        return self._follow(decision, time.monotonic() - start)

    def leave(self, reason: str) -> None:
        """Announce to the others that this rank no longer takes part."""
        with contextlib.suppress(CommError):  # they will notice it
            self._attempt(self._round + 1).note_gone(self.me, reason)

    def _attempt(self, number: int) -> _Round:
        patience = PATIENCE if self._heartbeat is None else self._heartbeat.patience
        return _Round(self._agreement, number, self.world, self.watch, patience)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are on one host and agree in its memory."""
        return bool(self._agreement.path)

    @property
    def store(self) -> Store:
        """Store of the first ranks' process group."""
        return self._first.store

    def place(self) -> Place:
        """Return the place where the ranks that have agreed meet."""
        patience = (_TO_MEET + _TO_MEET_PER_RANK * len(self.world)) * 2 ** min(self._meetings, 10)
        self._meetings += 1
        return self._place(f"epoch/{self._round}", patience)

    def confirm(self, communicator: Communicator) -> None:
        """Continue with the ranks of ``communicator``, which have met. Collective."""
        self._meet(communicator)
        self.epoch += 1
        self._meetings = 0

    # Newcomers.

    def admit(self, communicator: Communicator, request: int, process: Mapping[str, Any] | None) -> Place:
        """Add the newcomer of a request to the world; return where all meet. Collective.

        Args:
            communicator: the ranks' communicator.
            request: number of the request.
            process: the newcomer's process; used on the first rank, which has checked the request.

        Raises:
            CommError: a rank was lost meanwhile.
            ValueError: on all ranks: the first one has not checked the request.
        """
        number, self._numbers = self._numbers, self._numbers + 1
        told = communicator.channel.all_gather_bytes(json.dumps(process).encode())[0]
        checked = parse(told, OneOf(None, PROCESS), f"rank 0's message about request {request} to join")
        if checked is None:
            raise ValueError(f"the first rank has not checked request {request} to join")
        self.watch.processes[number] = checked
        self.world += (number,)
        return self._place(f"join/{request}", _TO_JOIN)

    def dismiss(self) -> None:
        """Undo :meth:`admit`: the newcomer did not come."""
        self.world = self.world[:-1]

    def invitation(self) -> dict[str, Any]:
        """Return what a newcomer needs for :meth:`accept`; called after :meth:`admit`."""
        return {
            "name": self._first.name,
            "backends": self._first.backends,
            "agreement": [self._agreement.name, self._agreement.path],
            "world": self.world,
            "round": self._round,
            "epoch": self.epoch,
            "numbers": self._numbers,
            "processes": list(self.watch.processes.items()),
        }

    @classmethod
    def accept(
        cls, invitation: Mapping[str, Any], store: Store, min_ranks: int, timeout: float
    ) -> tuple[Membership, Place]:
        """Return a newcomer's membership after an :meth:`invitation`, and the place where its ranks meet."""
        name, path = invitation["agreement"]
        world = tuple(invitation["world"])
        try:
            file = open_file(path) if path else -1
        except OSError as error:
            raise CommError.during("join", f"the rank that let it in has died: {error}", rank=world[-1]) from None
        agreement = AgreementStore(world[-1], store, name, file)
        first = Place(invitation["name"], store, len(world) - 1, world, invitation["backends"])
        made = cls(agreement, first, world[-1], min_ranks, timeout)
        made.world, made._round, made.epoch = world, invitation["round"], invitation["epoch"]
        made._numbers = invitation["numbers"]
        made.watch.processes = dict(invitation["processes"])
        return made, made._place(f"join/{invitation['request']}", _TO_JOIN)

    def _place(self, name: str, patience: float) -> Place:
        return dataclasses.replace(
            self._first,
            name=f"{self._first.name}/{name}",
            store=PrefixStore(name, self._agreement.store),
            rank=self.world.index(self.me),
            ranks=self.world,
            lost=self._lost,
            patience=patience,
        )

    def _meet(self, communicator: Communicator) -> None:
        communicator.channel.transport.give_up_stopped_after(STOPPED_PATIENCE)
        self.watch.meet(communicator, self.world)
        if self._heartbeat is None and not self.is_on_one_host:
            self._heartbeat = Heartbeat(self._agreement.store, self.me, len(self.world))
        if self._heartbeat is not None:
            self._heartbeat.expect(self._round + 1)

    def close(self) -> None:
        """Stop answering, and release the store."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._agreement.close()

    def _lost(self, position: int) -> str | None:
        """Return why the rank at ``position`` in the world will not come; ``None`` if it may."""
        fate = self.watch.fate_of(self.world[position])
        if fate is not None:
            return f"rank {self.world[position]} {fate}"
        if self._agreement.ask(lambda: is_called(self._agreement.store, self._round + 1)):
            return "another rank has begun another round"
        return None

    def _follow(self, decision: Decision, elapsed: float) -> Decision:
        if self.me not in decision.world:
            what = f"this rank was left behind: it {decision.gone.get(self.me, 'is not among those that are left')}"
            raise CommError.during("recover", what, rank=self.me, peer=self.me, elapsed=elapsed)
        if len(decision.world) < self._min_ranks:
            fates = ", ".join(f"rank {rank} {fate}" for rank, fate in sorted(decision.gone.items()))
            what = f"{len(decision.world)} ranks are left, fewer than min_ranks={self._min_ranks}: {fates}"
            raise CommError.during(
                "recover", what, rank=self.me, peer=min(decision.gone, default=None), elapsed=elapsed
            )
        self.world = decision.world
        return decision


_SIGNS = {"timed out": "was waited for in vain", "is stopped": "is stopped"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Reconvened(Generic[_T]):
    """Result of :func:`reconvene`.

    Attributes:
        decision: the remaining ranks.
        committed: number of operations that count.
        opened: result of ``open_again``.
    """

    decision: Decision
    committed: int
    opened: _T


def reconvene(
    membership: Membership,
    communicator: Communicator,
    error: CommError,
    committed: int,
    *,
    catch_up: Callable[[int], None],
    open_again: Callable[[], _T],
    nobody_waits: bool = False,
) -> Reconvened[_T]:
    """Agree with the other remaining ranks, and move ``communicator`` to them. Collective.

    Args:
        membership: membership before the failure.
        communicator: communicator on which an operation failed; its memory is abandoned.
        error: error of that operation.
        committed: number of operations that this rank has committed.
        catch_up: called with the ranks' number if it is larger, to take over the results of those operations.
        open_again: opens further communicators over the moved one; called again if another rank is lost meanwhile.
        nobody_waits: whether no rank waits for this one on the communicator, so that it need not be closed early.
    """
    start = time.monotonic()
    while True:
        reason = f"it goes on without others: {error}"
        if not nobody_waits:
            communicator.close(reason)
        decision = membership.agree(committed, _silent(membership, error), str(error))
        communicator.close(reason)
        if decision.committed > committed:
            committed = decision.committed
            catch_up(committed)
        try:
            communicator.move(membership.place())
            opened = open_again()
            membership.confirm(communicator)
            return Reconvened(decision, committed, opened)
        except CommError as another:  # another rank was lost meanwhile, or cannot be reached by all
            if time.monotonic() - start > communicator.channel.timeout:
                raise
            error, nobody_waits = another, False


def _silent(membership: Membership, error: CommError) -> dict[int, str]:
    """Return the rank that ``error`` says was waited for in vain, with the reason; deaths are detected elsewhere."""
    world = membership.world
    if error.peer is None or error.peer >= len(world):
        return {}
    fate = next((fate for sign, fate in _SIGNS.items() if sign in str(error)), None)
    return {} if fate is None else {world[error.peer]: fate}

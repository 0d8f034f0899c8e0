"""Log lines that name ranks for which others wait, even ranks that never arrive.

A thread of the process checks twice a second whether an operation on one of its groups lasts. A rank that has waited
for two seconds writes a note to its group's store; without a wait, nothing is sent. A rank that has waited for eight
seconds reads the notes: ranks without a note about this operation have not arrived. The first waiting rank logs them.
(Some operations return on a rank before all ranks have arrived. A rank that then calls nothing for five seconds notes
that it has finished.)

A rank that calls nothing for four seconds, on any of its groups, may have dropped its training objects, which form
reference cycles. So the garbage collector runs once: unreachable groups are closed, and ranks that wait in them get an
error.

Operations on GPUs, which are only enqueued, and messages between two ranks are not watched.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from pycomm import threads
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.board import Board
from pycomm.torch_internals import PrefixStore

NAMED_AFTER = 8.0
"""Seconds of waiting after which a rank is named; with the time to read the notes, within ten."""
NAMED_AGAIN = 60.0
"""Seconds until it is named again."""

_LOOKS = 16  # in that time
_WAITING_SAID_AFTER = 1 / 4  # of it
_IDLE_SAID_AFTER = 5 / 8
_LONGEST_LOOK = 0.5  # seconds from one look to the next
_ANSWER = 2.0  # seconds for the store to answer
_PATIENCE = 3.0  # seconds for the thread to end
_MOST_NAMED = 8
_MESSAGES = ("send", "receive")
_WHOLE = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier", "run_program")
"""Operations that return on no rank before all ranks have arrived."""

_LOG = logging.getLogger("pycomm")

T = TypeVar("T")


@dataclass(frozen=True)
class AwaitedReduction:
    """Reduction for which this rank waits.

    Attributes:
        number: number of reductions before it.
        began: start of this rank's wait, on the monotonic clock.
        there: ranks of the group that are known to have arrived.
        world: names of the group's ranks.
    """

    number: int
    began: float
    there: Collection[int]
    world: Sequence[int]


class Reductions(Protocol):
    """Reductions of which one may be waited for."""

    def awaited(self) -> AwaitedReduction | None:
        """Return the reduction that this rank waits for now, if any."""

    def recorders(self) -> Sequence[Recorder]:
        """Return the recorders of their groups."""


class _WaitNote(NamedTuple):
    """Note of a rank: the operation of the group that it waits in (``is_waiting``), or has ended last."""

    number: int
    is_waiting: bool

    @classmethod
    def read(cls, text: str) -> _WaitNote | None:
        number, _, state = text.partition(" ")
        return cls(int(number), state == "waits") if number.isdigit() else None

    def __str__(self) -> str:
        return f"{self.number} {'waits' if self.is_waiting else 'ended'}"


@dataclass(eq=False)
class _Group:
    """State of this rank's last operation on a group.

    Attributes:
        count: its number.
        since: when it was first seen, on the monotonic clock.
        is_over: whether it has ended.
        is_whole: whether its end implies that all ranks have arrived.
        said: note about it in the store.
        look_again: earliest time to read the notes again.
    """

    count: int = 0
    since: float = 0.0
    is_over: bool = True
    is_whole: bool = True
    said: _WaitNote | None = None
    look_again: float = 0.0
    is_collected: bool = False

    def begin(self, count: int, now: float) -> None:
        """Forget the operation before, now that another one has begun."""
        self.count, self.since, self.is_over, self.said, self.look_again = count, now, False, None, 0.0
        self.is_collected = False

    def is_at_work(self, now: float) -> bool:
        """Return whether an operation has begun lately."""
        return now - self.since < NAMED_AFTER / 2

    def is_left(self, now: float) -> bool:
        """Return True, once, if it has been idle for so long that its owner may be garbage."""
        if not self.is_over or self.is_collected or self.is_at_work(now):
            return False
        self.is_collected = True
        return True


@dataclass(frozen=True)
class _Wait:
    """Wait of this rank in an operation, for the log."""

    number: int
    title: str
    seconds: float
    there: Collection[int] = ()
    last: str = ""
    world: Sequence[int] = field(default_factory=tuple)

    def name(self, ranks: Sequence[int]) -> str:
        return names_of([self.world[rank] if self.world else rank for rank in ranks])


class LateRankWatch:
    """Watch over all groups of this process, with a thread while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may close a group at any place
        self._groups: weakref.WeakKeyDictionary[Recorder, _Group] = weakref.WeakKeyDictionary()
        self._reductions: dict[int, weakref.ref[Reductions]] = {}
        self._named: dict[int, tuple[int, float]] = {}  # by reductions: the last one, and when to ask again
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def add(self, recorder: Recorder) -> None:
        """Watch the operations of ``recorder``, unless its group has one rank or no store."""
        if len(recorder.ranks) < 2 or recorder.store is None:
            return
        with self._lock:
            self._groups[recorder] = _Group()
            if self._thread is None:
                self._closing = closing = threading.Event()
                self._thread = threads.start(lambda: self._run(closing), "pycomm-late-ranks", closing.set)

    def forget(self, recorder: Recorder) -> None:
        """Stop watching ``recorder``; after the last one, end the thread. Idempotent."""
        with self._lock:
            self._groups.pop(recorder, None)
            if self._groups:
                return
        self.close()

    def add_reductions(self, reductions: Reductions) -> None:
        """Describe the operations of ``reductions``, of which a weak reference is kept, as such in the log."""
        with self._lock:
            self._reductions[id(reductions)] = weakref.ref(reductions)

    def forget_reductions(self, reductions: Reductions) -> None:
        """Undo :meth:`add_reductions`. Idempotent."""
        with self._lock:
            self._reductions.pop(id(reductions), None)
            self._named.pop(id(reductions), None)

    def close(self) -> None:
        """End the thread, and wait for it."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _run(self, closing: threading.Event) -> None:
        asking = _Asking()
        try:
            while not closing.wait(min(_LONGEST_LOOK, NAMED_AFTER / _LOOKS)):
                if self._look(asking):
                    gc.collect()
        finally:
            asking.close()

    def _look(self, asking: _Asking) -> bool:
        """Check all groups; return whether the owner of one may be garbage."""
        with self._lock:
            groups = list(self._groups.items())
            known = [(key, found) for key, reference in self._reductions.items() if (found := reference()) is not None]
        awaited = {recorder: (key, each.awaited()) for key, each in known for recorder in each.recorders()}
        for recorder, group in groups:
            key, reduction = awaited.get(recorder, (0, None))
            wait = self._wait_in(recorder, group, asking, reduction, is_reducers=recorder in awaited)
            if wait is None:
                continue
            number, look_again = self._named.get(key, (-1, 0.0))
            if reduction is not None and number == reduction.number:  # named already, by another operation of it
                group.look_again = max(group.look_again, look_again)
            now = time.monotonic()
            if wait.seconds >= NAMED_AFTER and now >= group.look_again:
                group.look_again = now + (NAMED_AGAIN if asking.name(recorder, wait) else NAMED_AFTER / 2)
                if reduction is not None:
                    self._named[key] = (reduction.number, group.look_again)
        now = time.monotonic()
        if any(group.is_at_work(now) for _, group in groups):  # a collection holds up all threads of the process
            return False
        left = [group for _, group in groups if group.is_left(now)]
        return bool(left)

    @staticmethod
    def _wait_in(
        recorder: Recorder, group: _Group, asking: _Asking, reduction: AwaitedReduction | None, *, is_reducers: bool
    ) -> _Wait | None:
        """Return this rank's present wait on the group, if it lasts; keep its note up to date."""
        now, count = time.monotonic(), recorder.count
        if count != group.count:
            if group.said is not None and group.said.is_waiting:
                asking.say(recorder, _WaitNote(count - 1, is_waiting=False))
            group.begin(count, now)
        lasted = now - group.since
        if group.is_over:
            if not group.is_whole and group.said is None and lasted >= NAMED_AFTER * _IDLE_SAID_AFTER:
                group.said = asking.say(recorder, _WaitNote(count, is_waiting=False))
            return None
        if lasted < NAMED_AFTER * _WAITING_SAID_AFTER:
            return None
        entry = next((e for e in reversed(recorder.entries()) if e.operation not in _MESSAGES), None)
        if entry is None or entry.ended is not None:
            group.is_over, group.is_whole = True, entry is None or entry.operation in _WHOLE
            if group.said is not None:  # that it waits
                group.said = asking.say(recorder, _WaitNote(count, is_waiting=False))
            return None
        if is_reducers and reduction is None and entry.label is not None:
            return None  # a bucket in flight during backward: nobody waits
        seconds = now - (entry.began if reduction is None else max(entry.began, reduction.began))
        if group.said is None:
            group.said = asking.say(recorder, _WaitNote(count, is_waiting=True))
        if reduction is not None:
            last = f"last seen at reduction {reduction.number}" if reduction.number > 0 else ""
            title = f"reduction {reduction.number + 1}"
            return _Wait(count, title, seconds, reduction.there, last, reduction.world)
        return _Wait(count, _title_of(recorder, entry), seconds)


class _Asking:
    """Reads and writes of notes."""

    def __init__(self) -> None:
        self._board = Board("pycomm-late-ranks-store")

    def close(self) -> None:
        """End the thread."""
        self._board.close(patience=1.0)

    def say(self, recorder: Recorder, note: _WaitNote) -> _WaitNote | None:
        """Write ``note`` to the group's store; return it on success."""
        store = _store_of(recorder)
        return note if self._ask(lambda: store.set(str(recorder.rank), str(note)) or True) else None

    def name(self, recorder: Recorder, wait: _Wait) -> bool:
        """Log the ranks for which this one waits, unless another rank does; return whether it logged some."""
        me, everybody = recorder.rank, range(len(recorder.ranks))
        notes = self._notes(recorder, wait.number)
        if notes is None:
            first = min(wait.there, default=me)
        else:
            waiting = (p for p, note in notes.items() if note.number == wait.number and note.is_waiting)
            first = min((me, *waiting))
        if first != me:
            return False
        told = {me, *(p for p, note in (notes or {}).items() if note.number >= wait.number)}
        absent = [p for p in everybody if p not in told and p not in wait.there]
        stuck = [p for p in everybody if p not in told and p in wait.there]
        if absent:
            # A rank that waits in an earlier operation waits for another rank itself, which is the one to name.
            silent = [p for p in absent if notes is None or p not in notes or not notes[p].is_waiting]
            _LOG.warning("%s", _absence(silent or absent, wait, notes or {}))
        elif stuck and notes is not None:
            what = f"{wait.name(stuck)} came to {wait.title} and did not go on for {wait.seconds:.0f} s"
            _LOG.warning("%s: the others wait for %s", what, "it" if len(stuck) == 1 else "them")
        return bool(absent or stuck)

    def _notes(self, recorder: Recorder, number: int) -> dict[int, _WaitNote] | None:
        """Return other ranks' notes, up to the first lower rank that waits too; ``None`` if the store is silent."""
        store, me, size = _store_of(recorder), recorder.rank, len(recorder.ranks)

        def read() -> dict[int, _WaitNote]:
            notes: dict[int, _WaitNote] = {}
            for p in range(size):
                if p == me or not store.check([str(p)]):
                    continue
                note = _WaitNote.read(store.get(str(p)).decode("utf-8", "replace"))
                if note is not None:
                    notes[p] = note
                    if p < me and note == (number, True):
                        break
            return notes

        return self._ask(read)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer; ``None`` if the store fails, or has not answered the last question yet."""
        try:
            return None if self._board.is_stuck else self._board.ask(question, _ANSWER)
        except RuntimeError:  # a StoreError, or no thread can be started
            return None


def _store_of(recorder: Recorder) -> Any:
    return PrefixStore(f"pycomm/late_ranks/{recorder.group}", recorder.store)


def _title_of(recorder: Recorder, entry: Any) -> str:
    """Return the log's name of an operation."""
    at = "" if entry.line is None else f", {os.path.basename(entry.line[0])}:{entry.line[1]}"
    ranks = recorder.ranks
    among = "" if ranks == tuple(range(len(ranks))) else f" of the group of {names_of(ranks)}"
    return f"operation {entry.number}{among} ({entry.operation}{at})"


def _absence(ranks: Sequence[int], wait: _Wait, notes: Mapping[int, _WaitNote]) -> str:
    one = len(ranks) == 1
    last = wait.last
    if not last and one and ranks[0] in notes:
        last = f"last seen at operation {notes[ranks[0]].number}"
    return absence(wait.name(ranks), wait.title, wait.seconds, last, is_one=one)


def absence(ranks: str, title: str, seconds: float, last: str = "", *, is_one: bool) -> str:
    """Return the log line about ``ranks`` that others wait for."""
    text = f"{ranks} {'has' if is_one else 'have'} not come to {title} for {seconds:.0f} s: the others wait for "
    return text + ("it" if is_one else "them") + (f" ({last})" if last else "")


def name_absent(rank: int, size: int, absent: Sequence[int], seconds: float) -> None:
    """Log, on the first rank that has arrived, the ranks absent from the creation of a communicator."""
    if absent and rank == min(set(range(size)).difference(absent)):
        title = "make a communicator (attach, Communicator)"
        _LOG.warning("%s", absence(names_of(absent), title, seconds, is_one=len(absent) == 1))


def names_of(ranks: Sequence[int]) -> str:
    """Return the names of ``ranks``, the first ones if there are many."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


_watch = LateRankWatch()
add, forget = _watch.add, _watch.forget
add_reductions, forget_reductions = _watch.add_reductions, _watch.forget_reductions

os.register_at_fork(after_in_child=lambda: _watch.__init__())  # type: ignore[misc]

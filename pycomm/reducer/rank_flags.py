"""Rank flags: what ranks tell one another with every reduction, in 64 bits inside the messages of the gradients.

Bits 0 to 31 travel with the first bucket, made by :mod:`pycomm.reducer.replicas`:

- 0-3: number of steps that the optimizer has taken, modulo 16. If ranks differ, that is an error.
- 4: the state of compression has changed by itself. An error names rank and parameter.
- 5-26: hash of the parameters, in some reductions. An error names parameter and ranks.
- 27-31: hash of the buffers, with the parameters'. A line of log names a buffer.

Bits 32 to 63 travel with the last bucket. They are fixed when it is launched, which is when they are known:

- 32-43: hash of every group's numbers (lr, momentum, betas, ...). An error names group, key, values and ranks.
- 44-49: loop index: forwards that no backward followed, calls of ``zero_grad``, gradients that were not cleared. An
  error names the rank that has left out a batch.
- 50-59: hash of which parameters are frozen. An error names parameter and ranks.
- 60: the optimizer has parameters that are not averaged yet. If all ranks say so, they are taken; else an error.
- 61: a veto of this step, which is then discarded on all ranks.
- 62: this rank has no batch: the mean is that of the other ranks.
- 63: a request to stop, of which all ranks hear.

Only bits travel. If they differ, which all ranks see alike, or one of the last three is set, the ranks exchange the
words behind them, and each comes to the same verdict before any gradient is handed out. On a GPU, where the host does
not wait for the gradients, that is two reductions later.
"""

from __future__ import annotations

import signal
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from pycomm.bucket import FINGERPRINT_BITS
from pycomm.descriptions import name_ranks
from pycomm.optim.hyperparameters import Hyperparameters, Numbers, first_difference
from pycomm.optim.loop_index import LoopIndex

GROUPS = slice(32, 44)
LOOP = slice(44, 50)
FROZEN = slice(50, 60)
NEW, VETO, SKIP, STOP = 60, 61, 62, 63
_ANY = (VETO, SKIP, STOP)
_SALTED_ALIKE = 8
"""Number of reductions after which what the few bits of hyperparameters have missed is found."""
_REMEMBERED = 4
"""Number of records that are kept: on a GPU the one of two reductions before is asked for."""


@dataclass(frozen=True)
class Record:
    """Words behind the flags of one rank in one reduction; all of it can be JSON.

    Attributes:
        loop: unused forwards, calls of ``zero_grad`` beyond one, and whether gradients of the step before were added
            to.
            ``None``: the rank took part without a pass of its own, and is not compared.
        frozen: names of the parameters that do not require gradients.
        new: names of the parameters of the optimizer that are not averaged yet.
        veto, stop: reasons; ``None`` if it was not asked for.
        skips: whether this rank has no batch.
    """

    loop: tuple[int, int, bool] | None = None
    frozen: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    veto: str | None = None
    skips: bool = False
    stop: str | None = None

    def value(self, groups_digest: int) -> int:
        """Return the bits as a number."""
        value = (groups_digest & 0xFFF) << GROUPS.start
        if self.loop is not None:
            unused, restarts, accumulated = self.loop
            value |= (min(unused, 3) | min(restarts, 7) << 2 | accumulated << 5) << LOOP.start
        if self.frozen:
            value |= (1 + hash_of(self.frozen) % 1023) << FROZEN.start
        flags = {NEW: bool(self.new), VETO: self.veto is not None, SKIP: self.skips, STOP: self.stop is not None}
        return value | sum(1 << bit for bit, is_set in flags.items() if is_set)

    def words(self) -> dict[str, Any]:
        """Return it as a dict."""
        return asdict(self)


def hash_of(names: Collection[str]) -> int:
    """Return a number that is the same for equal ``names`` in every process."""
    return zlib.crc32("\n".join(names).encode())


@dataclass
class Announcements:
    """What the ranks have told one another in the last reduction.

    Attributes:
        veto: reasons for which the step is discarded, by rank.
        skipping: ranks without a batch.
        new: whether all ranks have parameters that are not averaged yet.
    """

    veto: Mapping[int, str] = field(default_factory=dict)
    skipping: tuple[int, ...] = ()
    new: bool = False


class StopRequest:
    """Request of a rank to end the training; false until there is one, which all ranks learn at the same step.

    Attributes:
        rank: rank that asked first; -1 while nobody has.
        reason: its reason.
    """

    def __init__(self, rank: int = -1, reason: str = "") -> None:
        self.rank, self.reason = rank, reason

    def __bool__(self) -> bool:
        return self.rank >= 0

    def __repr__(self) -> str:
        return f"StopRequest(rank={self.rank}, reason={self.reason!r})" if self else "StopRequest()"


class RankFlags:
    """The second half of the flags of this rank, and what it has heard of the others.

    Args:
        hyperparameters: of the optimizer, which are compared.
        device: device of the gradients.
        check: called when a hyperparameter has changed; raises ValueError if it does not go with compression.

    Attributes:
        loop: counts since the last reduction.
        takes_new: whether parameters that are new are announced here; otherwise the ranks meet about them.
        compares_loop: whether the loop index and the groups are compared; not where ranks may be a step behind.
        veto, stop: what this rank asks for, until all have heard of it.
        skips: whether this rank has no batch for this reduction.
        just_stepped: whether the optimizer has taken a step, and no forward or ``zero_grad`` has followed.
        has_pass: whether this reduction follows from a pass of this rank.
        heard: what the ranks have told one another in the last reduction.
        stop_requested: the request that all ranks have heard of.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        self.hyperparameters = hyperparameters
        self._check = check
        self.loop = LoopIndex()
        self.takes_new = self.compares_loop = True
        self.veto: str | None = None
        self.stop: str | None = None
        self.skips = False
        self.has_pass, self.just_stepped = True, False
        self.heard = Announcements()
        self.stop_requested = StopRequest()
        on_host = device.type == "cpu"
        self._shifts = None if on_host else torch.arange(FINGERPRINT_BITS, device=device, dtype=torch.int64)
        self._told: tuple[Any, int] | None = None
        self._telling = (Record(), 0, torch.empty(0, dtype=torch.bool))  # for these words
        self._records: deque[tuple[int, Record, int]] = deque(maxlen=_REMEMBERED)

    def request_stop(self, reason: str, lone_rank: int | None) -> None:
        """Ask all ranks to stop, with the next reduction; at once if ``lone_rank`` is alone, and reduces nothing."""
        if lone_rank is not None and not self.stop_requested:
            self.stop_requested = StopRequest(lone_rank, reason)
        elif self.stop is None:
            self.stop = reason

    def require_suitable(self) -> None:
        """Have hyperparameters that have changed checked, and raise ValueError if they do not go with compression."""
        if self.hyperparameters.refresh():
            self._check()

    def fix(self, num_reductions: int, frozen: tuple[str, ...], new: tuple[str, ...]) -> torch.Tensor:
        """Fix what this rank tells in the reduction that follows ``num_reductions`` others; return the bits.

        Args:
            num_reductions: number of reductions before this one.
            frozen, new: see :class:`Record`.
        """
        loop = self.loop
        compared = self.compares_loop and self.has_pass
        words = (
            (loop.num_unused, loop.num_restarts, loop.accumulated) if compared else None,
            frozen,
            new if self.takes_new else (),
            self.veto,
            self.skips,
            self.stop,
        )
        digest = self.hyperparameters.digest(num_reductions // _SALTED_ALIKE) if self.compares_loop else 0
        if (words, digest) != self._told:  # most reductions tell what the one before has told
            record = Record(*words)
            value = record.value(digest)
            self._told, self._telling = (words, digest), (record, value, self._bits(value))
        record, value, bits = self._telling
        self._records.append((num_reductions, record, value))
        return bits

    def _bits(self, value: int) -> torch.Tensor:
        if self._shifts is None:
            octets = np.frombuffer(value.to_bytes(FINGERPRINT_BITS // 8, "little"), np.uint8)
            return torch.from_numpy(np.unpackbits(octets, bitorder="little").view(np.bool_))
        signed = value - (1 << FINGERPRINT_BITS) if value >> (FINGERPRINT_BITS - 1) else value
        # A number that a kernel fills in, not one that is copied: no copy to a GPU has to be waited for.
        number = torch.full((), signed, dtype=torch.int64, device=self._shifts.device)
        return ((number >> self._shifts) & 1).bool()

    def said(self, differing: torch.Tensor, num_reductions: int) -> torch.Tensor:
        """Return ``differing`` with the bits that count if a single rank has set them, even if all have."""
        _, _, value = self._records[-1] if self._records else (0, Record(), 0)
        mine = [bit for bit in _ANY if value >> bit & 1] + ([NEW] if value >> NEW & 1 else [])
        if not mine:
            return differing
        differing = differing.clone()
        differing[mine] = True
        return differing

    def record_of(self, num_reductions: int) -> Record:
        """Return this rank's record of that reduction."""
        return next((record for number, record, _ in self._records if number == num_reductions), Record())

    def reduced(self) -> None:
        """Begin to count anew, for the next reduction: gradients have been handed out, or discarded."""
        self.loop.restart()
        self.veto, self.skips, self.has_pass = None, False, True
        if self.stop_requested:
            self.stop = None

    def hear(self, by_rank: Mapping[int, Mapping[str, Any]]) -> None:
        """Take note of what all ranks ask for: their records as words."""
        self.heard = Announcements(
            veto={rank: words["veto"] for rank, words in by_rank.items() if words["veto"] is not None},
            skipping=tuple(rank for rank, words in by_rank.items() if words["skips"]),
            new=any(words["new"] for words in by_rank.values()),
        )
        for rank, words in by_rank.items():
            if words["stop"] is not None and not self.stop_requested:
                self.stop_requested = StopRequest(rank, words["stop"])


Words = Mapping[str, Any]
"""Record of one rank; see :class:`pycomm.reducer.rank_comparison.Record`."""

_PAIRED = (
    "Their gradients would be averaged with those of other batches. A rank without a usable batch calls "
    "reducer.skip_batch() in place of forward and backward, or reducer.veto_step() to have the step left out on all"
)


def raise_out_of_loop(records: Mapping[int, Words]) -> None:
    """Raise RuntimeError if ranks have done different things since the last reduction."""
    loops = {rank: tuple(words["loop"]) for rank, words in records.items() if words["loop"] is not None}
    if len(set(loops.values())) < 2:
        return
    accumulated = [rank for rank, (_, _, flag) in loops.items() if flag]
    if 0 < len(accumulated) < len(loops):
        raise RuntimeError(
            f"{name_ranks(accumulated)} added this backward() to gradients that the last optimizer.step() has used, "
            "the others did not: optimizer.zero_grad() was left out there"
        )
    unused = {rank: count for rank, (count, _, _) in loops.items()}
    if len(set(unused.values())) > 1:
        most = [rank for rank, count in unused.items() if count > min(unused.values())]
        raise RuntimeError(
            f"{name_ranks(most)} left out a batch: forwards in training mode since the last reduction that no "
            f"backward() followed: {_by_rank(unused)}. {_PAIRED}. A forward that is no training step belongs in "
            "torch.no_grad(), after model.eval(), or in `with reducer.paused():`"
        )
    calls = {rank: 1 + count for rank, (_, count, _) in loops.items()}
    most = [rank for rank, count in calls.items() if count > min(calls.values())]
    raise RuntimeError(
        f"{name_ranks(most)} left out a batch: calls of optimizer.zero_grad() since the last reduction: "
        f"{_by_rank(calls)}. {_PAIRED}. A call that belongs to no training step goes in `with reducer.paused():`"
    )


def raise_different_groups(groups: Mapping[int, list[Numbers] | None]) -> None:
    """Raise ValueError if hyperparameters differ; ``None`` for ranks that are not compared."""
    found = first_difference(list(groups.values()))
    if found is None:
        return
    index, key, values = found
    by_value: dict[str, list[int]] = {}
    for (rank, told), value in zip(groups.items(), values, strict=True):
        if told is not None:
            by_value.setdefault("missing" if value is None else repr(value), []).append(rank)
    told_values = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
    raise ValueError(
        f"the ranks' optimizers differ: {key!r} of parameter group {index} is {told_values}. Change it on all ranks "
        "alike: by the same schedule, by a loss or progress that is averaged over the ranks, by a checkpoint that all "
        f'load. If it is meant to differ, write tuning=pycomm.Tuning(per_rank=("{key}",))'
    )


def raise_different_freezing(records: Mapping[int, Words]) -> None:
    """Raise RuntimeError if a parameter is frozen on some ranks only."""
    frozen = {rank: set(words["frozen"]) for rank, words in records.items()}
    names = [name for words in records.values() for name in words["frozen"]]
    for name in names:
        where = [rank for rank, those in frozen.items() if name in those]
        if len(where) < len(records):
            raise RuntimeError(
                f"parameter {name!r} is frozen (requires_grad=False) on {name_ranks(where)}, and trained on "
                f"{name_ranks([rank for rank in records if rank not in where])}: freeze it on all ranks, or on none"
            )


def raise_different_new(records: Mapping[int, Words]) -> None:
    """Raise RuntimeError if parameters are new on some ranks only."""
    new = {rank: list(words["new"]) for rank, words in records.items()}
    have = [rank for rank, names in new.items() if names]
    lack = [rank for rank, names in new.items() if not names]
    if have and lack:
        raise RuntimeError(
            f"there is a new parameter, {new[have[0]][0]!r}, on {name_ranks(have)}, and none on {name_ranks(lack)}: "
            "add, replace or unfreeze parameters on all ranks, between the same steps, and have reduce() average "
            "gradients of frozen ones on all ranks or on none"
        )


def _by_rank(counts: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())


def reasons_of(veto: Mapping[int, str]) -> str:
    """Return who vetoed a step, and why."""
    return ", ".join(f"rank {rank}{f' ({reason})' if reason else ''}" for rank, reason in veto.items())


class Stoppable(Protocol):
    """Object through which all ranks can be asked to stop: a Reducer, or a handle of :func:`pycomm.ddp.register`."""

    def request_stop(self, reason: str = "") -> None: ...


class SignalStop:
    """Handler of signals that requests a stop; a context manager, which gives back the former handlers at its end.

    Made by :func:`stop_on_signal`.
    """

    def __init__(self, reducer: Stoppable, signals: tuple[int, ...]) -> None:
        self._reducer = reducer
        self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._reducer.request_stop(f"signal {signal.Signals(number).name}")
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def close(self) -> None:
        """Give back the handlers that the signals had before. Idempotent."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> SignalStop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stop_on_signal(reducer: Stoppable, *signals: int) -> SignalStop:
    """Have ``signals`` that this process gets request a stop of all ranks, in place of ending this one.

    A batch system sends SIGTERM, or SIGUSR1, before it takes the machines away, often to one process only. All ranks
    learn of it at the same step: see :meth:`pycomm.Reducer.request_stop`. A handler that was there is called too,
    unless it is Python's own for Ctrl-C. Call it on any of the ranks, on the main thread.

    Args:
        reducer: what ``attach``, ``pycomm.ddp.register`` or the ``attach`` of an integration returned.
        signals: ``signal.SIGTERM`` and others.

    Returns:
        A context manager, and an object with ``close()``, which gives back the former handlers.

    Raises:
        TypeError, ValueError: ``reducer`` has no ``request_stop``, or ``signals`` are none, or not on the main thread.
    """
    if not callable(getattr(reducer, "request_stop", None)):
        raise TypeError(f"reducer is a {type(reducer).__name__}, wanted what attach() returned")
    if not signals:
        raise ValueError("stop_on_signal() got no signals, wanted signal.SIGTERM or others")
    return SignalStop(reducer, signals)

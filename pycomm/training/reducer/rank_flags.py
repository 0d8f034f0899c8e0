"""Rank flags: 64 bits that ranks send each other with every reduction, inside the messages of the gradients.

Bits 0 to 31 travel with the first bucket, made by :mod:`pycomm.training.reducer.replicas`:

- 0-3: number of steps that the optimizer has taken, modulo 16. If ranks differ, that is an error.
- 4: compression's state was changed by something else. An error names rank and parameter.
- 5-26: hash of the parameters, or of a part of them. An error names parameter and ranks.
- 27-31: hash of the buffers, in some reductions. A log line names a buffer.

Bits 32 to 63 travel with the last bucket, and are fixed when it is launched:

- 32-59: hash of what all ranks must do alike. An error names what differs, and the ranks: every group's numbers (lr,
  momentum, betas, ...) now and in the last step; the loop index (forwards without a backward, calls of ``zero_grad``,
  gradients that were not cleared); training or evaluation mode of the module, and places of parameters in it; the loss
  scale; frozen parameters.
- 60: the optimizer has parameters that are not averaged yet. If all ranks have some, they are added; else an error.
- 61: a veto of this step, which is then discarded on all ranks.
- 62: this rank has no batch: the mean is that of the other ranks.
- 63: a request to stop, which all ranks receive.

Usually only bits travel. If they differ, or one of the last three is set, all ranks see it alike. They then exchange
the records behind the bits, and reach the same verdict before any gradient is handed out. On a GPU, where the host does
not wait for the gradients, that happens two reductions later.
"""

from __future__ import annotations

import json
import signal
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch

from pycomm.collectives.bucket import FingerprintBits
from pycomm.descriptions import counts_text, name_ranks, ranks_by_value
from pycomm.optim.hyperparameters import Hyperparameters, Numbers
from pycomm.optim.loop_index import LoopIndex
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, OneOf, parse

ALIKE = slice(32, 60)
NEW, VETO, SKIP, STOP = 60, 61, 62, 63
_ANY = (VETO, SKIP, STOP)
_REMEMBERED = 4
"""Number of records that are kept: on a GPU, the record of two reductions before is read."""
_RECORD = {
    "loop": OneOf(None, ListOf(OneOf(COUNT, bool), 3)),
    "modes": COUNT,
    "loss_scale": ANYTHING,
    "num_passes": COUNT,
    **dict.fromkeys(("frozen", "new"), ListOf(str)),
    **dict.fromkeys(("veto", "stop"), OneOf(None, str)),
    **dict.fromkeys(("skips", "absent"), bool),
    "reductions": COUNT,
    "steps": MapOf(COUNT),
    "groups": MapOf(ListOf(MapOf(ANYTHING))),
}
"""Form of a :class:`Record` that another rank has sent."""


@dataclass(frozen=True)
class Record:
    """Record behind the flags of one rank in one reduction. All fields can be encoded as JSON.

    Handles of :mod:`pycomm.ddp` send ``loop``, ``stop`` and the last four fields, a Reducer all but ``groups``.

    Attributes:
        loop: number of unused forwards, number of calls of ``zero_grad`` beyond one, and whether this step added to
            gradients of the one before. ``None``: the rank took part without a pass of its own, and is not compared.
        modes: hash of the modules' modes, training or evaluation, and of attached parameters that have moved in them.
        loss_scale: scale of the loss, if the host knows it.
        num_passes: number of passes that a function has put into this window; 0 if the number is given.
        frozen: names of the parameters that do not require gradients.
        new: names of the optimizer's parameters that are not averaged yet.
        veto, stop: reasons of the requests; ``None`` without one.
        skips: whether this rank has no batch.
        absent: whether the rank takes part without data and takes no steps, so that it is not compared.
        reductions: number of reductions before this one.
        steps: by the name of an optimizer's first parameter, the number of its steps since the last reduction. Of a
            Reducer, under "", the number of averages that its optimizer has used.
        groups: numbers of the optimizers' groups, by the same names.
    """

    loop: tuple[int, int, bool] | None = None
    modes: int = 0
    loss_scale: float | None = None
    num_passes: int = 0
    frozen: Sequence[str] = ()
    new: Sequence[str] = ()
    veto: str | None = None
    skips: bool = False
    stop: str | None = None
    absent: bool = False
    reductions: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, list[Numbers]] = field(default_factory=dict)

    def value(self, groups_digest: int) -> int:
        """Return the bits as a number."""
        alike = (self.loop or (0, 0, False), self.modes, self.loss_scale, self.num_passes, self.frozen)
        mixed = groups_digest ^ zlib.crc32(repr(alike).encode())
        value = (mixed & ((1 << ALIKE.stop - ALIKE.start) - 1)) << ALIKE.start
        flags = {NEW: bool(self.new), VETO: self.veto is not None, SKIP: self.skips, STOP: self.stop is not None}
        return value | sum(1 << bit for bit, is_set in flags.items() if is_set)

    def exchanged(self, gather: Callable[[bytes], Sequence[bytes]], world: Sequence[int]) -> dict[int, Record]:
        """Return the records of all ranks, by their numbers in ``world``. Collective, by ``gather``."""
        texts = gather(json.dumps(asdict(self)).encode())
        found = {
            rank: parse(text, _RECORD, f"the flags of rank {rank}") for rank, text in zip(world, texts, strict=True)
        }
        loops = {rank: None if of["loop"] is None else tuple(of["loop"]) for rank, of in found.items()}
        return {rank: Record(**{**of, "loop": loops[rank]}) for rank, of in found.items()}


@dataclass
class RankRequests:
    """Requests that the ranks have announced to one another in the last reduction.

    Attributes:
        veto: reasons to discard the step, by rank.
        skipping: ranks without a batch.
        new: whether all ranks have parameters that are not averaged yet.
    """

    veto: Mapping[int, str] = field(default_factory=dict)
    skipping: tuple[int, ...] = ()
    new: bool = False


class StopRequest:
    """Request of a rank to end the training. False until there is one; all ranks receive it at the same step.

    Attributes:
        rank: first rank that asked; -1 without a request.
        reason: its reason.
    """

    def __init__(self, rank: int = -1, reason: str = "") -> None:
        self.rank, self.reason = rank, reason

    def __bool__(self) -> bool:
        return self.rank >= 0

    def __repr__(self) -> str:
        return f"StopRequest(rank={self.rank}, reason={self.reason!r})" if self else "StopRequest()"


def first_stop(records: Mapping[int, Record]) -> StopRequest:
    """Return the request to stop of the first rank that has one."""
    return next((StopRequest(rank, of.stop) for rank, of in records.items() if of.stop is not None), StopRequest())


class RankFlags:
    """Bits 32 to 63 of this rank, and what the other ranks have announced.

    Args:
        check: called when a hyperparameter has changed; raises ValueError if compression does not support it.

    Attributes:
        takes_new: whether new parameters are announced by a flag; otherwise the ranks meet to add them.
        compares_loop: whether loop index and groups are compared; false where ranks may be a step behind.
        veto, stop: reasons of this rank's requests, until all ranks have received them.
        skips: whether this rank has no batch for this reduction.
        just_stepped: whether the optimizer has taken a step, and no forward or ``zero_grad`` has followed.
        has_pass: whether a pass of this rank leads to this reduction.
        announced: what the ranks have announced in the last reduction.
        stop_requested: the request to stop that all ranks have received.
        loss_scale, num_passes: see :class:`Record`; of the window that is about to end.
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
        self.announced = RankRequests()
        self.stop_requested = StopRequest()
        self.loss_scale: float | None = None
        self.num_passes = 0
        self._bits = FingerprintBits(device)
        self._last: tuple[Any, int] | None = None  # fields and digest of the last reduction
        self._sent = (Record(), 0, torch.empty(0, dtype=torch.bool))  # what they came to
        self._records: deque[tuple[int, Record, int]] = deque(maxlen=_REMEMBERED)

    def request_stop(self, reason: str, lone_rank: int | None) -> None:
        """Ask all ranks to stop with the next reduction, or at once if ``lone_rank`` is the only rank."""
        if lone_rank is not None and not self.stop_requested:
            self.stop_requested = StopRequest(lone_rank, reason)
        elif self.stop is None:
            self.stop = reason

    def require_suitable(self) -> None:
        """Check changed hyperparameters; raise ValueError if compression does not support them."""
        if self.hyperparameters.refresh():
            self._check()

    def note_step(self) -> None:
        """Note the hyperparameters of a step; raise ValueError if compression does not support new ones."""
        if self.hyperparameters.note_step():
            self._check()

    def fix(self, num_reductions: int, frozen: tuple[str, ...], new: tuple[str, ...], modes: int) -> torch.Tensor:
        """Fix this rank's record for the reduction that follows ``num_reductions`` others; return its bits."""
        loop, compared = self.loop, self.compares_loop
        has_pass = compared and self.has_pass
        fields = (
            (loop.num_unused, loop.num_restarts, loop.accumulated) if has_pass else None,
            modes if compared else 0,
            self.loss_scale if has_pass else None,
            self.num_passes if has_pass else 0,
            frozen,
            new if self.takes_new else (),
            self.veto,
            self.skips,
            self.stop,
        )
        digest = self.hyperparameters.digest if compared else 0
        if (fields, digest) != self._last:  # most reductions repeat the one before
            record = Record(*fields)
            value = record.value(digest)
            self._last, self._sent = (fields, digest), (record, value, self._bits.of(value))
        record, value, bits = self._sent
        self._records.append((num_reductions, record, value))
        return bits

    def with_own_requests(self, differing: torch.Tensor) -> torch.Tensor:
        """Return ``differing`` with this rank's requests set, which count even if all ranks make them."""
        _, _, value = self._records[-1] if self._records else (0, Record(), 0)
        mine = [bit for bit in _ANY if value >> bit & 1] + ([NEW] if value >> NEW & 1 else [])
        if not mine:
            return differing
        differing = differing.clone()
        differing[mine] = True
        return differing

    def record_of(self, num_reductions: int) -> Record:
        return next((record for number, record, _ in self._records if number == num_reductions), Record())

    def reduced(self) -> None:
        """Reset the counts for the next reduction: gradients have been handed out, or discarded."""
        self.loop.restart()
        self.veto, self.skips, self.has_pass = None, False, True
        if self.stop_requested:
            self.stop = None

    def apply(self, by_rank: Mapping[int, Record]) -> None:
        """Note the requests in all ranks' records."""
        self.announced = RankRequests(
            veto={rank: of.veto for rank, of in by_rank.items() if of.veto is not None},
            skipping=tuple(rank for rank, of in by_rank.items() if of.skips),
            new=any(of.new for of in by_rank.values()),
        )
        self.stop_requested = self.stop_requested or first_stop(by_rank)


_PAIRED = (
    "Their gradients would be averaged with those of other batches. A rank without a usable batch calls "
    "reducer.skip_batch() in place of forward and backward, or reducer.veto_step() to have the step left out on all"
)


def raise_left_out(counts: Mapping[int, int], expected: int, what: str, advice: str, whose: str = "") -> None:
    """Raise RuntimeError if the ranks' ``counts`` differ: those other than ``expected`` have left out a batch.

    Args:
        expected: the number on ranks that have left out none.
        whose: what the ranks are counted among.
    """
    odd = [rank for rank, count in counts.items() if count != expected]
    if odd:
        raise RuntimeError(f"{name_ranks(odd)}{whose} left out a batch: {what}: {counts_text(counts)}. {advice}")


def raise_out_of_loop(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if ranks have done different things since the last reduction."""
    loops = {rank: of.loop for rank, of in records.items() if of.loop is not None}
    accumulated = [rank for rank, (_, _, flag) in loops.items() if flag]
    if 0 < len(accumulated) < len(loops):
        raise RuntimeError(
            f"{name_ranks(accumulated)} added this backward() to gradients that the last optimizer.step() has used, "
            "the others did not: optimizer.zero_grad() was left out there"
        )
    unused = {rank: count for rank, (count, _, _) in loops.items()}
    what = "forwards for training since the last reduction that no backward() followed"
    aside = "A forward that is no training step belongs in torch.no_grad() or in `with reducer.paused():`"
    raise_left_out(unused, min(unused.values(), default=0), what, f"{_PAIRED}. {aside}")
    calls = {rank: 1 + count for rank, (_, count, _) in loops.items()}
    aside = "A call that belongs to no training step goes in `with reducer.paused():`"
    what = "calls of optimizer.zero_grad() since the last reduction"
    raise_left_out(calls, min(calls.values(), default=0), what, f"{_PAIRED}. {aside}")


def raise_removed(names: Mapping[int, list[str]]) -> None:
    """Raise RuntimeError if a parameter is in the optimizer on some ranks only."""
    everywhere = set.intersection(*map(set, names.values()))
    for name in (name for of_rank in names.values() for name in of_rank if name not in everywhere):
        lack = [rank for rank, of_rank in names.items() if name not in of_rank]
        raise RuntimeError(
            f"parameter {name!r} is no longer in the optimizer on {name_ranks(lack)}, and still is on the others: "
            "remove parameters from its groups on all ranks, between the same steps"
        )


def _on_ranks(by_value: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())


def raise_different_scales(records: Mapping[int, Record]) -> None:
    """Raise ValueError if the ranks' loss scales differ."""
    by_value = ranks_by_value({rank: repr(of.loss_scale) for rank, of in records.items() if of.loop is not None})
    if len(by_value) > 1:
        raise ValueError(
            f"the ranks' loss scalers differ: the scale is {_on_ranks(by_value)}. Make the scaler alike on all ranks, "
            "load its state on all of them, and call update() after the same steps"
        )


def raise_different_places(moved: Mapping[int, Mapping[str, str]]) -> None:
    """Raise RuntimeError if an attached parameter has moved within the module on some ranks only.

    ``moved``: see ``ParameterPlaces``.
    """

    def text(at: str | None) -> str:
        return "as it was" if at is None else f"attached as {at!r}" if at else "gone"

    for name in {name: None for of in moved.values() for name in of}:
        by_value = ranks_by_value({rank: text(of.get(name)) for rank, of in moved.items()})
        if len(by_value) > 1:
            raise RuntimeError(
                f"the module's parameter {name!r} is {_on_ranks(by_value)}: a layer or a parameter was exchanged, tied "
                "or left out on some ranks only. Change the module alike on all ranks, between the same steps"
            )


def raise_different_modes(modes: Mapping[int, Mapping[str, bool]]) -> None:
    """Raise RuntimeError if a module is in training mode on some ranks only. ``modes``: ``training`` by name."""
    first = next(iter(modes.values()), {})
    for name in (name for name in first if all(name in of for of in modes.values())):
        training = [rank for rank, of in modes.items() if of[name]]
        others = [rank for rank in modes if rank not in training]
        if training and others:
            raise RuntimeError(
                f"{f'module {name!r}' if name else 'the model'} is in evaluation mode (eval()) on "
                f"{name_ranks(others)}, and in training mode on {name_ranks(training)}. "
                "Dropout and BatchNorm then do other things there. "
                "After an evaluation call model.train(). If it is meant to differ, write "
                'tuning=pycomm.Tuning(per_rank=("training",))'
            )


def different_windows(records: Mapping[int, Record]) -> str:
    """Return a warning about windows of which a function has made different numbers of passes; "" without any."""
    by_value = ranks_by_value({rank: str(of.num_passes) for rank, of in records.items() if of.num_passes})
    if len(by_value) < 2:
        return ""
    return (
        f"accumulate's function has ended this window after a number of backward passes that is {_on_ranks(by_value)}. "
        "Each rank's sum of gradients counts the same in the average, whatever its number of batches: call "
        "reducer.set_weight(num_samples) before each backward() on all ranks, or let the function answer alike"
    )


def raise_different_freezing(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if a parameter is frozen on some ranks only."""
    frozen = {rank: set(of.frozen) for rank, of in records.items()}
    names = [name for of in records.values() for name in of.frozen]
    for name in names:
        where = [rank for rank, those in frozen.items() if name in those]
        if len(where) < len(records):
            raise RuntimeError(
                f"parameter {name!r} is frozen (requires_grad=False) on {name_ranks(where)}, and trained on "
                f"{name_ranks([rank for rank in records if rank not in where])}: freeze it on all ranks, or on none"
            )


def raise_different_new(new: Mapping[int, Sequence[str]]) -> None:
    """Raise RuntimeError if parameters are ``new`` on some ranks only."""
    have = [rank for rank, names in new.items() if names]
    lack = [rank for rank, names in new.items() if not names]
    if have and lack:
        raise RuntimeError(
            f"there is a new parameter, {new[have[0]][0]!r}, on {name_ranks(have)}, and none on {name_ranks(lack)}: "
            "add, replace or unfreeze parameters on all ranks, between the same steps, and have reduce() average "
            "gradients of frozen ones on all ranks or on none"
        )


def reasons_of(veto: Mapping[int, str]) -> str:
    """Return which ranks vetoed a step, and why."""
    return ", ".join(f"rank {rank}{f' ({reason})' if reason else ''}" for rank, reason in veto.items())


class Stoppable(Protocol):
    """Object with ``request_stop``: a Reducer, or a handle of :func:`pycomm.ddp.register`."""

    def request_stop(self, reason: str = "") -> None: ...


class SignalStop:
    """Signal handler that requests a stop. As a context manager, it restores the former handlers on exit.

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
        """Restore the former handlers. Idempotent."""
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
    """Request a stop of all ranks when this process receives one of ``signals``, instead of ending it.

    A batch system sends SIGTERM or SIGUSR1 before it takes the machines away, often to one process only. All ranks
    receive the request at the same step: see :meth:`pycomm.Reducer.request_stop`. A former handler is called too,
    unless it is Python's own for Ctrl-C. Call it on any rank, on the main thread.

    Args:
        reducer: result of ``attach``, ``pycomm.ddp.register``, or an integration's ``attach``.
        signals: ``signal.SIGTERM`` and others.

    Returns:
        A context manager, also with ``close()``, that restores the former handlers.

    Raises:
        TypeError, ValueError: ``reducer`` has no ``request_stop``, there are no ``signals``, or this is not the main
            thread.
    """
    if not callable(getattr(reducer, "request_stop", None)):
        raise TypeError(f"reducer is a {type(reducer).__name__}, wanted what attach() returned")
    if not signals:
        raise ValueError("stop_on_signal() got no signals, wanted signal.SIGTERM or others")
    return SignalStop(reducer, signals)

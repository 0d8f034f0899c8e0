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
  scale; frozen parameters; the numbers of steps under DistributedDataParallel and ``fully_shard``, whose bits 0 to 31
  are a hash of the parameters.
- 60: the optimizer has parameters that are not averaged yet. If all ranks have some, they are added; else an error.
- 61: a veto of this step, which is then discarded on all ranks.
- 62: this rank has no batch: the mean is that of the other ranks.
- 63: a request to stop, which all ranks receive.

Usually only bits travel. If they differ, or one of the last three is set, all ranks see it alike. They then exchange
the records behind the bits, and reach the same verdict before any gradient is handed out. On a GPU, where the host does
not wait for the gradients, that happens two reductions later.
"""

from __future__ import annotations

import itertools
import json
import signal
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from pycomm.collectives.bucket import FINGERPRINT_BITS, FingerprintBits
from pycomm.descriptions import counts_text, name_ranks, values_text
from pycomm.optim.hyperparameters import Hyperparameters, Numbers, require_equal_groups
from pycomm.optim.loop_index import LoopIndex
from pycomm.training.reductions.phase import HostCopy, Role, StepState
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, OneOf, parse

ALIKE = slice(32, 60)
NEW, VETO, SKIP, STOP = 60, 61, 62, 63
_ANY = (VETO, SKIP, STOP)
_REMEMBERED = 4
"""Number of records that are kept: on a GPU, the record of two reductions before is read."""
_RECORD = {
    "loop": OneOf(None, ListOf(OneOf(COUNT, bool), 4)),
    "modes": COUNT,
    "loss_scale": ANYTHING,
    "num_passes": COUNT,
    **dict.fromkeys(("frozen", "new", "names"), ListOf(str)),
    **dict.fromkeys(("veto", "stop"), OneOf(None, str)),
    **dict.fromkeys(("skips", "absent"), bool),
    "steps": MapOf(COUNT),
    "groups": MapOf(ListOf(MapOf(ANYTHING))),
    "training": MapOf(bool),
    "moved": MapOf(str),
}
"""Form of a :class:`Record` that another rank has sent."""


Loop = Sequence[int]
"""Number of unused forwards and of calls of ``zero_grad``, whether backward added to gradients that were used, and
number of passes that were cleared inside a window; see :class:`LoopIndex`."""


@dataclass(frozen=True)
class Record:
    """Record behind the flags of one rank in one reduction. All fields can be encoded as JSON.

    Attributes:
        loop: see :data:`Loop`. ``None``: the rank took part without a pass of its own, and is not compared.
        modes: hash of the modules' modes, training or evaluation, and of attached parameters that have moved in them.
        loss_scale: scale of the loss, if the host knows it.
        num_passes: number of passes that a function has put into this window; 0 if the number is given.
        frozen: names of the parameters that do not require gradients.
        new: names of the optimizer's parameters that are not averaged yet.
        veto, stop: reasons of the requests; ``None`` without one.
        skips: whether this rank has no batch.
        absent: whether the rank takes part without data and takes no steps, so that it is not compared.
        steps: by the name of an optimizer's first parameter, the number of its steps since the last reduction. Of a
            Reducer, under "" and read when records are exchanged, the number of averages that its optimizer has used.
        groups: numbers of the optimizers' groups, by the same names, and under :data:`IN_STEP` those of the last step
            of a Reducer's optimizer. These and all further fields are added when records are exchanged.
        training: whether a module is in training mode, by its name.
        moved: see ``ParameterPlaces``.
        names: names of the parameters in a Reducer's optimizer.
    """

    loop: Loop | None = None
    modes: int = 0
    loss_scale: float | None = None
    num_passes: int = 0
    frozen: Sequence[str] = ()
    new: Sequence[str] = ()
    veto: str | None = None
    skips: bool = False
    stop: str | None = None
    absent: bool = False
    steps: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, list[Numbers]] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ()

    def value(self, digests: Sequence[int]) -> int:
        """Return the bits as a number; ``digests`` are hashes of the optimizers' numbers."""
        steps = [self.steps[name] for name in sorted(self.steps)]
        loop = self.loop or (0, 1, False, 0)
        alike = (loop, self.modes, self.loss_scale, self.num_passes, self.frozen, steps, digests)
        value = (zlib.crc32(repr(alike).encode()) & ((1 << ALIKE.stop - ALIKE.start) - 1)) << ALIKE.start
        flags = {NEW: bool(self.new), VETO: self.veto is not None, SKIP: self.skips, STOP: self.stop is not None}
        return value | sum(1 << bit for bit, is_set in flags.items() if is_set)


@dataclass(frozen=True)
class StopRequest:
    """Request of a rank to end the training. False until there is one; all ranks receive it at the same step.

    Attributes:
        rank: first rank that asked; -1 without a request.
        reason: its reason.
    """

    rank: int = -1
    reason: str = ""

    def __bool__(self) -> bool:
        return self.rank >= 0


class SentFlags(NamedTuple):
    """What this rank has sent in the reduction after ``number`` others, and readers of its optimizers' groups."""

    number: int
    readers: Mapping[str, Hyperparameters]
    record: Record
    value: int
    bits: torch.Tensor


_NOTHING = SentFlags(-1, {}, Record(), 0, torch.empty(0, dtype=torch.bool))


class RankFlags:
    """Bits 32 to 63 of this rank, and what the other ranks have announced.

    Args:
        device: device of the bits.
        on_gpu: whether the host reads the bits of all ranks two reductions later.
        state: why this rank takes part.

    Attributes:
        readers: readers of the numbers in the optimizers' groups, by the names of the optimizers' first parameters.
        steps, loss_scale, num_passes: see :class:`Record`; of the window that is about to end.
        takes_new: whether new parameters are announced by a flag; otherwise the ranks meet to add them.
        veto, stop: reasons of this rank's requests, until all ranks have received them.
        announced: records of all ranks, if they were exchanged in the last reduction.
        stop_requested: the request to stop that all ranks have received.
    """

    def __init__(self, device: torch.device, on_gpu: bool, state: StepState) -> None:
        self.loop, self._state = LoopIndex(), state
        self.readers: Mapping[str, Hyperparameters] = {}
        self.steps: Mapping[str, int] = {}
        self.takes_new = True
        self.veto: str | None = None
        self.stop: str | None = None
        self.announced: Mapping[int, Record] = {}
        self.stop_requested = StopRequest()
        self.loss_scale: float | None = None
        self.num_passes = 0
        self._bits = FingerprintBits(device)
        self._last: Any = None  # fields and digests of the last reduction
        self._sent = deque([_NOTHING], maxlen=_REMEMBERED)
        self._seen = [HostCopy(FINGERPRINT_BITS, device) for _ in range(2)] if on_gpu else []
        self._num_seen = 0

    @property
    def reads_late(self) -> bool:
        """Whether the host reads the bits of all ranks two reductions later."""
        return bool(self._seen)

    def request_stop(self, reason: str, lone_rank: int | None = None) -> None:
        """Ask all ranks to stop with the next reduction, or at once if ``lone_rank`` is the only rank."""
        if lone_rank is not None and not self.stop_requested:
            self.stop_requested = StopRequest(lone_rank, reason)
        elif self.stop is None and not self.stop_requested:
            self.stop = reason

    def fix(
        self,
        num_reductions: int,
        frozen: tuple[str, ...] = (),
        new: tuple[str, ...] = (),
        modes: int = 0,
        *,
        skips: bool = False,
    ) -> torch.Tensor:
        """Fix this rank's record for the reduction that follows ``num_reductions`` others; return its bits."""
        loop, has_pass = self.loop, self._state.has_pass
        fields = (
            (loop.num_unused, loop.num_calls, loop.accumulated, loop.num_cleared) if has_pass else None,
            modes,
            self.loss_scale if has_pass else None,
            self.num_passes if has_pass else 0,
            frozen,
            new if self.takes_new else (),
            self.veto,
            skips,
            self.stop,
            self._state.role is Role.ABSENT,
            self.steps,
        )
        digests = [self.readers[name].digest for name in sorted(self.readers)]
        _, _, record, value, bits = self._sent[-1]
        if (fields, digests) != self._last:  # most reductions repeat the one before
            record = Record(*fields)
            value = record.value(digests)
            self._last, bits = (fields, digests), self._bits.of(value)
        self._sent.append(SentFlags(num_reductions, self.readers, record, value, bits))
        return bits

    def received(self, differing: torch.Tensor) -> list[bool]:
        """Return the bits ``differing`` between ranks, and this rank's requests; [] if none is set, or on a GPU."""
        # Requests count even if all ranks make them.
        mine = [bit for bit in (NEW, *_ANY) if self._sent[-1].value >> bit & 1]
        if mine:
            differing = differing.clone()
            differing[mine] = True
        if not self._seen:
            return differing.tolist() if bool(differing.any()) else []
        self._seen[self._num_seen % 2].put(differing)
        self._num_seen += 1
        return []

    def received_late(self) -> list[bool]:
        """Return what :meth:`received` did not on a GPU two reductions ago, as the next one begins."""
        found = self._seen[self._num_seen % 2].get() if self._num_seen > 1 else []
        return found if any(found) else []

    def forget_received(self) -> None:
        """Discard what :meth:`received_late` has not returned yet."""
        self._num_seen = 0

    def exchange(
        self, num_reductions: int, gather: Callable[[bytes], Sequence[bytes]], world: Sequence[int], **late: Any
    ) -> dict[int, Record]:
        """Return all ranks' records of the reduction after ``num_reductions`` others. Collective, by ``gather``.

        Args:
            world: numbers of the ranks.
            late: fields of the record that are read only now.
        """
        sent = next((each for each in reversed(self._sent) if each.number == num_reductions), _NOTHING)
        groups = {name: reader.groups() for name, reader in sent.readers.items()}
        texts = gather(json.dumps(asdict(replace(sent.record, groups=groups, **late))).encode())
        ranks = zip(world, texts, strict=True)
        return {rank: Record(**parse(text, _RECORD, f"the flags of rank {rank}")) for rank, text in ranks}

    def apply(self, by_rank: Mapping[int, Record]) -> None:
        """Note the requests in all ranks' records."""
        self.announced = by_rank
        stops = (StopRequest(rank, of.stop) for rank, of in by_rank.items() if of.stop is not None)
        self.stop_requested = self.stop_requested or next(stops, self.stop_requested)
        if self.stop_requested:
            self.stop = None

    def reduced(self) -> None:
        """Reset the counts for the next reduction: gradients have been handed out, or discarded."""
        self.loop.restart()
        self.veto = None

    @property
    def vetoes(self) -> str:
        """Ranks that have vetoed the last step, and why; "" without a veto."""
        vetoes = {rank: of.veto for rank, of in self.announced.items() if of.veto is not None}
        return ", ".join(f"rank {rank}{f' ({reason})' if reason else ''}" for rank, reason in vetoes.items())


_PAIRED = (
    "Their gradients would be averaged with those of other batches. A rank without a usable batch calls "
    "reducer.skip_batch() in place of forward and backward, or reducer.veto_step() to have the step left out on all. "
    "What belongs to no training step goes in `with reducer.paused():`, or a forward in torch.no_grad()"
)


def loops_of(records: Mapping[int, Record]) -> dict[int, Loop]:
    """Return the loops of the ranks that have had a pass."""
    return {rank: of.loop for rank, of in records.items() if of.loop is not None}


def raise_out_of_loop(
    loops: Mapping[int, Loop], advice: str = _PAIRED, whose: str = "", since: str = "the last reduction"
) -> None:
    """Raise RuntimeError if ranks have done different things ``since`` they were compared.

    Args:
        loops: those of the ranks that are compared.
        advice: what a rank without a usable batch does instead.
        whose: what the ranks are counted among.
    """
    cleared = {rank: num_cleared for rank, (_, _, _, num_cleared) in loops.items()}
    if len(set(cleared.values())) > 1:
        odd = [rank for rank, number in cleared.items() if number != min(cleared.values())]
        raise RuntimeError(
            f"{name_ranks(odd)} cleared gradients inside an accumulation window (zero_grad() of the optimizer or "
            f"module, or .grad = None), the others did not: passes that were discarded since {since}: "
            f"{counts_text(cleared)}. Clear them on all ranks, or on none"
        )
    accumulated = [rank for rank, (_, _, flag, _) in loops.items() if flag]
    if 0 < len(accumulated) < len(loops):
        raise RuntimeError(
            f"{name_ranks(accumulated)} added this backward() to gradients that the last optimizer.step() has used, "
            "the others did not: optimizer.zero_grad() was left out there"
        )
    for index, what, behind in (
        (0, "forwards for training", " that no backward() followed"),
        (1, "calls of optimizer.zero_grad()", ""),
    ):
        counts = {rank: loop[index] for rank, loop in loops.items()}
        if odd := [rank for rank, count in counts.items() if count != min(counts.values())]:
            what = f"{what} since {since}{behind}: {counts_text(counts)}"
            raise RuntimeError(f"{name_ranks(odd)}{whose} left out a batch: {what}. {advice}")


IN_STEP = " in the last optimizer.step(), for which it was set after backward(),"
"""Name of the numbers of a Reducer's groups in the last step, in :attr:`Record.groups` and in errors."""


def raise_different_groups(
    records: Mapping[int, Record], permitting: str = 'tuning=pycomm.Tuning(per_rank=("{}",))'
) -> None:
    """Raise ValueError if numbers in the groups of an optimizer differ.

    ``permitting``: see :func:`require_equal_groups`.
    """
    names = {name: None for of in records.values() for name in of.groups}
    for name in names:
        groups = {rank: of.groups.get(name) or None for rank, of in records.items()}  # a newcomer has made no step yet
        whose = f" of the optimizer of {name!r}" if len(names) > 1 else ""
        require_equal_groups(groups, permitting, name if name in ("", IN_STEP) else whose)


def _not_everywhere(names: Mapping[int, Sequence[str]]) -> tuple[str, list[int], list[int]] | None:
    """Return the first name that some ranks lack, the ranks that have it, and those others; ``None`` without one."""
    sets = {rank: set(each) for rank, each in names.items()}
    for name in itertools.chain(*names.values()):
        if lack := [rank for rank, each in sets.items() if name not in each]:
            return name, [rank for rank in sets if rank not in lack], lack
    return None


def raise_removed(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if a parameter is in the optimizer on some ranks only."""
    if found := _not_everywhere({rank: of.names for rank, of in records.items()}):
        name, _, lack = found
        raise RuntimeError(
            f"parameter {name!r} is no longer in the optimizer on {name_ranks(lack)}, and still is on the others: "
            "remove parameters from its groups on all ranks, between the same steps"
        )


def raise_different_scales(records: Mapping[int, Record]) -> None:
    """Raise ValueError if the ranks' loss scales differ."""
    scales = {rank: repr(of.loss_scale) for rank, of in records.items() if of.loop is not None}
    if len(set(scales.values())) > 1:
        raise ValueError(
            f"the ranks' loss scalers differ: the scale is {values_text(scales)}. Make the scaler alike on all ranks, "
            "load its state on all of them, and call update() after the same steps"
        )


def raise_different_places(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if an attached parameter has moved within the module on some ranks only."""

    def text(at: str | None) -> str:
        return "as it was" if at is None else f"attached as {at!r}" if at else "gone"

    trained = {rank: of.moved for rank, of in records.items() if of.loop is not None}
    for name in {name: None for moved in trained.values() for name in moved}:
        places = {rank: text(moved.get(name)) for rank, moved in trained.items()}
        if len(set(places.values())) > 1:
            raise RuntimeError(
                f"the module's parameter {name!r} is {values_text(places)}: a layer or a parameter was exchanged, tied "
                "or left out on some ranks only. Change the module alike on all ranks, between the same steps"
            )


def raise_different_modes(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if a module is in training mode on some ranks only."""
    modes = {rank: of.training for rank, of in records.items() if of.loop is not None}
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
    passes = {rank: str(of.num_passes) for rank, of in records.items() if of.num_passes}
    if len(set(passes.values())) < 2:
        return ""
    return (
        f"accumulate's function has ended this window after a number of backward passes that is {values_text(passes)}. "
        "Each rank's sum of gradients counts the same in the average, whatever its number of batches: call "
        "reducer.set_weight(num_samples) before each backward() on all ranks, or let the function answer alike"
    )


def raise_different_freezing(records: Mapping[int, Record]) -> None:
    """Raise RuntimeError if a parameter is frozen on some ranks only."""
    if found := _not_everywhere({rank: of.frozen for rank, of in records.items()}):
        name, have, lack = found
        raise RuntimeError(
            f"parameter {name!r} is frozen (requires_grad=False) on {name_ranks(have)}, and trained on "
            f"{name_ranks(lack)}: freeze it on all ranks, or on none"
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

    def __exit__(self, *_: object) -> None:
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

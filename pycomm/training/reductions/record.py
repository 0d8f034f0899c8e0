"""Record: what this rank brings for comparison with the other ranks, and what they find.

A record is encoded in two ways. In a reduction it is 64 bits, inside the messages of the gradients:

- 0-31, with the first bucket: see :mod:`pycomm.training.reductions.replicas`.
- 32-59, with the last bucket, like all higher bits: hash of all fields. An error names what differs, and the ranks.
- 60: the optimizer has parameters that are not averaged yet. If all ranks have some, they are added; if not, an error.
- 61: a veto of this step, which is then discarded on all ranks.
- 62: this rank has no batch: the mean is over the other ranks.
- 63: a request to stop, which all ranks receive.

Where ranks meet without a reduction, the record is one row of integers. Normally only bits or rows are exchanged. If
they differ or a flag is set, every rank sees it. Ranks then exchange details, and reach the same verdict before any
gradient is handed out. On a GPU, where the host does not wait for the gradients, that happens two reductions later.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pycomm.collectives.bucket import FINGERPRINT_BITS, FingerprintBits
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing
from pycomm.training.reductions import fields as table
from pycomm.training.reductions.fields import Details, FieldKind, Source
from pycomm.training.reductions.phase import HostCopy, Role, StepState
from pycomm.training.reductions.replicas import PARAMETERS, STEP, Replicas, out_of_step
from pycomm.training.reductions.requests import Requests
from pycomm.untrusted import COUNT, OneOf, parse

_ALIKE = slice(32, 60)
_FLAGS = {"new": 60, "veto": 61, "skip": 62, "stop": 63}
_REMEMBERED = 4
"""Number of records that are kept: on a GPU, the record of two reductions before is looked at."""


def _hash(value: object) -> int:
    """Return a hash of the ``repr`` of ``value``, of 63 bits; the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1


class Record:
    """Record of this rank's fields.

    Args:
        source: the values of the fields.
    """

    def __init__(self, source: Source) -> None:
        found = (each.of(source) for each in table.FIELDS)
        self.fields = [each for each in found if each is not None]
        # Optional: fields that are left out where only a flag is set.
        optional: dict[str, Any] = {f"{each.name}?": OneOf(None, each.form) for each in self.fields}
        self._form = {"steps_made?": table.StepsMadeField.form} | optional | {"absent?": bool, "steps?": COUNT}
        kinds = [each.kind for each in self.fields]
        self._hashed = [i for i, kind in enumerate(kinds) if kind is FieldKind.HASHED]
        self._flags = [i for i, kind in enumerate(kinds) if kind is FieldKind.FLAG]
        self._last: tuple[Sequence[Any], list[int]] = (), []  # values and their words in the last row

    def read(self, *, has_pass: bool = True) -> list[Any]:
        """Return the present values of all fields; ``has_pass``: whether this rank has gradients of its own."""
        return [None if field.of_pass and not has_pass else field.read() for field in self.fields]

    def hash_of(self, values: Sequence[Any]) -> int:
        """Return a hash of all fields that are compared by hash."""
        return _hash([self.fields[i].hashed(values[i]) for i in self._hashed])

    def flags_of(self, values: Sequence[Any]) -> list[str]:
        """Return the names of the flags that are set."""
        return [self.fields[i].name for i in self._flags if _is_set(values[i])]

    # Details.

    def details(self, values: Sequence[Any], *, only_flags: bool = False, **more: Any) -> bytes:
        """Return what other ranks get to see of ``values``, or only of the flags among them, and ``more``."""
        pairs = zip(self.fields, values, strict=True)
        sent = {each.name: each.detail(value) for each, value in pairs if each.kind is FieldKind.FLAG or not only_flags}
        return json.dumps(sent | more).encode()

    def parsed(self, texts: Mapping[int, bytes | str]) -> dict[int, dict[str, Any]]:
        """Return the :meth:`details` of ranks, checked."""
        return {rank: parse(text, self._form, f"the record of rank {rank}") for rank, text in texts.items()}

    def explain(self, details: Details) -> None:
        """Raise the error of the first field that differs; return if none does.

        Raises:
            RuntimeError, ValueError: the same on all ranks.
        """
        for field in self.fields:
            by_rank = {rank: each[field.name] for rank, each in details.items() if each.get(field.name) is not None}
            if by_rank:
                field.check(by_rank, details)

    # One row, where ranks meet without a reduction.

    def meet(self, communicator: Communicator, world: Sequence[int], values: Sequence[Any], *own: int) -> np.ndarray:
        """Compare ``values`` of all ranks, and return their ``own`` words: int64, a row for each rank. Collective.

        Raises:
            RuntimeError, ValueError: on all ranks: they differ, or a flag is set that is an error.
        """
        if values != self._last[0]:
            hashes = [-1 if values[i] is None else _hash(self.fields[i].hashed(values[i])) for i in self._hashed]
            self._last = values, [bool(self.flags_of(values)), *hashes]
        row = np.array([*own, *self._last[1]], np.int64)
        gathered = np.empty(communicator.size * len(row), np.int64)
        communicator.all_gather(gathered, row)
        rows = gathered.reshape(-1, len(row))
        flags, hashes_of_all = rows[:, len(own)], rows[:, len(own) + 1 :]
        most = hashes_of_all.max(axis=0)
        if flags.any() or ((hashes_of_all != most) & (hashes_of_all >= 0)).any():
            texts = communicator.channel.all_gather_bytes(self.details(values))
            self.explain(self.parsed(dict(zip(world, texts, strict=True))))
        return rows[:, : len(own)]


def _is_set(value: Any) -> bool:
    """Return whether the value of a flag is set. A reason may be ""; there may be no names."""
    return value is not None and value is not False and value != ()


class SentRecord(NamedTuple):
    """What this rank has sent in the reduction after ``number`` others."""

    number: int
    absent: bool
    values: Sequence[Any]
    value: int
    bits: torch.Tensor


class StepVerdict(NamedTuple):
    """What all ranks have found in a reduction.

    Attributes:
        vetoes: ranks that have vetoed the step, and why; "" without a veto.
        skipping: number of ranks without a batch.
        has_new: whether all ranks have new parameters.
    """

    vetoes: str = ""
    skipping: int = 0
    has_new: bool = False


class Fingerprint:
    """Record as 64 bits of a reduction: this rank's bits, and the verdict on all ranks' bits.

    Args:
        world: returns the numbers of the ranks.
        device: device of the bits.
        reads_late: whether the host reads the bits of all ranks two reductions later.
        has_stepped: returns whether an optimizer has stepped the parameters, where ``state`` does not count steps.

    Attributes:
        verdict: verdict of the last reduction.
    """

    def __init__(
        self,
        communicator: Communicator,
        world: Callable[[], Sequence[int]],
        source: Source,
        requests: Requests,
        state: StepState,
        replicas: Replicas,
        device: torch.device,
        *,
        reads_late: bool,
        has_stepped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._has_stepped = has_stepped
        self.record, self.replicas, self._requests = Record(source), replicas, requests
        self._communicator, self._world, self._state = communicator, world, state
        self._bits, self._values = FingerprintBits(device), list[Any]()
        no_bits = torch.empty(0, dtype=torch.bool)
        self._nothing = SentRecord(-1, False, [None] * len(self.record.fields), 0, no_bits)
        self._sent = deque([self._nothing], maxlen=_REMEMBERED)
        self._seen = [HostCopy(FINGERPRINT_BITS, device) for _ in range(2)] if reads_late else []
        self._unread: deque[tuple[int, HostCopy]] = deque()  # with the numbers of their reductions
        self.verdict = StepVerdict()

    # Bits of this rank.

    def bits(self, *, first: bool, last: bool) -> Callable[[], torch.Tensor] | None:
        """Return the function that makes the bits of a bucket, to be called where it is sent; ``None`` without any.

        Values are read now, tensors by that function, so parameters must not be written to until then.

        Args:
            first, last: whether it is the first, and the last bucket of a reduction.
        """
        state = self._state
        low = self.replicas.bits(state.reductions, state.steps) if first else None
        if not last:
            return low
        high = self._read()
        return (lambda: high) if low is None else (lambda: low() | high)

    def _read(self) -> torch.Tensor:
        """Read the record; return its bits."""
        values = self.record.read(has_pass=self._state.has_pass)
        value, bits = self._sent[-1].value, self._sent[-1].bits
        capturing = is_capturing()
        if values != self._values or capturing:  # most reductions repeat the one before
            hash_ = self.record.hash_of(values) & ((1 << _ALIKE.stop - _ALIKE.start) - 1)
            value = hash_ << _ALIKE.start | sum(1 << _FLAGS[name] for name in self.record.flags_of(values))
            bits = self._bits.of(value)
            self._values = [] if capturing else values  # a graph's tensors have values only while it runs
        self._sent.append(SentRecord(self._state.reductions, self._state.role is Role.ABSENT, values, value, bits))
        return bits

    # Bits of all ranks.

    def receive(self, differing: torch.Tensor) -> None:
        """Report what differs between the ranks, given the bits that do. Collective if any do, or a flag is set.

        On a GPU, :meth:`receive_late` does it two reductions later, and in a CUDA graph nothing does.

        Raises:
            RuntimeError, ValueError, DamageError: on all ranks: see :meth:`_judge`.
        """
        found: list[bool] = []
        if not (self._seen and is_capturing()):  # the host takes no part in the launches of a CUDA graph
            number = self._state.reductions
            differing = self.replicas.with_state(differing, number)
            # Flags count even if all ranks set them.
            mine = [bit for bit in _FLAGS.values() if self._sent[-1].value >> bit & 1]
            if mine:
                differing = differing.clone()
                differing[mine] = True
            if self._seen:
                copy = next(each for each in self._seen if all(each is not other for _, other in self._unread))
                copy.put(differing)
                self._unread.append((number, copy))
            elif bool(differing.any()):
                found = differing.tolist()
        self.judge(found)

    def receive_late(self) -> None:
        """Do what :meth:`receive` did not on a GPU two reductions ago, as the next one begins."""
        if len(self._unread) < 2 or is_capturing():
            return
        number, copy = self._unread.popleft()
        found = copy.get()
        self._judge(found if any(found) else [], number)

    def forget_received(self) -> None:
        """Discard what :meth:`receive_late` has not looked at yet."""
        self._unread.clear()

    def judge(self, differing: Sequence[bool]) -> None:
        """Do the same as :meth:`receive` with bits that the host has compared; [] if none differs."""
        self.verdict = StepVerdict()
        self._judge(differing if any(differing) else [], self._state.reductions)
        if not any(differing[PARAMETERS]):
            self.replicas.question = None

    def _judge(self, differing: Sequence[bool], reduction: int) -> None:
        """Raise, warn or log the differences between the ranks. Collective; all ranks do the same.

        An absent rank, which cannot know whether the others have left out a step, adopts their number of steps.

        Args:
            differing: bits that differ, or that a rank has set; [] if none is.
            reduction: number of the one that carried them.

        Raises:
            RuntimeError: the ranks are at different steps, or did not do the same, or their parameters differ.
            ValueError: their hyperparameters differ.
            DamageError: some ranks' parameters differ from the majority's, or state has changed without a step.
        """
        if not differing:
            return
        sent = next((each for each in reversed(self._sent) if each.number == reduction), self._nothing)
        more = {"absent": sent.absent, "steps": self._state.steps}
        mine = self.record.details(sent.values, only_flags=not any(differing[_ALIKE]), **more)
        texts = self._communicator.channel.all_gather_bytes(mine)
        details = self.record.parsed(dict(zip(self._world(), texts, strict=True)))
        absent = [each["absent"] for each in details.values()]
        there = {rank: each for rank, each in details.items() if not each["absent"]}
        steps = {rank: each["steps"] for rank, each in (there or details).items()}
        if any(differing[STEP]) and there and (len(set(steps.values())) > 1 or not any(absent)):
            raise RuntimeError(out_of_step(steps))
        self.record.explain(there)
        self._requests.receive({rank: each["stop"] for rank, each in details.items()})
        vetoes = {rank: each["veto"] for rank, each in details.items() if each.get("veto") is not None}
        self.verdict = StepVerdict(
            ", ".join(f"rank {rank}{f' ({reason})' if reason else ''}" for rank, reason in vetoes.items()),
            sum(bool(each.get("skip")) for each in details.values()),
            any(each.get("new") for each in details.values()),
        )
        number = self._state.reductions if self._seen else reduction
        has_stepped = self._state.steps > 0 or self._has_stepped()
        self.replicas.judge(differing, number, absent, has_stepped=has_stepped)
        if self._state.role is Role.ABSENT:
            self._state.resumes(self._state.reductions, max(steps.values()))

"""Check of a meeting: what ranks exchange when it begins, before anything is sent that changes parameters.

| word | what                                                                           | if ranks differ             |
|------|--------------------------------------------------------------------------------|-----------------------------|
| 0    | weight                                                                         | it is summed                |
| 1    | number of the meeting, and of the fragment                                     | error with steps by rank    |
| 2    | steps, with those that a loss scaler left out                                  | error with steps by rank    |
| 3    | forwards in training mode since the last meeting that no backward has used     | error that names ranks      |
| 4    | calls of ``zero_grad`` since then; both -1: ``skip_step`` has excused them     | error that names ranks      |
| 5    | hash of every group's numbers: lr, momentum, betas, ...                        | error with group and values |
| 6    | whether the parameters are no longer those of module or optimizer              | error of all, with the name |
| 7    | whether this rank has come later, so that its numbers are its own              | not compared                |

Eight words of 64 bits, in one all-gather. What is behind a hash or flag is exchanged only if there is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pycomm.asynchronous.loop import Report
from pycomm.communicator import Communicator
from pycomm.reducer.damage import name_ranks
from pycomm.reducer.hyperparameters import Numbers, first_difference

_WORDS = 8
_LEFT_OUT = (
    "Ranks would average what they made of other batches. A rank without a usable batch calls averager.skip_step() "
    "in place of the rest of its step. A forward that is no training step belongs in torch.no_grad(), or after "
    "model.eval()"
)


@dataclass(frozen=True)
class MeetingCheck:
    """What this rank sends when a meeting begins; see the table above.

    Attributes:
        skipped: how many of the steps a loss scaler, or ``skip_step``, has left out.
    """

    weight: float
    meeting: int
    fragment: int
    steps: int
    skipped: int
    is_new: bool
    report: Report

    def compare(self, communicator: Communicator, world: Sequence[int]) -> float:
        """Return the sum of all weights. Collective.

        Args:
            communicator: the ranks.
            world: their names.

        Raises:
            RuntimeError, ValueError: this meeting is none, as the table says; on all ranks.
        """
        gathered = np.empty(communicator.size * _WORDS, np.int64)
        communicator.all_gather(gathered, self._words())
        rows = gathered.reshape(-1, _WORDS)
        if self._differ(rows):
            self._explain(communicator, dict(zip(world, rows.tolist(), strict=True)))
        return float(rows[:, 0].copy().view(np.float64).sum())

    def _words(self) -> np.ndarray:
        weight = int(np.array([self.weight]).view(np.int64)[0])
        where = self.meeting << 16 | self.fragment
        report = self.report
        counts = where, self.steps, report.unused, report.zero_grads
        return np.array([weight, *counts, report.digest, bool(report.problem), self.is_new], np.int64)

    @staticmethod
    def _differ(rows: np.ndarray) -> bool:
        digests, loops = rows[rows[:, 7] == 0, 5], rows[rows[:, 3] >= 0, 3:5]
        alike = (rows[:, 1:3] == rows[0, 1:3]).all() and (loops == loops[:1]).all() and (digests == digests[:1]).all()
        return not alike or bool(rows[:, 6].any())

    def _explain(self, communicator: Communicator, rows: Mapping[int, list[int]]) -> None:
        """Raise the error that says what is wrong; return if nothing is but numbers that are a rank's own."""
        report = self.report
        groups = None if self.is_new else report.groups
        mine = json.dumps([report.problem, self.skipped, groups, sorted(report.own)]).encode()
        told = [json.loads(words) for words in communicator.channel.all_gather_bytes(mine)]
        by_rank = dict(zip(rows, told, strict=True))
        for rank, (problem, *_) in by_rank.items():
            if problem:
                raise ValueError(f"rank {rank}: {problem}")
        steps = {rank: row[2] for rank, row in rows.items()}
        made = ", ".join(
            f"rank {rank} {count}" + (f" ({by_rank[rank][1]} of them left out)" if by_rank[rank][1] else "")
            for rank, count in steps.items()
        )
        if len(set(steps.values())) > 1:
            behind = [rank for rank, count in steps.items() if count < max(steps.values())]
            raise RuntimeError(
                f"ranks meet that have made different numbers of steps: {name_ranks(behind)} "
                f"{_are(behind)} behind. Steps made: {made}. {_LEFT_OUT}"
            )
        _raise_left_out({rank: row[3] for rank, row in rows.items()}, made, "forwards that no backward() followed")
        _raise_left_out({rank: row[4] for rank, row in rows.items()}, made, "calls of optimizer.zero_grad()")
        meetings = {rank: row[1] >> 16 for rank, row in rows.items()}
        if len({row[1] for row in rows.values()}) > 1:
            raise RuntimeError(f"ranks are in different meetings: {meetings} by rank. Steps made: {made}")
        own = {key for *_, keys in by_rank.values() for key in keys}
        _raise_different({rank: _without(groups, own) for rank, (_, _, groups, _) in by_rank.items()})


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _raise_left_out(counts: Mapping[int, int], made: str, what: str) -> None:
    counts = {rank: count for rank, count in counts.items() if count >= 0}
    if len(set(counts.values())) < 2:
        return
    most = [rank for rank, count in counts.items() if count > min(counts.values())]
    by_rank = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
    raise RuntimeError(
        f"{name_ranks(most)} left out a batch since the last meeting: {what}: {by_rank}. "
        f"Steps made: {made}. {_LEFT_OUT}"
    )


def _without(groups: list[Numbers] | None, keys: Collection[str]) -> list[Numbers] | None:
    if groups is None:
        return None
    return [{key: number for key, number in group.items() if key not in keys} for group in groups]


def _raise_different(groups: Mapping[int, list[Numbers] | None]) -> None:
    found = first_difference(list(groups.values()))
    if found is None:
        return
    index, key, values = found
    by_rank = ", ".join(
        f"{value!r} on rank {rank}"
        for (rank, own), value in zip(groups.items(), values, strict=True)
        if own is not None
    )
    raise ValueError(
        f"the ranks' optimizers differ: {key!r} of parameter group {index} is {by_rank}. Change it on all ranks alike, "
        f'or write per_rank=("{key}",) if it is meant to differ'
    )

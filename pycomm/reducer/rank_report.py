"""Errors about ranks that do not do the same, out of what they have told one another when their flags differed.

Each function gets the records of all ranks, and so raises the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycomm.descriptions import name_ranks
from pycomm.optim.hyperparameters import Numbers, first_difference

Words = Mapping[str, Any]
"""Record of one rank; see :class:`pycomm.reducer.rank_flags.Record`."""

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

"""Wrong tables: right ones with one mistake each, to try proofs and executors with.

Each is wrong for a reason that needs no proof of the whole table: an action is there once too few or too often,
or not where its stage is, or two actions stand in an order that a chain of needs forbids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pycomm.schedule.pipeline.cells import slots
from pycomm.schedule.pipeline.table import BACKWARD_INPUT, KINDS, Columns, Pipeline
from pycomm.schedule.pipeline.verify import Proof, verify

Random = np.random.Generator
Mutation = Callable[[Pipeline, Proof, Random], "Pipeline | None"]


def mutations(table: Any, count: int, seed: int = 0) -> list[Pipeline]:
    """Return ``count`` wrong tables, each with one mistake, which its name tells.

    The kinds of mistakes take turns: an action that is missing, there twice, on another rank, of another stage or
    microbatch or of another kind; two actions that are swapped although one needs the other; one that is so late
    that two ranks wait for each other. A kind that the table has no room for leaves its turn to the next.

    Args:
        table: a right table. count: how many mutations there shall be. seed: of the choice; the same one gives the
            same tables.

    Raises:
        ScheduleError: ``table`` is wrong already.
        ValueError: ``count`` or ``seed`` is negative, or no whole number.
    """
    for name, value in (("count", count), ("seed", seed)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}, wanted a whole number of at least 0")
    proof = verify(table)
    base = _sorted(table, proof.columns)
    random = np.random.default_rng(seed)
    found: list[Pipeline] = []
    turn = 0
    while len(found) < count:
        mutant = _MUTATIONS[turn % len(_MUTATIONS)](base, proof, random)
        turn += 1
        if mutant is not None:
            found.append(mutant)
    return found


def _sorted(table: Any, c: Columns) -> Pipeline:
    """Return the table in the order of its columns, with times that are even: between two of them is room for one."""
    return Pipeline(
        name=str(getattr(table, "name", "pipeline")),
        num_ranks=c.num_ranks,
        num_stages=c.num_stages,
        num_microbatches=c.num_microbatches,
        rank_of_stage=c.rank_of_stage,
        rank=c.rank,
        time=2 * slots(table)[1],
        stage=c.stage,
        kind=c.kind,
        microbatch=c.microbatch,
        splits_weights=c.splits_weights,
    )


def _with(base: Pipeline, what: str, **columns: tuple[int, int]) -> Pipeline:
    """Return ``base`` with one entry of each column changed: name=(place, value)."""
    changed = {}
    for name, (place, value) in columns.items():
        changed[name] = getattr(base, name).copy()
        changed[name][place] = value
    return _named(base, what, changed)


def _named(base: Pipeline, what: str, columns: dict[str, Any]) -> Pipeline:
    return replace(base, name=f"{base.name}, {what}", **columns)


def _any(proof: Proof, random: Random) -> tuple[int, str]:
    at = int(random.integers(len(proof.columns)))
    return at, str(proof.columns.action(at))


def _other(value: int, limit: int, random: Random) -> int:
    """Return another number below ``limit``, or ``limit`` if there is none."""
    return limit if limit == 1 else int((value + random.integers(1, limit)) % limit)


def _columns(base: Pipeline) -> dict[str, Any]:
    return {name: getattr(base, name) for name in ("rank", "time", "stage", "kind", "microbatch")}


def _drop(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    at, action = _any(proof, random)
    columns = {name: np.delete(column, at) for name, column in _columns(base).items()}
    return _named(base, f"without {action}", columns)


def _duplicate(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    at, action = _any(proof, random)
    columns = {name: np.append(column, column[at]) for name, column in _columns(base).items()}
    columns["time"][-1] += 1
    return _named(base, f"with {action} twice", columns)


def _rank(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    at, action = _any(proof, random)
    rank = _other(int(base.rank[at]), base.num_ranks, random)
    time = int(base.time[at]) + 1  # at which that rank has nothing to do
    return _with(base, f"with {action} on rank {rank}", rank=(at, rank), time=(at, time))


def _stage(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    at, action = _any(proof, random)
    stage = _other(int(base.stage[at]), base.num_stages, random)
    return _with(base, f"with {action} done to stage {stage}", stage=(at, stage))


def _microbatch(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    at, action = _any(proof, random)
    microbatch = _other(int(base.microbatch[at]), base.num_microbatches, random)
    return _with(base, f"with {action} done to microbatch {microbatch}", microbatch=(at, microbatch))


def _kind(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    """No two of F B and F I W differ in one letter alone."""
    at, action = _any(proof, random)
    kind = _other(int(base.kind[at]), len(KINDS), random)
    return _with(base, f"with {action} as {KINDS[kind]}", kind=(at, kind))


def _swap(base: Pipeline, proof: Proof, random: Random) -> Pipeline:
    """Swap a forward and its backward or the two parts of a backward: the later one needs the earlier one."""
    places = proof.places
    place = int(random.integers(places.forward.size))
    first, then = int(places.forward.flat[place]), int(places.backward.flat[place])
    if base.kind[then] == BACKWARD_INPUT and random.integers(2):
        first, then = then, int(places.weights.flat[place])
    what = f"with {proof.columns.action(first)} and {proof.columns.action(then)} swapped"
    times = base.time.copy()
    times[[first, then]] = base.time[[then, first]]
    return _named(base, what, {"time": times})


def _deadlock(base: Pipeline, proof: Proof, random: Random) -> Pipeline | None:
    """Put a forward off until two ranks wait for each other.

    If stage s + 1, on another rank, does its forward j before its backward i, then stage s can do its backward i
    only after its forward j. So it must not wait with that one for this one.
    """
    forward, backward, home = proof.places.forward, proof.places.backward, base.rank_of_stage
    for stage in random.permutation(np.flatnonzero(home[1:] != home[:-1])).tolist():
        # [i, j]: backward j comes after that, so that the stage's own forward j still comes before it.
        before = forward[stage + 1][None, :] < backward[stage + 1][:, None]
        late = np.argwhere(before & (backward[stage][:, None] < backward[stage][None, :]))
        if len(late):
            i, j = random.choice(late).tolist()
            moved, after = int(forward[stage, j]), int(backward[stage, i])
            what = f"with {proof.columns.action(moved)} not before {proof.columns.action(after)} is done"
            return _with(base, what, time=(moved, int(base.time[after]) + 1))
    return None


_MUTATIONS: tuple[Mutation, ...] = (_drop, _swap, _duplicate, _deadlock, _rank, _stage, _microbatch, _kind)

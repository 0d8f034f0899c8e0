"""Plain, slow decisions about tables of pipelines, written without looking at how the package makes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pycomm.schedule.pipeline import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Pipeline

Step = tuple[int, int, int]  # stage, kind, microbatch


def programs_of(table: Any) -> list[list[Step]]:
    rows = sorted(zip(table.rank, table.time, table.stage, table.kind, table.microbatch, strict=True))
    return [[(int(s), int(k), int(m)) for r, _, s, k, m in rows if r == rank] for rank in range(table.num_ranks)]


def needs(table: Any, step: Step) -> list[set[Step]]:
    """Return sets, of each of which one step must have been done before ``step``."""
    stage, kind, microbatch = step
    if kind == FORWARD:
        return [{(stage - 1, FORWARD, microbatch)}] if stage > 0 else []
    if kind == WEIGHTS:
        return [{(stage, BACKWARD_INPUT, microbatch)}]
    after = [{(stage + 1, k, microbatch) for k in (BACKWARD, BACKWARD_INPUT)}] if stage + 1 < table.num_stages else []
    return [{(stage, FORWARD, microbatch)}, *after]


def is_complete(table: Pipeline, programs: list[list[Step]]) -> bool:
    counts = Counter((rank, *step) for rank, program in enumerate(programs) for step in program)
    if any(count > 1 for count in counts.values()) or len(table.rank) != sum(counts.values()):
        return False
    left = set(counts)
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            rank = int(table.rank_of_stage[stage])
            whole = {(rank, stage, FORWARD, microbatch), (rank, stage, BACKWARD, microbatch)}
            parts = {(rank, stage, kind, microbatch) for kind in (FORWARD, BACKWARD_INPUT, WEIGHTS)}
            found = {key for key in left if key[1] == stage and key[3] == microbatch}
            if found != whole and (found != parts or not table.splits_weights):
                return False
            left -= found
    return not left


def is_right(table: Pipeline) -> bool:
    """Return whether everything is done once, where it belongs, and all ranks come to their end."""
    programs = programs_of(table)
    if not is_complete(table, programs):
        return False
    done: set[Step] = set()
    progress = True
    while progress:
        progress = False
        for program in programs:
            while program and all(done & choices for choices in needs(table, program[0])):
                done.add(program.pop(0))
                progress = True
    return not any(programs)


def operations(table: Any, rank: int, skips: tuple[tuple[int, int], ...] = ()) -> list[tuple[str, Any, int]]:
    """Return what ``rank`` does as ("recv", message, peer), ("do", step, rank) and ("send", message, peer)."""
    home = [int(r) for r in table.rank_of_stage]
    edges = [*((s, s + 1) for s in range(table.num_stages - 1)), *skips]
    result: list[tuple[str, Any, int]] = []
    for stage, kind, microbatch in programs_of(table)[rank]:
        come, go = [], []
        for number, (producer, consumer) in enumerate(edges):
            if home[producer] == home[consumer] or kind == WEIGHTS:
                continue
            source, target = (producer, consumer) if kind == FORWARD else (consumer, producer)
            tag = (number, kind == FORWARD, microbatch)
            come += [("recv", tag, home[source])] * (target == stage)
            go += [("send", tag, home[target])] * (source == stage)
        result += [*come, ("do", (stage, kind, microbatch), rank), *go]
    return result


def comes_to_its_end(table: Any, buffers: int, choose: Any, skips: tuple[tuple[int, int], ...] = ()) -> bool:
    """Return whether all ranks finish if ``choose`` picks, each time, which of those that can go on does."""
    left = [operations(table, rank, skips) for rank in range(table.num_ranks)]
    lying: dict[tuple[int, int], set[Any]] = {}

    def can(rank: int) -> bool:
        if not left[rank]:
            return False
        what, tag, peer = left[rank][0]
        if what == "do":
            return True
        if what == "recv":
            return tag in lying.get((peer, rank), set())
        awaited = bool(left[peer]) and left[peer][0] == ("recv", tag, rank)
        return awaited or len(lying.get((rank, peer), set())) < buffers

    while able := [rank for rank in range(table.num_ranks) if can(rank)]:
        rank = choose(able)
        what, tag, peer = left[rank].pop(0)
        if what == "recv":
            lying[peer, rank].remove(tag)
        elif what == "send" and left[peer] and left[peer][0] == ("recv", tag, rank):
            left[peer].pop(0)  # straight into the hands of who waits for it
        elif what == "send":
            lying.setdefault((rank, peer), set()).add(tag)
    return not any(left)


def times_of(table: Any, seconds: dict[Step, float], transfer: list[float]) -> dict[Step, tuple[float, float]]:
    """Return start and end of every step, by going over all of them until nothing changes."""
    programs = programs_of(table)
    home = [int(r) for r in table.rank_of_stage]
    end = {step: 0.0 for program in programs for step in program}
    changed = True
    while changed:
        changed = False
        for program in programs:
            free = 0.0
            for step in program:
                at = free
                for choices in needs(table, step):
                    (before,) = choices & end.keys()
                    crosses = home[before[0]] != home[step[0]]
                    at = max(at, end[before] + (transfer[min(before[0], step[0])] if crosses else 0.0))
                free = at + seconds[step]
                changed |= end[step] != free
                end[step] = free
    return {step: (end[step] - seconds[step], end[step]) for step in end}

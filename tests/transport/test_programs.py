"""Programs of random tables, compared with the same tables gone through edge by edge in numpy: what comes out is then
known even of what is no all-reduce, and every stale or torn read shows. And all that can go wrong with a program."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import CommError, Communicator, schedule
from pycomm.collectives.transport.algorithms import AlgorithmSelector
from pycomm.schedule import COPY, REDUCE, Round, ScheduleError, verify
from pycomm.schedule.program import program_of
from tests.on_ranks import Pools, on_ranks
from tests.ranks import PerRank, RankPool
from tests.transport.threads import ThreadsTransport, run_threads

Edge = tuple[int, int, int, int, int]  # src, dst, first chunk, count, op
Rounds = list[list[Edge]]
Listed = tuple[int, int, Rounds]  # ranks, chunks and rounds

TRANSPORTS = ["shared_memory", "tcp"]
SIZES = (0, 1, 7, 1_000, 400_000)  # of int32: in the end several segments a chunk


def table_of(listed: Listed) -> SimpleNamespace:
    """A table as a user may bring it: no Schedule, and the columns are lists."""
    num_ranks, num_chunks, rounds = listed

    def columns() -> Iterator[list[list[int]]]:
        for edges in rounds:
            yield [list(column) for column in zip(*edges, strict=True)] if edges else [[]] * 5

    return SimpleNamespace(num_ranks=num_ranks, num_chunks=num_chunks, rounds=columns)


def simulated(table: Listed, state: np.ndarray) -> np.ndarray:
    """[ranks, elements] after the table. Integers wrap around, so that no order of the additions matters."""
    _, num_chunks, rounds = table
    n = state.shape[1]
    for edges in rounds:
        before, state = state, state.copy()
        for src, dst, chunk, count, op in edges:
            part = slice(n * chunk // num_chunks, n * (chunk + count) // num_chunks)
            state[dst, part] = before[src, part] + (state[dst, part] if op == REDUCE else 0)
    return state


def chaos(rng: random.Random, num_ranks: int) -> Listed:
    """Any edges that do not conflict: a COPY writes what no other edge of its round reads or writes."""
    num_chunks = rng.randint(1, 6)
    rounds: Rounds = []
    for _ in range(rng.randint(1, 10)):
        edges: list[Edge] = []
        read, copied, added = (set[tuple[int, int]]() for _ in range(3))
        for _ in range(rng.randint(0, 4 * num_ranks)):
            src, dst = rng.sample(range(num_ranks), 2)
            chunk, op = rng.randrange(num_chunks), rng.choice((COPY, REDUCE))
            count = rng.randint(1, num_chunks - chunk)
            reads, writes = ({(rank, c) for c in range(chunk, chunk + count)} for rank in (src, dst))
            if reads & copied or writes & copied or (op == COPY and writes & (read | added)):
                continue
            read |= reads
            (copied if op == COPY else added).update(writes)
            edges.append((src, dst, chunk, count, op))
        rounds.append(edges)
    return num_ranks, num_chunks, rounds


def known(name: str, num_ranks: int) -> Listed:
    if name == "flood":  # all send to all, at once
        return num_ranks, 1, [[(*pair, 0, 1, REDUCE) for pair in permutations(range(num_ranks), 2)]]
    table = schedule.by_name(name, num_ranks)
    return num_ranks, table.num_chunks, [list(r.edges()) for r in table.rounds()]


def changed(rng: random.Random, table: Listed) -> Listed:
    """One change, that may or may not leave it right."""
    num_ranks, num_chunks, old = table
    rounds = [list(edges) for edges in old]
    at = rng.randrange(len(rounds))
    kind, where = rng.randrange(5), rng.randint(0, len(rounds[at]))
    if kind == 0 and at + 1 < len(rounds):  # two rounds as one
        rounds[at] += rounds.pop(at + 1)
    elif kind == 1:  # one round as two
        rounds[at : at + 1] = [rounds[at][:where], rounds[at][where:]]
    elif kind == 2:
        rng.shuffle(rounds[at])
    else:  # one more message: noise that is overwritten, or what is there already
        chunk = rng.randrange(num_chunks)
        src, dst = rng.sample(range(num_ranks), 2)
        extra = (src, dst, chunk, rng.randint(1, num_chunks - chunk), COPY)
        rounds.insert(at, [extra]) if kind == 3 else rounds[at].append(extra)
    return num_ranks, num_chunks, rounds


def right(rng: random.Random, num_ranks: int) -> Listed:
    """An all-reduce: a known one, ranks relabelled, chunks and edges cut, with all changes that leave it right."""
    name, by = rng.choice([*schedule.names(), "double_tree(3)", "flood"]), rng.randint(1, 4)
    (_, num_chunks, old), player = known(name, num_ranks), rng.sample(range(num_ranks), num_ranks)
    rounds: Rounds = [[] for _ in old]
    for edges, cut in zip(old, rounds, strict=True):
        for src, dst, chunk, count, op in edges:
            inner = range(chunk * by + 1, (chunk + count) * by)
            borders = [inner.start - 1, *sorted(rng.sample(inner, rng.randint(0, min(2, len(inner))))), inner.stop]
            cut += [(player[src], player[dst], a, b - a, op) for a, b in pairwise(borders)]
    table = (num_ranks, num_chunks * by, rounds)
    for _ in range(25):
        candidate = changed(rng, table)
        with contextlib.suppress(ScheduleError):
            verify(table_of(candidate))
            table = candidate
    return table


def tables(seed: int, num_ranks: int, number: int) -> list[tuple[bool, Listed]]:
    """Draw tables, each with whether it is an all-reduce."""
    rng = random.Random(seed)
    return [(i % 2 == 0, (right if i % 2 == 0 else chaos)(rng, num_ranks)) for i in range(number)]


def inputs(num_ranks: int, n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(-(2**31), 2**31, (num_ranks, n)).astype(np.int32)


def run_tables(cases: list[tuple[bool, Listed]], transport: str, memory: str) -> None:
    with Communicator(timeout=20, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        for i, (is_right, table) in enumerate(cases):
            for n in SIZES:
                start = inputs(size, n)
                wanted = simulated(table, start)
                x = torch.from_numpy(start[rank].copy())
                if memory == "empty" or (memory == "mixed" and (rank + i) % 2):
                    x = communicator.empty(n, torch.int32).copy_(x)
                if is_right:
                    assert (wanted == start.sum(0, dtype=np.int32)).all()
                    communicator.all_reduce(x, algorithm=table_of(table))
                else:
                    communicator.channel.run_program(program_of(table_of(table), rank), x)
                assert (x.numpy() == wanted[rank]).all(), (memory, n, table)


@pytest.mark.parametrize("memory", ["empty", "ordinary", "mixed", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_random_tables(rank_pools: Pools, size: int, memory: str) -> None:
    transport = "tcp" if memory == "tcp" else "shared_memory"
    rank_pools(size).run(run_tables, tables(size, size, 12), transport, memory)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_random_tables_over_threads(size: int) -> None:
    def rank_main(transport: ThreadsTransport) -> np.ndarray:
        x = torch.from_numpy(start[transport.rank].copy())
        transport.run(program_of(table_of(table), transport.rank), x, "sum", 30)
        return x.numpy()

    for _, table in tables(size, size, 30):
        for n in SIZES[:-1]:
            start = inputs(size, n)
            assert (np.stack(run_threads(size, rank_main)) == simulated(table, start)).all(), (n, table)


def mine(*edges: Edge) -> schedule.Schedule:
    """A schedule of two ranks and one chunk, with these rounds of one edge."""
    return schedule.Schedule("mine", 2, 1, lambda: (Round.of(*edge) for edge in edges))


def algorithm_called(name: str) -> Any:
    """Return an algorithm that cannot travel to the ranks, by a name that can."""
    there, back = (0, 1, 0, 1, REDUCE), (1, 0, 0, 1, COPY)
    rounds = iter(list(mine(there, back).rounds()))
    odd: dict[str, Any] = {
        "mine": mine(there, back),
        "mine, backwards": mine((1, 0, 0, 1, REDUCE), (0, 1, 0, 1, COPY)),
        "rounds only once": schedule.Schedule("once", 2, 1, lambda: rounds),
        "for 3": schedule.by_name("ring", 3),
        "wrong": mine(there),
        "scatter": schedule.Schedule("half", 2, 1, mine(there).generate, "reduce_scatter", np.array([1])),
        "arrays": np.zeros(3),
        "floats": SimpleNamespace(num_ranks=2.0, num_chunks=1.0, rounds=mine(there, back).rounds),
        "no rounds": SimpleNamespace(num_ranks=2, num_chunks=1, rounds=3),
        "strange": type("Strange", (), {"num_ranks": property(lambda _: 1 // 0)})(),
    }
    return odd.get(name, name)


def require_works(communicator: Communicator, *algorithms: Any) -> None:
    for algorithm in algorithms:
        x = torch.full((70_000,), communicator.rank + 1.0)
        communicator.all_reduce(x, algorithm=algorithm)
        assert (x == communicator.size * (communicator.size + 1) / 2).all(), algorithm


def disagree(transport: str, name: str) -> str:
    with Communicator(timeout=20, transport=transport) as communicator:
        with pytest.raises(ValueError, match="the ranks disagree: rank 1 called") as caught:
            communicator.all_reduce(torch.ones(70_000), algorithm=algorithm_called(name))
        require_works(communicator, "native", algorithm_called("mine"))
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("names", [["ring", "recursive_doubling"], ["mine", "mine, backwards"], ["ring", "native"]])
def test_ranks_that_disagree(two_ranks: RankPool, transport: str, names: list[str]) -> None:
    messages = two_ranks.run(disagree, transport, PerRank(names))
    assert messages[0] == messages[1]
    theirs, ours = messages[0].split("rank 1 called ")[1].split(" where rank 0 called ")
    assert theirs != ours  # one can see that they differ


def one_is_wrong(transport: str, name: str, ahead: int) -> str:
    """Rank 1 makes the mistake, with so many operations still under way."""
    with Communicator(timeout=5, transport=transport) as communicator:
        arrays = [torch.full((30_000,), float(i)) for i in range(ahead)]
        works = [communicator.all_reduce(x, async_op=True) for x in arrays]
        time.sleep(0.3 if communicator.rank == 0 and ahead else 0)
        with pytest.raises((ArithmeticError, TypeError, ValueError)) as caught:
            communicator.all_reduce(torch.ones(4), algorithm=algorithm_called(name) if communicator.rank else "ring")
        for i, (x, work) in enumerate(zip(arrays, works, strict=True)):
            _ = work and work.wait()
            assert (x == 2 * i).all()
        require_works(communicator, "native", algorithm_called("mine, backwards"))
    return f"{type(caught.value).__name__}: {caught.value}"


MISTAKES = {
    "for 3": "ValueError: algorithm is <schedule ring: .*wanted a schedule for the 2 ranks of this group",
    "wrong": "ScheduleError: after the last round, rank 0",
    "scatter": "ValueError: algorithm is <schedule half: .*wanted an all_reduce",
    "magic": "ValueError: algorithm is 'magic', wanted one of auto, native, ring, .*, or a schedule",
    "no rounds": "ScheduleError: rounds",
    **dict.fromkeys(("arrays", "floats", "strange"), "Error: "),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_is_an_error_on_all(two_ranks: RankPool, transport: str, name: str) -> None:
    innocent, guilty = two_ranks.run(one_is_wrong, transport, name, 8 if name == "magic" else 0)
    assert re.search(MISTAKES[name], guilty), guilty
    assert re.search("ValueError: .*rank 1 (could not take part|called)", innocent), innocent


@on_ranks(2)
def test_a_process_group_of_torch_has_its_own_algorithm_only() -> None:
    with Communicator(timeout=5, transport="torch") as communicator:
        with pytest.raises(ValueError, match='^algorithm is ring, but transport "torch" has only the process group'):
            communicator.all_reduce(torch.ones(4), algorithm="ring")
        with pytest.raises(ValueError, match="ring, but|all_reduce: rank 1 could not take part: algorithm is ring"):
            communicator.all_reduce(torch.ones(4), algorithm="ring" if communicator.rank else "native")
        require_works(communicator, "native")


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (5, 1), (5, 4)])
@on_ranks(2, fresh=True)
def test_a_program_of_another_group_or_rank(num_ranks: int, rank: int) -> None:
    with Communicator(timeout=5, transport="shared_memory") as communicator:
        with pytest.raises(ValueError):  # noqa: PT011
            communicator.channel.run_program(program_of(schedule.by_name("ring", num_ranks), rank), torch.ones(9))
        require_works(communicator, "ring")


def test_rounds_that_can_be_had_only_once() -> None:
    with contextlib.suppress(ScheduleError):
        program: Any = AlgorithmSelector(0, 2).find(algorithm_called("rounds only once"), torch.ones(1))
        assert len(program.sends) == 1


@on_ranks(2)
def test_too_large_and_too_late() -> None:
    """Rank 1 has an array for which the arena has no room, though it fills no memory."""
    with Communicator(timeout=10, transport="shared_memory") as communicator:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python < 3.11 has not
        num_bytes, error = (2**40, MemoryError) if communicator.rank == 1 else (4, ValueError)
        x = np.frombuffer(mmap.mmap(-1, num_bytes, private), np.uint8)
        with pytest.raises(error, match="1048576.0 MiB"):
            communicator.all_reduce(x, algorithm="ring")
        require_works(communicator, "ring")
    with pytest.raises(CommError, match="^all_reduce: this communicator is closed"):
        communicator.all_reduce(x, algorithm="ring")


def until_it_fails(how: str) -> tuple[str, int | None]:
    """Reduce until that fails; return what was raised, and the peer that it names."""
    communicator = Communicator(timeout=30, transport="shared_memory")
    x = torch.ones(2_000_000) if communicator.rank % 2 else communicator.empty(2_000_000).fill_(1.0)
    communicator.all_reduce(x, algorithm="ring")
    if communicator.rank == 1:
        kill = partial(signal.raise_signal, signal.SIGKILL if how == "killed" else signal.SIGINT)
        threading.Timer(0.3, communicator.close if how == "closed" else kill).start()
    try:
        for _ in range(2000):
            communicator.all_reduce(x, "max", algorithm="ring")
        return "nothing happened", None
    except (CommError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}", getattr(error, "peer", None)
    finally:
        communicator.close()


@pytest.mark.parametrize("how", ["killed", "interrupted", "closed"])
def test_a_rank_that_leaves_in_the_middle(new_ranks: Pools, how: str) -> None:
    outcomes = new_ranks(3).outcomes(until_it_fails, how, timeout=40)
    said = {"killed": "rank 1 died", "interrupted": "rank 1: (interrupted|it closed)", "closed": "rank 1: .*close"}
    for rank in (0, 2):
        says, peer = outcomes[rank].result
        assert re.search(f"CommError: rank {rank}: all_reduce: .*({said[how]})", says), says
        assert peer == 1 or f"rank {peer} gave up (rank {peer}: " in says, "it names whom it heard it from"
    if how != "killed":
        assert re.search("KeyboardInterrupt|closed", outcomes[1].result[0]), outcomes[1]


def stopped(table: Listed) -> str:
    """The last rank hangs, as seen by the one before it, which gives up and writes over its array."""
    last = table[0] - 1
    communicator = Communicator(transport="shared_memory", timeout=30)
    rank = communicator.rank
    communicator.channel.timeout = 1.0 if rank == last - 1 else 30.0
    pids = communicator.channel.all_gather_bytes(str(os.getpid()).encode())
    x = communicator.empty(100_000, torch.int32).fill_(rank)
    if rank == last - 1:
        time.sleep(0.5)  # until the others wait for this rank
        os.kill(int(pids[last]), signal.SIGSTOP)
    try:
        communicator.channel.run_program(program_of(table_of(table), rank), x)
        return f"ended with {x[0]}"
    except CommError as error:
        return str(error)
    finally:
        if rank == last - 1:
            x.fill_(99)
            os.kill(int(pids[last]), signal.SIGCONT)
        communicator.close()


@pytest.mark.parametrize("rounds", [[(0, 1)], [(1, 2), (0, 1)]])
def test_a_rank_that_hangs(rank_pools: Pools, rounds: list[tuple[int, int]]) -> None:
    last = len(rounds)
    texts = rank_pools(last + 1).run(stopped, (last + 1, 1, [[(*edge, 0, 1, COPY)] for edge in rounds]))
    assert f"timed out waiting for rank {last}, whose process is stopped," in texts[last - 1]
    for text in texts:  # none ends with numbers that were written after the failure
        assert "timed out" in text

"""Random calls of a Communicator, right and wrong, by two and three ranks at once, against an oracle.

    python -m tests.transport.fuzz --calls 10000 --seed 0
    python -m tests.transport.fuzz --seed 0 --only 1234     that call again, by itself

Call by call every rank draws from the seed what *all* ranks are about to do, so each knows what must
come out of it: a result, or an error on every rank. Number N is a call of the N-th group in turn, of
two or three ranks and over one transport or the other. Stops at the first failure unless told to
``--keep-going``; then those that look alike are put together at the end.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.ranks import RankOutcome, RankPool
from tests.transport import fuzz_rank
from tests.transport.fuzz_cases import draw
from tests.transport.fuzz_oracle import Report, judge, label

GROUPS = [(size, transport) for size in (2, 3) for transport in ("shared_memory", "tcp", "torch")]
TIMEOUT = 20.0
PATIENCE = 3.0  # seconds that a rank may be left alone by the others before they are told to leave
_PROGRESS = 5.0


@dataclass
class Failure:
    """A call that did not come out as it must."""

    seed: int
    number: int
    label: str
    call: str
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        again = f"python -m tests.transport.fuzz --seed {self.seed} --only {self.number}"
        return "\n".join([f"call {self.number} of seed {self.seed} ({again})", self.call, *self.problems])


class Group:
    """The ranks of one communicator, told what to do call by call.

    Args:
        pool_of: the processes, new ones if a rank was lost.
        patience: for how many seconds a rank may be left alone before the others are told to leave.
        sabotage: a fault that the oracle must find, see ``fuzz_rank``.
    """

    def __init__(
        self,
        pool_of: Callable[[int], RankPool],
        size: int,
        transport: str,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        sabotage: str = "",
    ) -> None:
        self.size, self.transport = size, transport
        self._pool_of, self._timeout, self._patience, self._sabotage = pool_of, timeout, patience, sabotage
        self._ready: RankPool | None = None  # the processes that have a communicator for this group

    def call(self, seed: int, number: int) -> Failure | None:
        """Do call ``number``; what was wrong about it, if anything was."""
        case = draw(seed, number, self.size, self.transport)
        failure = Failure(seed, number, label(case), str(case))
        pool = self._prepared()
        outcomes = self._outcomes(pool, seed, number)
        lost = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome.result, Report)]
        if lost:
            failure.problems = [f"rank {rank}: {outcomes[rank].trace or outcomes[rank].error}" for rank in lost]
            self._forget()
            return failure
        reports: list[Report] = [outcome.result for outcome in outcomes]
        failure.problems = judge(case, reports)
        if any("CommError" in report.error for report in reports):
            self._forget()
        elif self._ready is pool and (any(report.error for report in reports) or failure.problems):
            self._probe(pool, failure)
        return failure if failure.problems else None

    def close(self) -> None:
        """Give the communicators back."""
        if self._ready is not None and self._ready.alive():
            self._ready.run(fuzz_rank.leave, self.transport)

    def _prepared(self) -> RankPool:
        pool = self._pool_of(self.size)
        if self._ready is not pool:
            pool.run(fuzz_rank.prepare, self.transport, self._timeout, self._sabotage)
            self._ready = pool
        return pool

    def _forget(self) -> None:
        self._ready = None

    def _probe(self, pool: RankPool, failure: Failure) -> None:
        """After an error: whether the ranks can go on."""
        answers = pool.outcomes(fuzz_rank.probe, self.transport, timeout=self._timeout + 10)
        found = [f"afterwards, rank {p}: {a.result or a.error}" for p, a in enumerate(answers) if a.result != ""]
        if found:
            failure.problems += found
            self._forget()

    def _outcomes(self, pool: RankPool, seed: int, number: int) -> list[RankOutcome]:
        """Every rank's; who is left alone is released by the others' leaving, and gets a CommError."""
        pool.ask(fuzz_rank.perform, seed, number, self.transport)
        outcomes: dict[int, RankOutcome] = {}
        told: list[int] = []
        deadline = time.monotonic() + self._timeout + 10
        while len(outcomes) < self.size and (left := deadline - time.monotonic()) > 0:
            outcomes = {**pool.answers(min(left, self._patience)), **outcomes}
            if len(outcomes) < self.size:
                late = [rank for rank, outcome in outcomes.items() if outcome.error is None and rank not in told]
                pool.ask(fuzz_rank.leave, self.transport, ranks=late)
                told += late
        if told:
            self._forget()
            pool.answers(self._timeout, told)
        if len(outcomes) < self.size or any(outcome.error is not None for outcome in outcomes.values()):
            self._forget()
            pool.kill()
        return [outcomes.get(rank, RankOutcome(trace="did not come back")) for rank in range(self.size)]


class PoolsBySize:
    """Processes by the size of their group, started when they are wanted. A context manager."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def of(self, size: int) -> RankPool:
        """Return the pool of ``size`` ranks; a new one if a rank was lost."""
        if size in self._pools and not self._pools[size].alive():
            self._pools.pop(size).close()
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        return self._pools[size]

    def __enter__(self) -> PoolsBySize:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


def main() -> int:
    arguments = _parse()
    numbers = range(arguments.calls) if arguments.only is None else [arguments.only]
    numbers = numbers[arguments.first :]
    failures: list[Failure] = []
    start = said = time.monotonic()
    done = 0
    with PoolsBySize() as pools:
        groups = [Group(pools.of, size, transport, arguments.timeout, arguments.patience) for size, transport in GROUPS]
        for number in numbers:
            size, transport = GROUPS[number % len(GROUPS)]
            if re.search(arguments.skip, str(draw(arguments.seed, number, size, transport))):
                continue
            failure = groups[number % len(GROUPS)].call(arguments.seed, number)
            done += 1
            if failure is not None:
                failures.append(failure)
                print(f"\n{failure}", flush=True)
                if not arguments.keep_going:
                    break
            if time.monotonic() > said + _PROGRESS:
                said = time.monotonic()
                print(f"{done} calls, {done / (said - start):.0f} per second, {len(failures)} failed", flush=True)
    print(f"{done} calls, {done / (time.monotonic() - start):.0f} per second, {len(failures)} failed")
    if arguments.keep_going:
        _summarize(failures)
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this call")
    parser.add_argument("--only", type=int, metavar="N", help="call N by itself")
    parser.add_argument(
        "--skip", default="$^", metavar="REGEX", help="leave out calls whose description it is found in"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="of the communicators, in seconds")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="with a rank that others leave alone, in seconds"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    return parser.parse_args()


def _summarize(failures: list[Failure]) -> None:
    alike: dict[tuple[Any, ...], list[Failure]] = {}
    for failure in failures:
        what = re.sub(r"\d+(\.\d+)?|0x[0-9a-f]+", "#", failure.problems[0])
        alike.setdefault((failure.label, failure.call.split(",")[0], what), []).append(failure)
    for (name, transport, _), found in sorted(alike.items(), key=lambda item: item[0]):
        print(f"\n{len(found)} x {name} ({transport}), call {found[0].number}\n    {found[0].problems[0]}")


if __name__ == "__main__":
    sys.exit(main())

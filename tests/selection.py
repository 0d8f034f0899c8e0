"""Which tests `pytest` runs: alone, those that find most errors in a few minutes; with ``--part=all``, every one.

Tests mirror the packages of `pycomm`: `tests/reducer` is about `pycomm/training/reducer`. `pytest` alone leaves out
what :data:`LEFT_OUT` names. Of a test with parameters it takes one case, or as many as :data:`MOST_CASES` says: those
with a value that no case before them had. Of files below :data:`MOST_OF_FILE` it takes the first tests.

``--part=rest`` runs what `pytest` leaves out, so that both together are everything. Tests that are named on the command
line, or chosen by ``-k`` or ``-m``, run whole. What is marked slow is run by ``-m slow`` only, as ``nox -s slow`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.pairwise import case_of

LEFT_OUT = {
    "tests/bench": "the benchmarks themselves: they are no part of what is installed",
    "tests/chaos": "random faults for minutes",
    "tests/cli/bench": "the command that runs them",
    "tests/cli/test_demo.py": "demos, which train by every method",
    "tests/cli/test_trace.py": "pictures of steps of scripts, which are run for them",
    "tests/docs": "every block of code in the documentation",
    "tests/emulator": "the emulator of a GPU, and kernels with mistakes put in",
    "tests/examples": "examples, each with its ranks under torchrun",
    "tests/launching/test_sessions.py": "sessions of Python and notebooks that are typed",
    "tests/test_closure.py": "what is imported, by interpreters of its own",
    "tests/test_exits.py": "hundreds of interpreters that end",
    "tests/test_freed_memory.py": "what malloc keeps, by processes that show it",
    "tests/test_hostile_files.py": "thousands of damaged files",
    "tests/test_listening.py": "what listens where, of everything that makes connections",
    "tests/test_one_rank_differs.py": "every argument of every collective call, wrong on one rank",
    "tests/torch_suite": "torch's own tests of backends",
    "tests/tsan": "builds of the extension with ThreadSanitizer",
}
"""Paths that `pytest` alone does not run, and what is in them."""

MOST_OF_FILE = {
    "tests/asynchronous": 1,
    "tests/backend": 2,
    "tests/checkpoint": 1,
    "tests/cli": 1,
    "tests/compression/test_two_hop.py": 2,
    "tests/cost": 1,
    "tests/horovod": 1,
    "tests/integrations": 1,
    "tests/launching": 1,
    "tests/parallel": 1,
    "tests/reducer/partition": 1,
    "tests/reducer/test_slow_ranks.py": 1,
    "tests/reducer/test_timeouts.py": 1,
    "tests/reducer": 2,
    "tests/survival": 1,
    "tests/transport/test_connections.py": 2,
    "tests/transport/test_faults.py": 1,
    "tests/transport/test_hierarchical.py": 1,
    "tests/transport/test_late_ranks.py": 1,
    "tests/transport/test_messages.py": 2,
}
"""Most tests of one file that `pytest` alone runs, by the first path that fits. Most of them start processes."""

ADVICE = (
    "This was the quick part: `pytest --part=rest` runs the tests that it leaves out (tests/selection.py says which)"
)

MOST_CASES = {
    "tests/compression": 4,
    "tests/ddp": 2,
    "tests/kernels": 3,
    "tests/optim": 2,
    "tests/transport/test_collectives.py": 4,
}
"""Most cases of one test that `pytest` alone runs; one elsewhere. So each method, kernel and transport is run."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=["quick", "rest", "all"],
        help="quick: tests that find most errors in a few minutes, the default; rest: the others; all: both. "
        "Tests that are named run whole, unless this is given",
    )


def part_of(config: pytest.Config) -> str:
    """Return which part is to run."""
    chosen = config.getoption("keyword") or config.getoption("markexpr") != "not slow"
    named = chosen or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    part: str = config.getoption("--part") or ("all" if named else "quick")
    return part


def is_whole_part(config: pytest.Config) -> bool:
    """Return whether a part runs, and not tests that were named."""
    return bool(config.getoption("--part")) or part_of(config) == "quick"


def divide(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of the quick part, and the others."""
    quick, rest = list[pytest.Item](), list[pytest.Item]()
    seen, taken = dict[str, set[tuple[str, int]]](), Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        path = test.partition("::")[0]
        values, before = case_of(item), seen.setdefault(test, set())
        is_new = not values <= before or taken[test] == 0
        most = next((number for start, number in MOST_CASES.items() if test.startswith(start)), 1)
        most_of_file = next((number for start, number in MOST_OF_FILE.items() if test.startswith(start)), None)
        has_room = most_of_file is None or taken[path] < most_of_file
        if not test.startswith(tuple(LEFT_OUT)) and is_new and taken[test] < most and has_room:
            quick.append(item)
            before |= values
            taken[test] += 1
            taken[path] += 1
        else:
            rest.append(item)
    return quick, rest

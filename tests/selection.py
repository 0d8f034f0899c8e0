"""Which tests `pytest` runs: alone, those that find most errors in a few minutes; with ``--part=all``, every one.

Tests mirror the packages of `pycomm`: `tests/reducer` is about `pycomm/training/reducer`. `pytest` alone leaves out
what :data:`LEFT_OUT` names. Of a test with parameters it takes one case, or as many as :data:`MOST_CASES` says: those
with a value that no case before them had. Of files below :data:`FIRST_OF_FILE` it takes the first test.

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
    "tests/cli/test_demo.py": "demos, which train by every method",
    "tests/cli/test_trace.py": "pictures of steps of scripts, which are run for them",
    "tests/docs": "every block of code in the documentation",
    "tests/emulator": "the emulator of a GPU, and kernels with mistakes put in",
    "tests/examples": "examples, each with its ranks under torchrun",
    "tests/test_exits.py": "hundreds of interpreters that end",
    "tests/test_hostile_files.py": "thousands of damaged files",
    "tests/test_listening.py": "what listens where, of everything that makes connections",
    "tests/test_one_rank_differs.py": "every argument of every collective call, wrong on one rank",
    "tests/torch_suite": "torch's own tests of backends",
    "tests/tsan": "builds of the extension with ThreadSanitizer",
}
"""Paths that `pytest` alone does not run, and what is in them."""

FIRST_OF_FILE = (
    "tests/asynchronous",
    "tests/checkpoint",
    "tests/cli/bench",
    "tests/horovod",
    "tests/integrations",
    "tests/launching",
    "tests/parallel",
    "tests/reducer/partition",
    "tests/reducer/test_slow_ranks.py",
    "tests/reducer/test_timeouts.py",
    "tests/survival",
    "tests/transport/test_faults.py",
    "tests/transport/test_hierarchical.py",
    "tests/transport/test_late_ranks.py",
)
"""Paths of which `pytest` alone runs the first test of each file: most start processes, and take seconds."""

ADVICE = (
    "This was the quick part: `pytest --part=rest` runs the tests that it leaves out (tests/selection.py says which)"
)

MOST_CASES = {
    "tests/compression": 8,
    "tests/ddp": 2,
    "tests/kernels": 4,
    "tests/optim": 2,
    "tests/transport/test_collectives.py": 8,
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


def divide(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of the quick part, and the others."""
    quick, rest = list[pytest.Item](), list[pytest.Item]()
    seen, taken = dict[str, set[tuple[str, int]]](), Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test.startswith(FIRST_OF_FILE):
            path = test.partition("::")[0]
            (rest if taken[path] else quick).append(item)
            taken[path] += 1
            continue
        values, before = case_of(item), seen.setdefault(test, set())
        is_new = not values <= before or taken[test] == 0
        most = next((number for path, number in MOST_CASES.items() if test.startswith(path)), 1)
        if not test.startswith(tuple(LEFT_OUT)) and is_new and taken[test] < most:
            quick.append(item)
            before |= values
            taken[test] += 1
        else:
            rest.append(item)
    return quick, rest

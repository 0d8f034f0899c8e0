"""What torch's suite has, and what of it can run here."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import pycomm  # which registers its backend

RANKS = 4
ONLY_MPI = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")
"""Reasons for which the suite leaves out tests that every backend with an all-to-all for CPUs can run."""


@dataclass(frozen=True)
class Case:
    """One test of torch's, and why the suite leaves it out; ``None`` if it runs."""

    name: str
    left_out: str | None = None


class _AsGloo(str):
    """Name of a backend which tests take for Gloo's where they ask for that while they run."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


@cache
def module() -> ModuleType:
    """Import the suite, under the rules that it has for Gloo with ``RANKS`` ranks that meet in a file."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(RANKS),
        INIT_METHOD="file://set-for-each-test",
        MASTER_ADDR="127.0.0.1",  # which tests of what DDP logs look up; nobody connects
        GLOO_SOCKET_IFNAME="lo",
    )
    assert pycomm.collectives.backend
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


@cache
def test_class() -> Any:
    """Return the class of tests, assembled as PyTorch's own scripts do it."""
    suite: Any = module()
    return type("TestPycomm", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {"__module__": __name__})


def cases() -> list[Case]:
    """List all tests of the suite."""
    names = sorted(name for name in dir(test_class()) if name.startswith("test_"))
    return [Case(name, _left_out(getattr(test_class(), name))) for name in names]


def name_backend(backend: str) -> None:
    """Let the tests that run in this process know the backend's name, and where groups that they make anew meet.

    Whether there are ranks enough, tests look up while they run, and want eight of them for groups of two, except of
    MPI's ranks. Four will do.
    """
    vars(module()).update(BACKEND=_AsGloo(backend), INIT_METHOD=os.environ["INIT_METHOD"])
    os.environ["BACKEND"] = "mpi"


def note_calls(name: str) -> list[str]:
    """Return a list that the body of the test called ``name`` is noted in, in this process, when it is called."""
    body, called = getattr(test_class(), name), list[str]()

    @functools.wraps(body)
    def noted(self: Any) -> None:
        called.append(name)
        body(self)

    setattr(test_class(), name, noted)
    return called


def timeout_of(name: str) -> timedelta:
    """Return the timeout of the default group that the suite wants for a test."""
    return timedelta(seconds=vars(module())["CUSTOM_PG_TIMEOUT"].get(name, vars(module())["default_pg_timeout"]))


def exit_codes() -> dict[Any, str]:
    """Return the reasons for which ranks skip tests, by the codes with which they exit then."""
    return {skip.exit_code: skip.message for skip in vars(module())["TEST_SKIPS"].values()}


def _left_out(test: Any) -> str | None:
    reason = getattr(test, "__unittest_skip_why__", "") if getattr(test, "__unittest_skip__", False) else None
    return None if reason in ONLY_MPI else reason

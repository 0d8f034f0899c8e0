"""Faults put into the ranks on purpose: a harness under which a test cannot fail would tell nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

TEST = "test_all_reduce_sum"
"""The test of torch's that each of the faults must fail."""


def _wrong(_: Any) -> None:
    """Let collectives leave what they should reduce."""
    vars(dist)["all_reduce"] = lambda *_, **__: None


def _dies(test: Any) -> None:
    """End one rank in the middle."""
    if test.rank == 1:
        vars(dist)["all_reduce"] = lambda *_, **__: os._exit(0)


def _hangs(test: Any) -> None:
    """Let one rank stay away."""
    if test.rank == 1:
        vars(dist)["all_reduce"] = lambda *_, **__: time.sleep(3600.0)


def _skipped_by_one(test: Any) -> None:
    """Let one rank skip what the others run."""
    if test.rank == 1:
        vars(dist)["all_reduce"] = lambda *_, **__: test.skipTest("by one rank only")


def _unrun(test: Any) -> None:
    """Let ranks take themselves for the process that only waits for ranks: all of torch's tests "pass" there."""
    test.rank = test.MAIN_PROCESS_RANK
    test.processes, test.pid_to_pipe = [], {}


FAULTS: dict[str, Callable[[Any], None]] = {
    "wrong": _wrong,
    "dies": _dies,
    "hangs": _hangs,
    "skipped-by-one": _skipped_by_one,
    "unrun": _unrun,
}
SHOWN = {
    "wrong": "Expected 1 but got 0",
    "dies": "died without a word",
    "hangs": "no end within",
    "skipped-by-one": "rank 1: skipped",
    "unrun": "its body has not been called",
}
"""What the report of each fault says."""

"""Whose line an operation is noted with: the script's, however many libraries lie between it and pycomm."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import torch

import pycomm
from pycomm.collectives.recorder.dump import line_of
from pycomm.collectives.recorder.ring import Entry
from tests.on_ranks import on_ranks

TRAINER = os.path.join(sysconfig.get_path("purelib"), "some_trainer", "loop.py")


def trainer_that(statement: str) -> Callable[[Any], Any]:
    """Return a function of a library, which executes ``statement`` on its argument ``x``."""
    names: dict[str, Any] = {}
    exec(compile(f"def train(x):\n    return {statement}\n", TRAINER, "exec"), names)
    train: Callable[[Any], Any] = names["train"]
    return train


def last_of(communicator: pycomm.Communicator) -> Entry:
    return communicator.channel.recorder.entries()[-1]


@on_ranks(1)
def test_lines_between_are_passed_over() -> None:
    reduce, call = trainer_that("x[0].all_reduce(x[1])"), trainer_that("x()")
    with pycomm.Communicator() as c:
        x = torch.ones(3)
        line = sys._getframe().f_lineno + 1
        reduce((c, x))
        assert last_of(c).line == (__file__, line, "test_lines_between_are_passed_over")
        line = sys._getframe().f_lineno + 1
        call(lambda: reduce((c, x)))
        assert last_of(c).line == (__file__, line, "<lambda>"), "the innermost of the script's"


@on_ranks(1)
def test_a_library_that_nobody_calls_is_noted_itself() -> None:
    with pycomm.Communicator() as c:
        thread = threading.Thread(target=trainer_that("x[0].all_reduce(x[1])"), args=((c, torch.ones(3)),))
        thread.start()
        thread.join()
        noted = last_of(c).line
    assert noted is not None
    assert (noted[0], noted[2]) == (TRAINER, "train")


def test_the_main_thread_is_looked_at_by_the_same_rule() -> None:
    line = sys._getframe().f_lineno + 1
    found = trainer_that("x()")(lambda: line_of(sys._getframe()))
    assert found == (__file__, line, "<lambda>")
    found = trainer_that("x(__import__('sys')._getframe())")(line_of)
    assert found is not None
    assert found[0] == __file__

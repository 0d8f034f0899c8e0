"""Modes of a parameter server: frozen objects, and short names."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

import pycomm
from pycomm.training.asynchronous.modes import SyncRules, checked_mode


def test_they_check_themselves() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: pycomm.StaleSynchronous(0), "staleness is 0, wanted an integer >= 1"),
        (lambda: pycomm.StaleSynchronous(cast(Any, "3")), "staleness is '3', wanted an integer"),
        (lambda: pycomm.Sync(quorum=0), "quorum is 0, wanted an integer >= 1"),
        (lambda: pycomm.Sync(quorum=cast(Any, 2.0)), "quorum is 2.0, wanted an integer"),
        (lambda: pycomm.Sync(-1), "backup is -1, wanted an integer >= 0"),
        (lambda: pycomm.Sync(True), "backup is True, wanted an integer"),
        (lambda: pycomm.Sync(backup=1, quorum=2), "backup=1 with quorum=2"),
        (lambda: pycomm.Sync(compensation="lr"), "compensation='lr' without a quorum: no gradient is stale then"),
        *(
            (lambda make=make, options=options: make(**options), message)
            for make in (
                pycomm.Async,
                lambda **options: pycomm.Sync(quorum=2, **options),
                lambda **options: pycomm.StaleSynchronous(2, **options),
            )
            for options, message in (
                ({"compensation": "more"}, 'compensation is \'more\', wanted None, "lr" or "dc"'),
                ({"compensation": ["dc"]}, "compensation is ['dc'], wanted None"),
                ({"compensation": "dc", "strength": -1.0}, "strength is -1.0, wanted strength >= 0"),
                ({"compensation": "dc", "adaptive": 1}, "adaptive is 1, wanted"),
                ({"compensation": "dc", "decay": 1.0}, "decay is 1.0, wanted decay >= 0 and < 1"),
                ({"compensation": "dc", "eps": 0.0}, "eps is 0.0, wanted eps > 0"),
                ({"strength": 0.5}, 'strength=0.5 with compensation=None, wanted "dc" there'),
                ({"compensation": "lr", "adaptive": True}, "adaptive=True with compensation='lr', wanted \"dc\" there"),
            )
        ),
    ]
    for make, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            make()


def test_ranks_compare_what_is_written() -> None:
    written = "StaleSynchronous(compensation=None, strength=0.04, adaptive=False, decay=0.95, eps=1e-07, staleness=3)"
    assert repr(pycomm.StaleSynchronous(3)) == written
    assert pycomm.Async("dc") == pycomm.Async("dc", strength=0.04)
    assert pycomm.Sync(quorum=2, compensation="lr") != pycomm.Sync(quorum=2)


def test_a_quorum_takes_gradients_of_any_workers_and_age() -> None:
    rules = pycomm.Sync(quorum=3).rules()
    assert not isinstance(rules, SyncRules)
    for worker in (1, 2):
        rules.join(worker)
    for staleness in (0, 7, 2):  # all of one worker
        assert not rules.is_due()
        assert rules.may_pull(1)
        assert rules.push(1, staleness)
    assert rules.is_due()
    rules.updated()
    assert not rules.is_due()


def test_short_names() -> None:
    assert checked_mode("async") == pycomm.Async()
    assert checked_mode("sync") == pycomm.Sync()
    for wrong, kind, message in (
        ("ssp", ValueError, 'mode is \'ssp\', wanted "async", "sync", a pycomm.Async, StaleSynchronous or Sync'),
        ("bulk", ValueError, 'mode is \'bulk\', wanted "async", "sync", a pycomm.Async'),
        (5, TypeError, "mode is 5, wanted"),
        (pycomm.Sync, TypeError, "mode is <class"),
    ):
        with pytest.raises(kind, match=message):
            checked_mode(wrong)

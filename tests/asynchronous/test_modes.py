"""Modes as users write them: frozen objects, short names, and the keywords of before."""

from __future__ import annotations

import re
import tempfile
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.training.asynchronous.modes import checked_mode, mode_of
from pycomm.training.asynchronous.settings import checked_settings
from tests.asynchronous.runs import model_of
from tests.on_ranks import on_ranks


def test_they_check_themselves() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: pycomm.StaleSynchronous(0), "staleness is 0, wanted an integer >= 1"),
        (lambda: pycomm.StaleSynchronous(cast(Any, "3")), "staleness is '3', wanted an integer"),
        (lambda: pycomm.SoftSync(0), "quorum is 0, wanted an integer >= 1"),
        (lambda: pycomm.Sync(-1), "backup is -1, wanted an integer >= 0"),
        (lambda: pycomm.Sync(True), "backup is True, wanted an integer"),
        *(
            (lambda make=make: make("more"), "compensation is 'more', wanted None")
            for make in (pycomm.Async, lambda c: pycomm.SoftSync(2, c), lambda c: pycomm.StaleSynchronous(2, c))
        ),
    ]
    for make, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            make()


def test_ranks_compare_what_is_written() -> None:
    assert repr(pycomm.StaleSynchronous(3)) == "StaleSynchronous(staleness=3, compensation=None)"
    assert pycomm.Async("dc") == pycomm.Async(pycomm.DelayCompensation())
    assert pycomm.SoftSync(2, "lr") != pycomm.SoftSync(2)


def test_short_names() -> None:
    assert checked_mode("async") == pycomm.Async()
    assert checked_mode("sync") == pycomm.Sync()
    for wrong, kind, message in (
        ("ssp", ValueError, r"mode is 'ssp', .*pycomm.StaleSynchronous\(3\)"),
        ("bulk", ValueError, 'mode is \'bulk\', wanted "async", "sync", a pycomm.Async'),
        (5, TypeError, "mode is 5, wanted"),
        (pycomm.Sync, TypeError, "mode is <class"),
    ):
        with pytest.raises(kind, match=message):
            checked_mode(wrong)


def test_checkpoints_of_before_are_of_the_same_settings() -> None:
    """A server compares this text with the one in its folder."""
    mode = pycomm.StaleSynchronous(3, "lr")
    assert checked_settings(3, 1.0, mode=mode, compression="fp16").of_updates() == (
        "mode=ssp, staleness=3, compensation=lr, compression=FP16(), quorum=None, backup=0, servers=1"
    )
    for method, text in (
        (pycomm.Int8(), "Int8(error_feedback=True)"),
        (pycomm.Int8(block=64), "Int8(error_feedback=True, block=64)"),
        (pycomm.BF16(sum="float32"), "BF16(sum='float32')"),
    ):
        assert f"compression={text}," in checked_settings(3, 1.0, compression=method).of_updates()
    assert checked_settings(3, 1.0, mode=pycomm.Sync(1)).of_updates() == (
        "mode=sync, staleness=None, compensation=None, compression=None, quorum=None, backup=1, servers=1"
    )


OLD: list[tuple[dict[str, Any], str, Any]] = [
    ({"mode": "ssp", "staleness": 3}, "mode=pycomm.StaleSynchronous(staleness=3)", pycomm.StaleSynchronous(3)),
    ({"compensation": "lr"}, "mode=pycomm.Async(compensation='lr')", pycomm.Async("lr")),
    ({"mode": "softsync", "quorum": 2}, "mode=pycomm.SoftSync(quorum=2)", pycomm.SoftSync(2)),
    ({"mode": "sync", "backup": 1}, "mode=pycomm.Sync(backup=1)", pycomm.Sync(1)),
    ({"backup": 0, "quorum": None}, "mode=pycomm.Async()", pycomm.Async()),
]


@on_ranks(3)
def test_old_keywords_go_on_working() -> None:
    call: Any = pycomm.parameter_server
    for options, line, mode in OLD:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.warns(
            DeprecationWarning, match=re.escape(f"write pycomm.parameter_server(..., timeout=60, {line})")
        ):
            server = call(optimizer, model, timeout=60, **options)
        assert server._settings.mode == mode
        server.close()
        dist.barrier()
    with pytest.raises(TypeError, match="backup= is given together with mode=Sync"):
        call(optimizer, model, mode=pycomm.Sync(), backup=1)


@on_ranks(2)
def test_traces_have_an_entry_of_their_own() -> None:
    model, call = model_of(), cast(Any, pycomm.parameter_server)
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths, src=0)
        with pytest.warns(
            DeprecationWarning, match=r"write pycomm.training.asynchronous.parameter_server.traced\(..., trace="
        ):
            call(torch.optim.SGD(model.parameters(), 0.1), model, trace=f"{paths[0]}/trace").close()
        dist.barrier()


def test_the_old_form_is_what_the_new_one_says() -> None:
    assert mode_of("ssp", 3, "dc") == pycomm.StaleSynchronous(3, pycomm.DelayCompensation())

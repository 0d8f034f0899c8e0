"""pycomm.deprecated: old keywords go on working, and one warning shows the new line."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

import pycomm
from pycomm.deprecated import Moved, Old, renamed, settled


def survive_of(on_failure: str = "raise", min_ranks: int = 1) -> pycomm.DGC | None:
    if min_ranks < 1:
        raise ValueError(f"min_ranks is {min_ranks}, wanted at least 1")
    return pycomm.DGC(ratio=1 / min_ranks) if on_failure == "shrink" else None


def mode_of(mode: str = "async", staleness: int = 1) -> str:
    return f"{mode}-{staleness}"


def other(*args: Any, **kwargs: Any) -> Any:
    return "other", args, kwargs


@renamed(
    Moved(
        lambda kwargs: kwargs.get("join") is not None,
        lambda: other,
        lambda args, kwargs: ((kwargs["join"], *args), {n: v for n, v in kwargs.items() if n != "join"}),
    ),
    survive=Old(("on_failure", "min_ranks"), survive_of),
    mode=Old(("staleness",), mode_of, short=str),
)
def train(optimizer: Any, model: Any, *, survive: Any = None, mode: Any = "async", lr: float = 1.0) -> Any:
    return optimizer, model, settled(survive), settled(mode), lr


call: Any = train  # without its types, as old scripts call it


def test_new_calls_pass_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(1, 2) == (1, 2, None, "async", 1.0)
        assert call(1, model=2, survive=3, mode="sync") == (1, 2, 3, "sync", 1.0)


def test_the_signature_is_the_new_one() -> None:
    assert list(inspect.signature(train).parameters) == ["optimizer", "model", "survive", "mode", "lr"]


def test_one_warning_shows_the_new_line_where_it_was_called() -> None:
    words = (
        r"^on_failure=, min_ranks=, staleness= of pycomm.train\(\) will be gone in two releases; "
        r"write pycomm.train\(..., mode='ssp-3', lr=2, survive=pycomm.DGC\(ratio=0.5\)\)$"
    )
    with pytest.warns(DeprecationWarning, match=words) as caught:
        found = call([1], [2], mode="ssp", staleness=3, on_failure="shrink", min_ranks=2, lr=2)
    assert found == ([1], [2], pycomm.DGC(ratio=0.5), "ssp-3", 2)
    assert [each.filename for each in caught] == [__file__]


def test_old_and_new_together_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="^min_ranks= is given together with survive=3, wanted survive= alone$"):
        call(1, 2, survive=3, min_ranks=2)
    with pytest.raises(TypeError, match="^staleness= is given together with mode=3, wanted mode= alone$"):
        call(1, 2, mode=3, staleness=2)


def test_what_is_wrong_is_raised_inside() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="^min_ranks is 0, wanted at least 1$") as raised:
            call(1, 2, min_ranks=0)
    assert "settled" in [entry.name for entry in raised.traceback]


def test_calls_that_moved() -> None:
    words = r"^this call of pycomm.train\(\) will be .*; write pycomm.other\('host:1', ..., lr=3\)$"
    with pytest.warns(DeprecationWarning, match=words):
        assert call([1], [2], join="host:1", lr=3) == ("other", ("host:1", [1], [2]), {"lr": 3})


@dataclass(frozen=True)
class Foreign:
    size: int


def test_what_is_not_ours_is_not_written_out() -> None:
    with pytest.warns(DeprecationWarning, match=r"write pycomm.train\(..., survive=..., mode='sync-2'\)$"):
        call(Foreign(1), [2], survive=Foreign(3), mode="sync", staleness=2)


def test_modules_by_their_earlier_names() -> None:
    """Documented imports go on silently, others with a warning; both give the same module."""
    lines = [
        "import pycomm, sys, warnings",
        "warnings.simplefilter('error')",
        "import pycomm.checkpoint, pycomm.backend.process_group",
        "from pycomm.monitoring import FIELDS",
        "from pycomm import checkpoint",
        "import pycomm.training.checkpoint as new",
        "assert checkpoint is new is pycomm.checkpoint is sys.modules['pycomm.checkpoint']",
        "assert pycomm.backend is pycomm.collectives.backend",
        "warnings.simplefilter('always')",
        "with warnings.catch_warnings(record=True) as caught:",
        "    from pycomm.reducer.settings import Tuning",
        "assert Tuning is pycomm.Tuning",
        "assert [str(one.message) for one in caught] == ['pycomm.reducer is pycomm.training.reducer now',",
        "    'pycomm.reducer.settings is pycomm.training.reducer.settings now'], caught",
        "assert {one.filename for one in caught} == {'<string>'}",
        "import pickle",
        "assert pickle.loads(b'cpycomm.bucket\\nBucket\\n.') is pycomm.collectives.bucket.Bucket",
        "for name in ('pycomm.reducer.nothing', 'pycomm.nothing'):",
        "    try:",
        "        __import__(name)",
        "    except ModuleNotFoundError as error:",
        "        assert error.name == name, error",
        "    else:",
        "        raise AssertionError(name)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=100, cwd="/")


def test_commands_by_their_earlier_names() -> None:
    command = [sys.executable, "-W", "default", "-m", "pycomm.cli.main", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100, cwd="/")
    assert done.stdout == f"pycomm {pycomm.__version__}\n"
    assert "pycomm.cli is pycomm.tools.cli now" in done.stderr

"""Options of ``attach``: what they refuse, how they are written, and the arguments that they have replaced."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.models import make_model, sgd

Survive: Any = pycomm.Survive
Tuning: Any = pycomm.Tuning


class State:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pycomm.Survive(min_ranks=0), "min_ranks is 0"),
        (lambda: pycomm.Survive(backup=-1), "backup is -1"),
        (lambda: Survive(carry=5), "carry is 5, wanted a mapping"),
        (lambda: Survive(carry={5: State()}), "carry has the name 5, wanted strings"),
        (lambda: pycomm.Survive(carry={"a": 5}), r"carry\['a'\] is 5, wanted an object with state_dict"),
        (lambda: pycomm.Sharding("model"), 'shard is \'model\', wanted "optimizer", "parameters" or None'),
        (lambda: pycomm.Sharding("optimizer", grads="all"), 'grads is \'all\', wanted "part", "full" or "local"'),
        (lambda: pycomm.Tuning(bucket_mb=0), "bucket_mb is 0"),
        (lambda: Tuning(algorithm=5), "algorithm is 5, wanted a name"),
        (lambda: pycomm.Tuning(check_replicas=-1), "check_replicas is -1"),
        (lambda: pycomm.Tuning(per_rank="lr"), "per_rank is 'lr', wanted names of hyperparameters"),
        (lambda: pycomm.Tuning(optimizer_state="drop"), 'optimizer_state is \'drop\', wanted "broadcast" or "keep"'),
    ],
)
def test_what_an_option_refuses(make: Callable[[], object], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (pycomm.Survive(), "Survive()"),
        (pycomm.Survive(2, carry={"b": State(), "a": State()}), "Survive(min_ranks=2, carry=['a', 'b'])"),
        (pycomm.Sharding("optimizer"), "Sharding('optimizer')"),
        (pycomm.Sharding("parameters", grads="local"), "Sharding('parameters', grads='local')"),
        (pycomm.Tuning(bucket_mb=8, per_rank=["lr", "eps"]), "Tuning(bucket_mb=8.0, per_rank=('eps', 'lr'))"),
    ],
    ids=str,
)
def test_options_are_written_as_one_writes_them(option: object, text: str) -> None:
    assert repr(option) == text
    with pytest.raises(AttributeError):
        option.min_ranks = 1  # type: ignore[attr-defined]


OLD: list[tuple[dict[str, Any], str]] = [
    ({"bucket_mb": 8}, "tuning=pycomm.Tuning(bucket_mb=8.0)"),
    ({"check_replicas": 10, "timeout": 30}, "tuning=pycomm.Tuning(check_replicas=10, timeout=30)"),
    ({"ignore": ["0.*"]}, "tuning=pycomm.Tuning(ignore=...)"),
    ({"on_failure": "shrink"}, "survive=pycomm.Survive()"),
    ({"on_failure": "shrink", "min_ranks": 2}, "survive=pycomm.Survive(min_ranks=2)"),
    ({"on_failure": "raise"}, "survive=None"),
    ({"shard": "optimizer", "full_grad": True}, "shard=pycomm.Sharding(kind='optimizer', grads='full')"),
]


@pytest.mark.parametrize(("given", "line"), OLD, ids=[line for _, line in OLD])
@on_ranks(2)
def test_old_arguments_go_on_working_and_one_warning_shows_the_new_line(given: dict[str, Any], line: str) -> None:
    model = make_model(dtype=torch.float32)
    attach: Any = pycomm.attach
    with pytest.warns(DeprecationWarning, match=r"of pycomm.attach\(\) will be gone") as found:
        attach(sgd(model), model, **given).detach()
    (warning,) = found
    assert f"of pycomm.attach() will be gone in two releases; write pycomm.attach(..., {line})" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (
            {"bucket_mb": 8, "tuning": pycomm.Tuning()},
            TypeError,
            "bucket_mb= is given together with tuning=",
        ),
        ({"min_ranks": 2, "survive": pycomm.Survive()}, TypeError, "min_ranks= is given together with survive="),
        ({"shard": pycomm.Sharding("optimizer"), "full_grad": True}, TypeError, "full_grad= is given together with"),
        ({"on_failure": "ignore"}, ValueError, 'on_failure is \'ignore\', wanted "raise" or "shrink"'),
        ({"backup": 1}, ValueError, 'backup=1 does not go with on_failure="raise"'),
        ({"full_grad": True}, ValueError, "full_grad=True without shard"),
        ({"shard": "optimizer", "full_grad": "all"}, TypeError, "full_grad is 'all', wanted True, False or None"),
        ({"join": 5}, TypeError, "join is 5, wanted an address, or None"),
        ({"survive": "shrink"}, TypeError, r"survive is 'shrink', wanted pycomm.Survive\(min_ranks=...\) or None"),
        ({"shard": 5}, TypeError, 'shard is 5, wanted "optimizer", "parameters"'),
        ({"tuning": {"bucket_mb": 8}}, TypeError, r"tuning is \{'bucket_mb': 8\}, wanted pycomm.Tuning"),
        (
            {"bucket_mbs": 8},
            TypeError,
            "did you mean tuning=pycomm.Tuning.bucket_mb=....",
        ),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_an_error_of_all(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    """Also of arguments that are deprecated, whose warning does not matter then."""
    model, mine = make_model(), dist.get_rank() == 1
    attach: Any = pycomm.attach
    with pytest.raises(kind if mine else ValueError, match=says):
        attach(sgd(model), model, **(given if mine else {}))
    attach(sgd(model), model, tuning=pycomm.Tuning(timeout=timedelta(seconds=30))).detach()


@on_ranks(2)
def test_ranks_that_differ_in_an_option_are_told() -> None:
    model, rank = make_model(), dist.get_rank()
    with pytest.raises(ValueError, match=r"'survive=Survive\(min_ranks=2\)' on rank 1, 'survive=Survive\(\)'"):
        pycomm.attach(sgd(model), model, survive=pycomm.Survive(1 + rank))
    with pytest.raises(ValueError, match=r"Tuning\(bucket_mb=2.0\)' on rank 1, 'tuning=Tuning\(bucket_mb=1.0\)'"):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(bucket_mb=1 + rank, timeout=20 + rank))
    pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=20 + rank)).detach()  # may differ

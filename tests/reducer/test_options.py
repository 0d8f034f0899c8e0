"""Options of ``attach``: what they refuse, and how they are written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
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
        (lambda: Survive(carry=5), "carry is 5, wanted a mapping"),
        (lambda: Survive(carry={5: State()}), "carry has the name 5, wanted strings"),
        (lambda: pycomm.Survive(carry={"a": 5}), r"carry\['a'\] is 5, wanted an object with state_dict"),
        (lambda: pycomm.Sharding("model"), "kind is 'model', wanted \"optimizer\""),
        (lambda: pycomm.Sharding("optimizer", grads="all"), 'grads is \'all\', wanted "part" or "full"'),
        (lambda: pycomm.Tuning(bucket_mb=0), "bucket_mb is 0"),
        (lambda: Tuning(algorithm=5), "algorithm is 5, wanted a name"),
        (lambda: pycomm.Tuning(check_replicas=-1), "check_replicas is -1"),
        (lambda: pycomm.Tuning(per_rank="lr"), "per_rank is 'lr', wanted names of hyperparameters"),
        (lambda: Tuning(all_parameters="yes"), "all_parameters is 'yes', wanted True or False"),
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
        (
            pycomm.Sharding("optimizer", grads="full", independent=True),
            "Sharding('optimizer', grads='full', independent=True)",
        ),
        (pycomm.Tuning(bucket_mb=8, per_rank=["lr", "eps"]), "Tuning(bucket_mb=8.0, per_rank=('eps', 'lr'))"),
    ],
    ids=str,
)
def test_options_are_written_as_one_writes_them(option: object, text: str) -> None:
    assert repr(option) == text
    with pytest.raises(AttributeError):
        option.min_ranks = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"survive": "shrink"}, TypeError, r"survive is 'shrink', wanted pycomm.Survive\(min_ranks=...\) or None"),
        ({"shard": 5}, TypeError, 'shard is 5, wanted "optimizer", pycomm.Sharding'),
        ({"tuning": {"bucket_mb": 8}}, TypeError, r"tuning is \{'bucket_mb': 8\}, wanted pycomm.Tuning"),
        (
            {"bucket_mbs": 8},
            TypeError,
            r"unknown argument 'bucket_mbs': did you mean tuning=pycomm.Tuning\(bucket_mb=...\)\?",
        ),
        ({"min_ranks": 2}, TypeError, r"unknown argument 'min_ranks': write survive=pycomm.Survive\(min_ranks=...\)"),
        ({"all_parameters": True}, TypeError, r"write tuning=pycomm.Tuning\(all_parameters=...\)"),
        ({"clip_local_norm": 1.0}, TypeError, r"write compression=pycomm.DGC\(clip_local_norm=...\)"),
        ({"optimizer_state": "keep"}, TypeError, r'write tuning=pycomm.Tuning\(ignore=\["optimizer state"\]\)'),
        ({"compress": None}, TypeError, "unknown argument 'compress': did you mean compression?"),
        ({"static_graph": True}, TypeError, "'static_graph': leave it out, no graph is assumed to stay the same"),
        ({"zzz": 1}, TypeError, "unknown argument 'zzz': wanted one of compression, accumulate"),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_an_error_of_all(given: dict[str, Any], kind: type[Exception], says: str) -> None:
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

"""Checkpoints of as many ranks are loaded by more, or fewer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.checkpoint.training import contributions, seed, training
from tests.on_ranks import Pools

Totals = dict[tuple[str, str], torch.Tensor]


def totals(reducer: pycomm.Reducer) -> Totals:
    """Return the sums over the ranks of residuals and velocities."""
    found: Totals = {}
    for name, entry in contributions(reducer).items():
        for key in ("residual", "velocity"):
            if key in entry:
                total = entry[key].double()
                dist.all_reduce(total)
                found[name, key] = total
    return found


def first(folder: str, method: str) -> Any:
    seed(dist.get_rank())
    with training("sgd", method) as run:
        run.steps(5)
        pycomm.save(folder, run.reducer, step=5, me=dist.get_rank(), **run.more).wait()
        drawn = random.random()
        return totals(run.reducer), [p.detach().clone() for p in run.model.parameters()], drawn


def then(folder: str, method: str) -> Any:
    seed(1000 + dist.get_rank())
    untouched = random.Random(1000 + dist.get_rank()).random()
    with training("sgd", method) as run:
        found = pycomm.load(folder, run.reducer, **run.more)
        drawn = random.random()
        result = totals(run.reducer), [p.detach().clone() for p in run.model.parameters()], drawn, untouched, found
        run.steps(2)
        return result


@pytest.mark.behavior("Checkpoints", "load into another number of ranks", "Sums of residuals and velocities are kept.")
@pytest.mark.parametrize("method", ["dense", "topk", "dgc", "powersgd"])
@pytest.mark.parametrize(
    ("old", "new"), [(2, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(4, 2), (3, 1), (1, 2)])]
)
def test_sums_and_models_are_kept(rank_pools: Pools, old: int, new: int, method: str, tmp_path: Path) -> None:
    saved = rank_pools(old).run(first, str(tmp_path), method)
    loaded = rank_pools(new).run(then, str(tmp_path), method)
    for rank, (sums, parameters, drawn, untouched, found) in enumerate(loaded):
        assert found == {"step": 5, "me": rank if rank < old else 0}
        assert drawn == (saved[rank][2] if rank < old else untouched)
        assert all(map(torch.equal, parameters, saved[0][1]))
        assert sums.keys() == saved[0][0].keys()
        for key, total in sums.items():
            torch.testing.assert_close(total, saved[0][0][key], rtol=1e-5, atol=1e-6)
    if method in ("topk", "dgc"):
        assert any(bool(total.any()) for total in loaded[0][0].values())

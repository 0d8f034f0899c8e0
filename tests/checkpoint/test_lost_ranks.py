"""With ``on_failure="shrink"``, the ranks that are left save and load as the world that they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.training.checkpoint import saving
from tests.checkpoint.test_ranks_change import totals
from tests.checkpoint.training import Training, bits, training
from tests.on_ranks import Pools


def attach() -> Training:
    return Training("adamw", "topk", on_failure="shrink", min_ranks=2)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def weights(run: Training) -> bytes:
    return b"".join(map(bits, run.model.parameters()))


def lose_a_rank(folder: str, culprit: int) -> tuple[Any, ...]:
    run = attach()
    run.steps(3)
    pycomm.save(folder, run.reducer, step=3, **run.more).wait()
    if dist.get_rank() == culprit:
        run.model.head.weight.register_hook(die)
    run.steps(2)
    assert len(run.reducer.world) == 2
    pending = pycomm.save(folder, run.reducer, step=5, **run.more)
    saved = weights(run)
    run.steps(2)
    path = pending.wait(20)
    assert sorted(part.name for part in path.glob("rank-*")) == ["rank-0", "rank-1"]
    assert pycomm.load(folder, run.reducer, **run.more) == {"step": 5}
    assert weights(run) == saved
    run.steps(1)
    return saved, weights(run)


def load_weights(folder: str) -> tuple[Any, ...]:
    with training("adamw", "topk") as run:
        pycomm.load(folder, run.reducer, **run.more)
        saved = weights(run)
        run.steps(1)
        return saved, weights(run)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_ranks_that_are_left_save_and_load(culprit: int, new_ranks: Pools, rank_pools: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(3).outcomes(lose_a_rank, str(tmp_path), culprit)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]
    assert [outcome.trace for outcome in left] == ["", ""]
    assert rank_pools(2).run(load_weights, str(tmp_path)) == [outcome.result for outcome in left]


def lose_a_rank_in_save(folder: str, culprit: int, place: str) -> None:
    """Save, and save again while a rank dies at ``place``; then go on."""
    run = attach()
    run.steps(3)
    pycomm.save(folder, run.reducer, step=3, **run.more).wait()
    with patch.object(saving, place, die if dist.get_rank() == culprit else vars(saving)[place]):
        pending = pycomm.save(folder, run.reducer, step=4, **run.more)
    with pytest.raises(pycomm.CommError):
        pending.wait(20)
    run.steps(2)
    assert len(run.reducer.world) == 2
    pycomm.save(folder, run.reducer, step=5, **run.more).wait(20)
    assert pycomm.load(folder, run.reducer, **run.more) == {"step": 5}


@pytest.mark.behavior(
    "Checkpoints", "lose a rank while saving, with `survive`", "That checkpoint is lost; training continues."
)
@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("place", ["collect", "remove_unfinished", "_enter", "_copy", "PendingSave"])
def test_lost_while_saving(culprit: int, place: str, new_ranks: Pools, tmp_path: Path) -> None:
    if place == "remove_unfinished" and culprit != 0:
        pytest.skip("only rank 0 calls it")
    outcomes = new_ranks(3).outcomes(lose_a_rank_in_save, str(tmp_path), culprit, place)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]
    assert [outcome.trace for outcome in left] == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "checkpoint-00000001"


@pytest.mark.slow
def test_the_sums_of_those_that_are_left_are_saved(new_ranks: Pools, rank_pools: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(3).outcomes(save_sums, str(tmp_path))
    wanted = outcomes[0].result
    assert outcomes[0].trace == outcomes[2].trace == ""
    for loaded in rank_pools(3).run(load_sums, str(tmp_path)):
        for key, total in loaded.items():
            torch.testing.assert_close(total, wanted[key], rtol=1e-5, atol=1e-6)


def save_sums(folder: str) -> Any:
    run = attach()
    if dist.get_rank() == 1:
        run.model.head.weight.register_hook(die)
    run.steps(3)
    pycomm.save(folder, run.reducer, **run.more).wait(20)
    communicator = run.reducer._communicator
    states = run.reducer.state_dict()["ranks"][str(communicator.rank)]
    found = {}
    for name, entry in states.items():
        total = entry["residual"].double()
        communicator.all_reduce(total)
        found[name, "residual"] = total
    return found


def load_sums(folder: str) -> Any:
    with training("adamw", "topk") as run:
        pycomm.load(folder, run.reducer, **run.more)
        return totals(run.reducer)

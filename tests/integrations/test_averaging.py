"""What integrations share: files of state beside checkpoints, options by name, libraries that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.integrations.averaging import ATTACH_OPTIONS, REGISTER_OPTIONS, Averaging, averaging_of, library
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import own_state
from tests.reducer.models import loss_of, make_model, sgd

METHOD = pycomm.TopK(0.1)


def averaging(compression: Any = METHOD, wrapped: bool = False) -> tuple[Any, torch.optim.Optimizer, Averaging]:
    model = make_model()
    optimizer = sgd(model)
    outer: Any = DistributedDataParallel(model) if wrapped else model
    options = {"compression": compression, "timeout": 30}
    made = averaging_of(outer, optimizer, is_last=1, loss_scaler=None, options=options, whose="test")
    return outer, optimizer, made


def train(outer: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(outer, dist.get_rank(), step).backward()
        optimizer.step()


def saved_state(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    outer, optimizer, made = averaging()
    train(outer, optimizer, range(3))
    made.save(folder)
    state = own_state(made.state_dict())
    made.detach()
    return state


def loaded_state(folder: str, wrapped: bool) -> dict[str, dict[str, torch.Tensor]]:
    _, _, made = averaging(wrapped=wrapped)
    assert made.load(folder)
    state = own_state(made.state_dict())
    made.detach()
    return state


def test_one_process_without_a_group_can_be_monitored() -> None:
    model = make_model()
    rows: list[Any] = []
    optimizer = sgd(model)
    made = averaging_of(model, optimizer, is_last=1, loss_scaler=None, options={}, whose="test")
    assert made.inner is None
    with pycomm.monitor(made, every=1, to=rows.append):
        loss_of(model, 0, 0).backward()
        optimizer.step()
    assert rows == [], "nothing was averaged"


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_a_request_to_stop_is_heard_at_the_same_step(wrapped: bool, compression: Any) -> None:
    outer, optimizer, found = averaging(compression, wrapped)
    for step in range(4):
        assert bool(found.stop_requested) == (step > 2)
        if dist.get_rank() == 1 and step == 2:
            found.request_stop("time is up")
        train(outer, optimizer, range(step, step + 1))
    assert (found.stop_requested.rank, found.stop_requested.reason) == (1, "time is up")
    found.detach()


@on_ranks(2)
def test_counters_without_averaging_are_those_of_averaging() -> None:
    nothing = Averaging(None).stats()
    for wrapped in (False, True):
        _, _, made = averaging(None, wrapped)
        assert set(nothing) <= set(made.stats())
        made.detach()


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_other_numbers_of_ranks(rank_pools: Pools, tmp_path: Path, wrapped: bool) -> None:
    """State comes back as it was, also into a DistributedDataParallel; of three ranks, two share the sum."""
    for size in (2, 3):
        folder = str(tmp_path / str(size))
        saved = rank_pools(size).run(saved_state, folder)
        assert len(list(Path(folder).iterdir())) == size, "a file for each rank, and nothing else"
        loaded = rank_pools(2).run(loaded_state, folder, wrapped)
        for name in saved[0]:
            before = [state[name]["residual"] for state in saved]
            after = [state[name]["residual"] for state in loaded]
            if size == 2:
                assert all(map(torch.equal, before, after))
            # Contributions to the average over three ranks, and over two.
            torch.testing.assert_close(torch.stack(after).sum(0), torch.stack(before).sum(0))
            assert torch.stack(after).any()


@on_ranks(2)
def test_files_that_are_stale_missing_or_damaged(tmp_path: Path) -> None:
    rank = dist.get_rank()
    outer, optimizer, made = averaging()
    assert not made.load(tmp_path), "nothing is there, which the log says"
    train(outer, optimizer, range(1))
    dist.barrier()
    if rank == 0:
        (tmp_path / "pycomm-2-of-3.pt").write_bytes(b"of three ranks")
        (tmp_path / "pycomm1-2-of-3.pt").write_bytes(b"of another optimizer")
    dist.barrier()
    made.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["pycomm-0-of-2.pt", "pycomm-1-of-2.pt", "pycomm1-2-of-3.pt"]
    dist.barrier()
    if rank == 1:
        (tmp_path / "pycomm-1-of-2.pt").write_bytes(b"no tensors")
    says = "is damaged" if rank == 1 else r"rank 1 could not load pycomm's state: .*is damaged"
    with pytest.raises(ValueError, match=says):
        made.load(tmp_path)
    dist.barrier()
    if rank == 1:
        (tmp_path / "pycomm-1-of-2.pt").unlink()
    dist.barrier()
    with pytest.raises(ValueError, match="state of some ranks only: pycomm-1-of-2.pt is missing"):
        made.load(tmp_path)
    dist.barrier()
    made.remove(tmp_path)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["pycomm1-2-of-3.pt"]
    made.detach()
    _, _, plain = averaging(None)
    plain.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "without compression there is nothing to keep"
    plain.detach()


@pytest.mark.timeout(60)
def test_files_that_nobody_has_saved(one_rank_group: None, tmp_path: Path) -> None:
    outer, optimizer, made = averaging()
    train(outer, optimizer, range(1))
    (tmp_path / "pycomm-0-of-99999999999.pt").touch()  # a name for which nobody looks through so many
    with pytest.raises(ValueError, match="of some ranks only: pycomm-1-of-99999999999.pt, .* is missing"):
        made.load(tmp_path)
    (tmp_path / "pycomm-0-of-1.pt").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="of some ranks only: pycomm-0-of-1.pt is missing"):
        made.load(tmp_path)
    os.mkfifo(tmp_path / "pycomm-0-of-1.partial")
    made.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pycomm-0-of-1.pt"]
    assert made.load(tmp_path)
    torch.save({"format": 3}, tmp_path / "pycomm-0-of-1.pt")
    with pytest.raises(ValueError, match=f"{tmp_path} has pycomm's state of something else: state is neither"):
        made.load(tmp_path)
    made.detach()


@on_ranks(2)
def test_folders_that_are_not_shared(tmp_path: Path) -> None:
    """Each host has its own ranks' files; where one has lost them, or has older ones, all ranks say so."""
    rank = dist.get_rank()
    folder = tmp_path / f"host{rank}"
    outer, optimizer, made = averaging()
    train(outer, optimizer, range(2))
    made.save(folder)
    own = folder / f"pycomm-{rank}-of-2.pt"
    assert list(folder.iterdir()) == [own]
    assert made.load(folder)
    if rank == 1:
        own.unlink()
    with pytest.raises(ValueError, match="has pycomm's state of 2 on rank 0, of none on rank 1: "):
        made.load(folder)
    if rank == 1:
        torch.save(made.state_dict(), folder / "pycomm-0-of-1.pt")
    with pytest.raises(ValueError, match="has pycomm's state of 2 on rank 0, of 1 on rank 1: "):
        made.load(folder)
    made.detach()


@on_ranks(2)
def test_options_by_name() -> None:
    model = make_model()
    ddp = DistributedDataParallel(make_model())

    def called(module: Any, **options: Any) -> None:
        averaging_of(module, sgd(module), is_last=1, loss_scaler=None, options=options, whose="attach")

    with pytest.raises(TypeError, match=r"attach got an argument 'compress': wanted among algorithm, average, buffers"):
        called(model, compress=METHOD)
    with pytest.raises(TypeError, match=r"attach got an argument 'process_group': wanted among"):
        called(model, process_group=None)
    with pytest.raises(TypeError, match=r"attach got an argument 'buffers': it is for models without Distributed"):
        called(ddp, buffers="average")
    assert {"algorithm", "check_replicas", "compression", "per_rank", "timeout"} == REGISTER_OPTIONS
    assert {"shard", "tuning", "check_replicas"} < ATTACH_OPTIONS
    assert "bucket_mb" not in ATTACH_OPTIONS


def test_libraries_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"x\.y requires no_such_library or nor_this_one: pip install 'pycomm-torch\[frameworks\]'"
    with pytest.raises(ImportError, match=says):
        library("no_such_library.strategies", "nor_this_one", whose="x.y")
    (tmp_path / "half_a_library.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        library("half_a_library", whose="x.y")


SAYS_WHAT_TO_INSTALL = """
import sys
import pycomm
assert not [name for name in sys.modules if name.startswith("pycomm.integrations")], "imported with the package"
for name, libraries in {
    "accelerate": ["accelerate"],
    "transformers": ["transformers"],
    "lightning": ["lightning", "pytorch_lightning", "lightning_fabric"],
}.items():
    sys.modules.update(dict.fromkeys(libraries))
    try:
        __import__(f"pycomm.integrations.{name}")
    except ImportError as error:
        assert f"pycomm.integrations.{name} requires {libraries[0]}" in str(error), error
        assert "pip install 'pycomm-torch[frameworks]'" in str(error), error
    else:
        raise AssertionError(name)
"""


def test_modules_say_what_to_install() -> None:
    subprocess.run([sys.executable, "-c", SAYS_WHAT_TO_INSTALL], check=True, timeout=60, cwd="/")


@on_ranks(2)
def test_without_state_a_rank_may_save_alone(tmp_path: Path) -> None:
    """As scripts do that call ``accelerator.save_state`` on the main process; and no rank after ``detach``."""
    for method in (None, pycomm.FP16()):
        outer, optimizer, made = averaging(method)
        assert not made.carries_state
        if dist.get_rank() == 0:
            (tmp_path / "pycomm-0-of-2.pt").write_bytes(b"stale")
            made.save(tmp_path)
        train(outer, optimizer, range(1))
        dist.barrier()
        assert not list(tmp_path.iterdir())
        made.detach()
    _, _, made = averaging()
    ended: list[str] = []
    made.on_detach.append(lambda: ended.append("once"))
    assert made.carries_state
    made.detach()
    made.detach()
    made.save(tmp_path)
    assert not made.load(tmp_path)
    assert (ended, list(tmp_path.iterdir())) == (["once"], [])

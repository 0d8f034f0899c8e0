"""Checkpoints that are read without ranks: pycomm.checkpoint.state_dicts, and `pycomm checkpoint show`."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.descriptions import size_text
from pycomm.tools.cli.main import main
from pycomm.training.checkpoint import state_dicts
from tests.checkpoint.training import Net, training
from tests.on_ranks import Pools
from tests.reducer.attaching import attached


class Tied(nn.Module):
    """With two names for a weight, in a wrapper that adds words to names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(Net(), backend="eager")
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.net(x)))


class Plain(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


def save_tied(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().sum().backward()
            optimizer.step()
            rank = torch.distributed.get_rank()
            pycomm.save(folder, reducer, step=step + 1, rank=rank).wait()
    return model.state_dict(), optimizer.state_dict()


def test_it_is_what_load_state_dict_takes(tmp_path: Path, rank_pools: Pools) -> None:
    for rank, (saved, of_optimizer) in enumerate(rank_pools(2).run(save_tied, str(tmp_path))):
        found = state_dicts(tmp_path, rank=rank)
        assert found.plain == {"step": 2, "rank": rank}
        assert "second.weight" in found.model
        model = Plain()
        model.load_state_dict(found.model)
        assert found.model["net._extra_state"] == {"calls": 2}
        for name, value in model.state_dict().items():
            assert name.endswith("_extra_state") or torch.equal(value, saved[name.replace("net.", "net._orig_mod.")])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(found.optimizer)
        torch.testing.assert_close(optimizer.state_dict(), of_optimizer, rtol=0.0, atol=0.0)
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    with pytest.raises(ValueError, match="rank is 2, wanted 0 to 1"):
        state_dicts(tmp_path, rank=2)


@pytest.fixture
def two(one_rank_group: None, tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2, which have an optimizer's option that is not saved."""
    with training("adamw", "topk") as run:
        run.optimizer.param_groups[0]["note"] = object()
        for step in (1, 2):
            run.step()
            pycomm.save(tmp_path, run.reducer, step=step, **run.more).wait()
    return tmp_path


def show(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["checkpoint", "show", str(folder)])
    return code, *capsys.readouterr()


def test_what_is_shown(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = show(two, capsys)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["body.0.weight", "float32", "[40,", "12]", "480", "model"] in lines
    assert ["body.1.running_mean", "float32", "[40]", "40", "buffers"] in lines
    file = two / "checkpoint-00000002" / "rank-0" / "shared" / "tensors"
    crc = f"{zlib.crc32(file.read_bytes()):08x}"
    assert ["rank-0/shared/tensors", f"{file.stat().st_size:,}", crc] in lines
    number = sum(p.numel() for p in Net().parameters()) * 4
    assert ["model", "all", "ranks", "8", "float32", *size_text(number).split()] in lines
    assert show(two / "checkpoint-00000001", capsys)[0] == 0
    assert "note" not in state_dicts(two).optimizer["param_groups"][0]


def test_a_damaged_one_is_named_and_skipped(
    two: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = two / "checkpoint-00000002" / "rank-0" / "own" / "tensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    code, out, err = show(two, capsys)
    assert code == 1
    assert err == (
        f"checkpoint-00000002 is damaged: rank-0/own/tensors has {len(content) - 1} bytes, wanted {len(content)}\n"
    )
    assert "checkpoint-00000001:" in out.splitlines()
    with caplog.at_level(logging.WARNING):
        assert state_dicts(two).plain["step"] == 1
    assert f"checkpoint 2 in {two} is skipped: {path} has" in caplog.text
    (two / "checkpoint-00000001" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*; .*manifest.json"):
        state_dicts(two)
    path.write_bytes(content)
    for part in two.rglob("part.json"):
        part.write_text("[" * 100_000)
    code, _, err = show(two, capsys)
    assert code == 1
    assert err.count(" is damaged: ") == 2


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(folder: Path, kind: type[Exception] = FileNotFoundError) -> str:
        code, _, err = show(folder, capsys)
        assert code == 1
        with pytest.raises(kind) as raised:
            state_dicts(folder)
        assert err == f"pycomm checkpoint show: {raised.value}\n"
        return str(raised.value).replace(str(folder), "F")

    assert says(tmp_path / "nothing") == "there is no F"
    assert says(tmp_path) == "there is no checkpoint in F"
    (tmp_path / "weights.pt").touch()
    assert says(tmp_path) == "there is no checkpoint in F, and something else than pycomm.save wrote its files"
    assert says(tmp_path / "weights.pt", NotADirectoryError) == "F is a file, wanted the folder passed to pycomm.save"
    (tmp_path / ".metadata").touch()
    assert says(tmp_path) == "there is no checkpoint in F, and torch.distributed.checkpoint wrote its files"
    (tmp_path / ".writing-1c9a05b2").mkdir()
    unfinished = "F has only an unfinished checkpoint: a save that is under way, or was cut short"
    assert says(tmp_path) == unfinished
    assert says(tmp_path / ".writing-1c9a05b2") == unfinished

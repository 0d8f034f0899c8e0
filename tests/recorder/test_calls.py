"""Calls that all ranks must make, made by one rank alone: the error names the call, its line, and the rule."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import over_tcp
from tests.reducer.models import loss_of, make_model

HERE = re.escape(__file__)

Training = tuple[pycomm.Reducer, torch.optim.Optimizer, str]

LONE: dict[str, tuple[str, Callable[[Training], Any], dict[str, Any]]] = {
    "save": ("save", lambda of: pycomm.save(of[2], of[0]), {}),
    "save in several lines": (
        "save",
        lambda of: pycomm.save(
            of[2],
            of[0],
        ),
        {"compression": pycomm.TopK(0.5)},
    ),
    "load": ("load", lambda of: pycomm.load(of[2], of[0]), {}),
    "state": ("state_dict", lambda of: of[1].state_dict(), {"shard": "optimizer"}),
    "detach": ("detach", lambda of: of[0].detach(), {"shard": "optimizer"}),
    "a norm": ("clip_grad_norm", lambda of: of[0].clip_grad_norm(1.0), {"shard": pycomm.Sharding("optimizer", "part")}),
}


@pytest.mark.behavior(
    "Starting and launching",
    "call `save` or `load` under `if rank == 0:`",
    "Error everywhere that names the line. Call them on all ranks; each file is written once.",
)
@pytest.mark.parametrize("between_hosts", [False, True], ids=["one host", "tcp"])
@pytest.mark.parametrize("name", LONE)
@on_ranks(2, fresh=True)
def test_a_call_of_one_rank_alone(name: str, between_hosts: bool, tmp_path: Path) -> None:
    called, call, options = LONE[name]
    if not between_hosts and called in ("state_dict", "detach"):
        return  # ranks of one host share what these need
    rank, model = dist.get_rank(), make_model(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    with over_tcp(between_hosts):
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=20), **options)
    text = ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 1 and rank == 0:
                call((reducer, optimizer, str(tmp_path)))
            optimizer.step()
    except (ValueError, pycomm.CommError) as error:
        text = str(error)
    if called == "detach" and rank == 0:
        return  # it has not waited for an answer
    wanted = rf"All ranks must call {called}\(\)\. Where they are: .*in {called}\(\) at {HERE}:\d+"
    assert re.search(wanted, text), text


@on_ranks(3)
def test_the_places_of_all_ranks_are_told() -> None:
    rank = dist.get_rank()
    for on_torch in (False, True):
        with over_tcp(on_torch), pycomm.Communicator(timeout=20) as c:
            for asynchronous in (False, True):
                with pytest.raises(ValueError, match="the ranks disagree: rank") as caught:  # noqa: PT012
                    if rank == 1:
                        c.broadcast(torch.ones(3), 0)
                    work: Any = c.all_reduce(torch.ones(3)) if not asynchronous else None
                    work = c.all_reduce(torch.ones(3), async_op=True) if asynchronous else None
                    work.wait()
                text = str(caught.value)
                others = (
                    rf"at {HERE}:\d+ \(`work = c.all_reduce\(" if asynchronous else rf"in all_reduce\(\) at {HERE}:"
                )
                assert re.search(rf"ranks 0, 2 {others}", text), text
                assert re.search(rf"rank 1 in broadcast\(\) at {HERE}:", text), text
                assert ("All ranks must call broadcast(). " in text) is asynchronous
            with pytest.raises(ValueError, match=r"where rank 0 called all_reduce\(2 elements of float32, op=.sum.\)$"):
                c.all_reduce(torch.ones(2 + rank))  # the same line
            c.barrier()  # it goes on


@on_ranks(2)
def test_a_call_by_a_library_is_that_of_the_script(tmp_path: Path) -> None:
    """As Accelerate's save_state; and decorators have no names of their own."""
    rank = dist.get_rank()
    file = tmp_path / "site-packages" / f"trainer{rank}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("def save_state(c, x):\n    return c.broadcast(x, 0)\n")
    spec: Any = importlib.util.spec_from_file_location("trainer", file)
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    save_state: Any = torch.compiler.disable(functools.wraps(trainer.save_state)(trainer.save_state))
    with pycomm.Communicator(timeout=20) as c:
        with pytest.raises(ValueError, match=rf"must make the same.*in save_state\(\) at {HERE}:") as caught:
            save_state(c, torch.ones(3)) if rank == 0 else c.all_reduce(torch.ones(3))
        assert "trainer" not in str(caught.value)


def save_at_the_end(folder: str) -> str | None:
    """Save on rank 0, once the other has ended its training."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=20))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    if dist.get_rank() == 1:
        reducer.detach()
        return None
    with pytest.raises(pycomm.CommError) as caught:
        pycomm.save(folder, reducer)
    return str(caught.value)


def save_before_a_barrier(folder: str) -> str | None:
    model = make_model()
    reducer = pycomm.attach(torch.optim.SGD(model.parameters(), 0.1), model, tuning=pycomm.Tuning(timeout=1))
    text = None
    if dist.get_rank() == 0:
        with pytest.raises(pycomm.CommError) as caught:
            pycomm.save(folder, reducer)
        text = str(caught.value)
    dist.barrier()
    return text


@pytest.mark.behavior(
    "Starting and launching",
    "`All ranks must call ...(), as this one does at ...`",
    "One rank alone made this call, usually under `if rank == 0:`.",
)
@pytest.mark.parametrize(
    ("run", "what"), [(save_at_the_end, "it has ended its training"), (save_before_a_barrier, "timed out waiting")]
)
def test_a_call_to_which_the_others_do_not_come(new_ranks: Pools, run: Any, what: str, tmp_path: Path) -> None:
    text = new_ranks(2).run(run, str(tmp_path))[0]
    assert what in text
    assert re.search(rf"All ranks must call save\(\), as this one does at {HERE}:\d+$", text)

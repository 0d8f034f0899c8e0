"""What goes wrong while a checkpoint is written: it is said on every rank, and the checkpoint before stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.training.checkpoint import files, saving
from pycomm.training.checkpoint.files import Summed
from pycomm.training.checkpoint.torch_files import write_tensors
from tests.checkpoint.training import Training, training
from tests.on_ranks import Pools, on_ranks


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def writes(hook: Callable[[int], None]) -> Iterator[None]:
    """Call ``hook(number of bytes so far)`` before each write of tensors."""
    original = Summed.write

    def write(self: Summed, data: Any) -> int:
        hook(self.num_bytes)
        return original(self, data)

    with patch.object(Summed, "write", write):
        yield


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("culprit", [0, 1])
@on_ranks(2)
def test_no_room(culprit: int, tmp_path: Path) -> None:
    """Told by wait(), on every rank; then training and saving go on."""
    with training("adamw", "topk") as run:
        run.step()
        pycomm.save(tmp_path, run.reducer, step=1, **run.more).wait()
        me = dist.get_rank()
        big = torch.full((1 << 20,), me)
        with file_size_limit(1 << 18 if me == culprit else resource.RLIM_INFINITY):
            saved = pycomm.save(tmp_path, run.reducer, step=2, big=big, **run.more)
            why = rf"\[Errno 27\] File too large: '{tmp_path}/.*/rank-{culprit}/.*'"
            with pytest.raises(OSError, match=why if me == culprit else rf"rank {culprit} could not save: {why}"):
                saved.wait()
        assert saved.is_completed()
        dist.barrier()
        assert names_in(tmp_path) == ["checkpoint-00000001"]
        pycomm.save(tmp_path, run.reducer, step=3, **run.more)
        assert pycomm.load(tmp_path, run.reducer, **run.more) == {"step": 3}


@on_ranks(2)
def test_the_next_save_tells_what_nobody_has_waited_for(tmp_path: Path) -> None:
    with training("adamw", "topk") as run:
        me = dist.get_rank()
        with file_size_limit(1 << 13 if me == 1 else resource.RLIM_INFINITY):
            pending = pycomm.save(tmp_path, run.reducer, big=torch.full((1 << 20,), me), **run.more)
            while not pending.is_completed():
                time.sleep(0.01)
        with pytest.raises(OSError, match="rank 1 could not save|File too large"):
            pycomm.save(tmp_path, run.reducer, **run.more)
        path = pycomm.save(tmp_path, run.reducer, **run.more).wait()
        assert path.name == "checkpoint-00000001"


@pytest.mark.behavior(
    "Checkpoints", "fill the disk", "`OSError` from `wait()` everywhere; the previous checkpoint remains."
)
@on_ranks(2)
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if dist.get_rank() == 0:
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        (tmp_path / "mounted").write_text(str(mounted))
    dist.barrier()
    if (tmp_path / "mounted").read_text() != "True":
        return  # only root can, and not in every container
    try:
        with training("adamw", "topk") as run:
            pycomm.save(disk, run.reducer, step=1, **run.more).wait()
            for _ in range(3):
                with pytest.raises(OSError, match="No space left on device|could not"):
                    pycomm.save(disk, run.reducer, big=torch.rand(1 << 17), **run.more).wait()
            assert pycomm.load(disk, run.reducer, **run.more) == {"step": 1}
            pycomm.save(disk, run.reducer, step=2, **run.more).wait()
            assert pycomm.load(disk, run.reducer, **run.more) == {"step": 2}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["umount", str(disk)], check=True)


@on_ranks(2)
def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with training() as run:
        with pytest.raises(OSError, match="Not a directory|rank 0 could not make a checkpoint"):
            pycomm.save(tmp_path / "file" / "checkpoints", run.reducer)
        pycomm.save(tmp_path / "new" / "checkpoints", run.reducer).wait()


@pytest.mark.behavior(
    "Checkpoints",
    "`..., created by rank 0, is not there: path must be the same on all ranks`",
    "Use a file system that all hosts share.",
)
@on_ranks(2)
def test_another_directory_on_each_rank(tmp_path: Path) -> None:
    with training() as run, patch("pycomm.training.checkpoint.saving._PATIENCE", 0.2):
        with pytest.raises(OSError, match="path must be the same on all ranks"):
            pycomm.save(tmp_path / str(dist.get_rank()), run.reducer)


@on_ranks(2)
def test_saved_while_the_one_before_is_written(tmp_path: Path) -> None:
    slow = threading.Event()
    with training("adamw", "topk") as run:
        with writes(lambda _: None if slow.is_set() else time.sleep(0.02)):
            first = pycomm.save(tmp_path, run.reducer, step=1, **run.more)
            with pytest.raises(TimeoutError, match="not written within 0.01 s"):
                first.wait(0.01)
            run.step()  # meanwhile
            assert not first.is_completed()
            threading.Timer(0.3, slow.set).start()
            second = pycomm.save(tmp_path, run.reducer, step=2, **run.more)
            assert first.is_completed()
            second.wait(30)
        assert pycomm.load(tmp_path, run.reducer, **run.more) == {"step": 2}


def die_while_writing(folder: str, culprit: int) -> list[str]:
    run = Training("adamw", "topk")
    run.step()
    pycomm.save(folder, run.reducer, step=1, **run.more).wait()

    def hook(num_bytes: int) -> None:
        if dist.get_rank() == culprit and num_bytes > 1000:
            os.kill(os.getpid(), signal.SIGKILL)

    with writes(hook):
        pending = pycomm.save(folder, run.reducer, step=2, **run.more)
        with pytest.raises(pycomm.CommError, match=f"rank {culprit} died") as caught:
            pending.wait(20)
    assert caught.value.peer == culprit
    return names_in(Path(folder))


def load_step(folder: str) -> int:
    with training("adamw", "topk") as run:
        step: int = pycomm.load(folder, run.reducer, **run.more)["step"]
        pycomm.save(folder, run.reducer, step=3, **run.more).wait()
        return step


@pytest.mark.behavior(
    "Checkpoints", "kill a rank while it writes", "`CommError` from `wait()`; the previous checkpoint remains."
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_while_writing(culprit: int, new_ranks: Pools, rank_pools: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(2).outcomes(die_while_writing, str(tmp_path), culprit)
    assert isinstance(outcomes[culprit].error, ChildProcessError)
    assert outcomes[1 - culprit].error is None, outcomes[1 - culprit].trace
    assert [name for name in outcomes[1 - culprit].result if name[0] != "."] == ["checkpoint-00000001"]
    assert rank_pools(2).run(load_step, str(tmp_path)) == [1, 1]
    assert names_in(tmp_path) == ["checkpoint-00000001", "checkpoint-00000003"], "what was unfinished is removed"


def die_before_publishing(folder: str) -> None:
    run = Training("adamw", "topk")
    pycomm.save(folder, run.reducer, step=1, **run.more).wait()
    with patch.object(files, "write_sealed", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        with pytest.raises(pycomm.CommError, match="rank 0 died"):
            pycomm.save(folder, run.reducer, step=2, **run.more).wait(20)


def test_killed_when_all_parts_are_there(new_ranks: Pools, rank_pools: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(2).outcomes(die_before_publishing, str(tmp_path))
    assert outcomes[1].error is None, outcomes[1].trace
    assert rank_pools(2).run(load_step, str(tmp_path)) == [1, 1]


@pytest.mark.behavior("Checkpoints", "`... has not written its part within ... s`", "That rank's disk has stopped.")
@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_never_writes(tmp_path: Path) -> None:
    """It lives, but hangs: given up after the timeout."""
    release = threading.Event()
    original = write_tensors

    def hang(*args: Any) -> Any:
        release.wait(30)
        return original(*args)

    write = patch.object(saving, "write_tensors", hang if dist.get_rank() == 1 else original)
    with training("adamw", timeout=2) as run, patch.object(saving, "_PATIENCE_FOR_OTHERS", 0.1), write:
        pending = pycomm.save(tmp_path, run.reducer)
        if dist.get_rank() == 0:
            with pytest.raises(pycomm.CommError, match="rank 1 has not written its part within 2 s"):
                pending.wait(20)
        dist.barrier()
        release.set()
        if dist.get_rank() == 1:
            with pytest.raises((pycomm.CommError, OSError)):
                pending.wait(20)
        dist.barrier()
        pycomm.save(tmp_path, run.reducer).wait()


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
@on_ranks(2)
def test_a_rank_that_writes_slowly_is_waited_for(slow: int, tmp_path: Path) -> None:
    start = time.monotonic()
    with training("adamw", timeout=1) as run:
        with writes(lambda _: time.sleep(0.01 if dist.get_rank() == slow else 0.0)):
            pending = pycomm.save(tmp_path, run.reducer, big=[torch.ones(1000) * i for i in range(8)])
            pending.wait(60)
    assert time.monotonic() - start > 1.5


def test_a_parameter_that_nobody_has_used(one_rank_group: None, tmp_path: Path) -> None:
    with training() as run:
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(RuntimeError, match="a parameter was added to the optimizer, and no backward"):
            pycomm.save(tmp_path, run.reducer)


AT_EXIT = """
import time, torch, torch.distributed as dist, pycomm
from torch._C._distributed_c10d import HashStore
from pycomm.training.checkpoint.files import Summed
write = Summed.write
Summed.write = lambda self, data: (time.sleep(0.01), write(self, data))[1]
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 3)
reducer = pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
saved = pycomm.save("PATH", reducer)
assert not saved.is_completed()
"""


@pytest.mark.slow
def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    script = AT_EXIT.replace("PATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path) == ["checkpoint-00000001"]


@pytest.mark.behavior(
    "Checkpoints",
    "`checkpoint ... in ... was not saved: ...`",
    "Training continues; the next `save` or `wait()` raises it.",
)
def test_the_end_of_the_process_says_what_failed(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    script = AT_EXIT.replace("PATH", str(tmp_path)).replace("3, 3", "99, 99").replace("saved =", limit + "saved =")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert "was not saved: [Errno 27] File too large" in done.stderr
    assert names_in(tmp_path) == []


def test_a_forked_child_is_not_waited_for(one_rank_group: None, tmp_path: Path) -> None:
    with training() as run:
        with writes(lambda _: time.sleep(0.003)):
            pending = pycomm.save(tmp_path, run.reducer)
            pid = os.fork()
            if pid == 0:
                try:
                    pending.wait()
                except RuntimeError as error:
                    os._exit(0 if "forked" in str(error) else 1)
                os._exit(2)
            assert os.waitpid(pid, 0)[1] == 0
            pending.wait()


@on_ranks(2)
def test_no_file_for_errors_is_left(tmp_path: Path) -> None:
    """Rank 0 publishes only when each rank has removed the file that it would have told of an error with."""
    original = files.Reserve.remove

    def remove(self: files.Reserve) -> None:
        time.sleep(0.3 * dist.get_rank())
        original(self)

    with training("adamw", "topk") as run, patch.object(files.Reserve, "remove", remove):
        saved = pycomm.save(tmp_path, run.reducer, **run.more).wait()
    dist.barrier()
    assert not list(saved.rglob("writing"))

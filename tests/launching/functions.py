"""Functions that tests run on ranks."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.tools.launching import progress

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GREETING")


def look_around(number: int, *, suffix: str = "") -> dict[str, Any]:
    """Use the group, write, and return what a rank finds."""
    rank = dist.get_rank()
    total = torch.tensor([float(rank + number)])
    dist.all_reduce(total)
    print(f"first of {rank}{suffix}\nsecond of {rank}")
    print("mistake", file=sys.stderr)
    try:
        pycomm.launch(print, 1)
    except RuntimeError as error:
        nested = str(error)
    return {
        "total": total,
        "environment": [os.environ.get(name) for name in VARIABLES],
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "nested": nested,
        "parent": os.getppid(),
    }


def sum_of_ranks() -> tuple[float, int]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads()


def threads_of_rank() -> tuple[str, int]:
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def joins_by_itself() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def writes_much() -> int:
    """Write more than a pipe holds, what is no UTF-8, by C code that keeps it, and a last line without an end."""
    for number in range(2000):
        print(f"line {number} {'x' * 50}")
    sys.stdout.flush()
    os.write(1, b"\xff is no text\n")
    print("10 %\r50 %\r100 %")
    ctypes.CDLL(None).printf(b"from C\n")
    print("no end", end="")
    return os.getpid()


def leaves_a_child() -> int:
    """Start a process that keeps the rank's standard output open for longer than the rank lives."""
    return subprocess.Popen(["sleep", "60"]).pid


class LockedError(Exception):
    """Error that does not pickle."""

    def __init__(self) -> None:
        super().__init__("this one is locked")
        self.lock = threading.Lock()


class PickyError(Exception):
    """Error that pickles, and cannot be made again of that."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank 1 is to blame")
    dist.barrier()


def raises(kind: str) -> None:
    print("before", file=sys.stderr)
    if kind == "locked":
        raise LockedError
    raise PickyError("both", " words")


def rank_0_is_killed() -> None:
    if dist.get_rank() == 0:
        print("about to go", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def ends(how: str) -> Any:
    if how == "quietly":
        os._exit(0)
    if how == "by a lock":
        return threading.Lock()
    if how == "by a generator":
        return (number for number in range(3))
    sys.exit({"well": 0, "without a word": None, "badly": 3}[how])


def sleeps(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


def makes_progress() -> None:
    for step in range(1, 101):
        progress(step, 100, loss=torch.tensor(1.0 / step))


_kept: list[Any] = []  # until the process ends


def leaves_work(folder: str) -> None:
    """Leave to the end of the process what programs do: a thread, an idle executor, an exit handler, an open file."""
    own = Path(folder) / str(dist.get_rank())
    own.mkdir()

    def writes_at_the_end() -> None:
        threading.main_thread().join()
        (own / "thread").write_text("done")

    def averages() -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        (own / "handler").write_text(f"{total.item():g} ranks")

    threading.Thread(target=writes_at_the_end).start()
    executor = ThreadPoolExecutor(1)
    executor.submit(own.exists).result()
    atexit.register(averages)
    text = open(own / "file", "w")  # noqa: SIM115
    text.write("written")
    _kept.extend([executor, text])


def leaves_an_endless_thread() -> None:
    if dist.get_rank() == 1:
        threading.Thread(target=threading.Event().wait).start()


def put_another_encoding_over_stdout() -> int:
    """Leave an object that stands for a file, and has none any more."""
    out: Any = sys.stdout
    sys.stdout = io.TextIOWrapper(out.detach(), encoding="utf-8", line_buffering=True)
    return dist.get_rank()

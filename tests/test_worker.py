"""Threads that run jobs while the process ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
import torch.distributed as dist
from pycomm.worker import Worker

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask():  # a store that is slow to answer: mostly inside torch, and out of it again and again
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        store.check(["a"])
    print("asked", flush=True)

worker = Worker("test")
assert not worker.submit(ask).ends_within(0.2)
worker.stop(patience=0.0)
"""


def test_a_process_ends_well_while_a_store_is_slow() -> None:
    """A thread that came out of torch's code after the interpreter's end would abort the process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "asked\n", "")

"""Freed memory: after attach, and in groups over "pycomm", malloc keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm.collectives.freed_memory import why_not_kept

if why_not_kept() not in (None, "PYCOMM_KEEP_FREED_MEMORY=0"):
    pytest.skip(f"malloc is not changed here: {why_not_kept()}", allow_module_level=True)

_NUM_PAGES = 16 << 10  # of 4 KiB: 64 MiB, which malloc maps anew each time by default
_PROGRAM = """
import resource, sys, torch, torch.distributed as dist, pycomm
store = dist.FileStore("store", 1)
dist.init_process_group(sys.argv[1], store=store, rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
if sys.argv[1] == "gloo":
    pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
dist.destroy_process_group()
"""


def _faults(backend: str, folder: Path, **environment: str) -> int:
    variables = {name: text for name, text in os.environ.items() if name != "PYCOMM_KEEP_FREED_MEMORY"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, backend],
        env={**variables, **environment},
        cwd=folder,  # not the checkout, whose pycomm has nothing compiled
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.parametrize("backend", ["gloo", "pycomm"])
def test_ranks_keep_freed_memory(backend: str, tmp_path: Path) -> None:
    assert _faults(backend, tmp_path) < _NUM_PAGES // 10


@pytest.mark.parametrize(
    ("name", "value"), [("PYCOMM_KEEP_FREED_MEMORY", "0"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_the_environment_decides(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        _faults("gloo", tmp_path, **{name: value}) >= _NUM_PAGES // 600
    )  # pages of 2 MiB, where the system gives such
    monkeypatch.setenv(name, value)
    reason = why_not_kept()
    assert reason is not None
    assert name in reason

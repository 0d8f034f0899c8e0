"""Horovod's own tests of PyTorch on pycomm.horovod, with two ranks.

    python -m tests.horovod.suite FILE [--ranks 2] [pytest's options, such as -k NAME]

FILE is test/parallel/test_torch.py of Horovod at v0.28.1; `nox -s horovod_suite` fetches it. The ranks are started as
horovodrun does, and run the file by pytest. What is different from a run on Horovod, and why:

- `horovod.torch` is pycomm.horovod, by `install()`.
- The file imports helpers from Horovod's `common`, three of which it needs: they are here.
- Muon, which came to torch after the file was written, does not take the biases of the file's models: the file, which
  goes through all of torch's optimizers, does not see it.
- test_timeline_api, which Horovod leaves out as it fails now and then on Horovod, is run.

Fails unless on every rank as many tests pass as are said to, and only tests that want GPUs are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import free_port

PASSED = 106
LEFT_OUT = 9
"""Tests that want GPUs, or are switched off by the file itself for want of MPI or of a machine."""
_LIMIT = 1200.0
_AS_RANK = "--as-rank"


def main() -> int:
    if sys.argv[1:2] == [_AS_RANK]:
        return _run_as_rank(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="tests.horovod.suite", description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    arguments, options = parser.parse_known_args()
    texts = _run_ranks(arguments.file.resolve(), arguments.ranks, options)
    counts = [_counts(text) for text in texts]
    print(texts[0])
    for rank, (passed, skipped, failed) in enumerate(counts):
        print(f"rank {rank}: {passed} passed, {skipped} left out, {failed} failed")
    wanted = [(PASSED, LEFT_OUT, 0)] * arguments.ranks
    chosen = "-k" in options
    return 0 if (chosen and not any(failed for *_, failed in counts)) or counts == wanted else 1


def _run_ranks(file: Path, size: int, options: list[str]) -> list[str]:
    """Return what pytest prints on each rank."""
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            variables = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
            environment = os.environ | {f"HOROVOD_{name}": str(value) for name, value in variables.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, "-m", "tests.horovod.suite", _AS_RANK, str(file), folder, *options]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            return [process.communicate(timeout=_LIMIT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()


def _counts(text: str) -> tuple[int, int, int]:
    """Return how many tests have passed, were left out, and have failed or could not be run."""
    last = text.strip().rsplit("\n", 1)[-1]
    numbers = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
    failed = numbers.get("failed", 0) + numbers.get("error", 0)
    return numbers.get("passed", 0), numbers.get("skipped", 0), failed if numbers else 1


# In a rank.


class _Timeline:
    """Plugin of pytest by which test_timeline_api is run."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            if item.name == "test_timeline_api":
                item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


def _run_as_rank(arguments: list[str]) -> int:
    import pytest
    import torch

    import pycomm.horovod

    file, folder, *options = arguments
    pycomm.horovod.install()
    sys.modules["common"] = _common()
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "left.out"
    torch.set_num_threads(1)
    own = ["-q", "-rfE", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "--timeout", "120"]
    own += ["-W", "ignore::DeprecationWarning", "-W", "ignore::UserWarning:torch"]
    return int(pytest.main([*own, file, *options], plugins=[_Timeline()]))


def _common() -> types.ModuleType:
    """Return what the file imports from Horovod's test/utils/common.py."""
    made: Any = types.ModuleType("common")
    made.mpi_env_rank_and_size = lambda: (0, 1)  # the file asks horovodrun's variables first
    made.skip_or_fail_gpu_test = _skip
    made.temppath = _path
    return made


def _skip(test: unittest.TestCase, message: str) -> None:
    test.skipTest(message)


@contextlib.contextmanager
def _path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")


if __name__ == "__main__":
    sys.exit(main())

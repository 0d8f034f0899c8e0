"""Lines of the logger ``pycomm``: they name the rank that writes them, whatever handler is used."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch.distributed as dist

from pycomm.logs import prefix
from tests.on_ranks import on_ranks

LOG = logging.getLogger("pycomm")


@on_ranks(2)
def test_lines_begin_with_the_rank() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        LOG.warning("%d %% of %s", 3, "it")
    finally:
        LOG.removeHandler(handler)
    assert said == [f"[pycomm rank {dist.get_rank()}] 3 % of it"]


def test_a_process_without_a_group_is_known_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, begins in (("3", "[pycomm rank 3]"), ("x", "[pycomm]")):
        monkeypatch.setenv("RANK", rank)
        assert prefix() == begins
    monkeypatch.delenv("RANK")
    assert prefix() == "[pycomm]"


def test_a_line_is_printed_once_where_nobody_has_set_up_logging() -> None:
    for setup in ("pass", "logging.basicConfig(format='%(message)s')"):
        script = f"import logging, pycomm; {setup}; logging.getLogger('pycomm').warning('hello')"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True, cwd="/"
        )
        assert done.stderr == "[pycomm] hello\n"

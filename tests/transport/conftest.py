"""Fixtures of the tests of NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport.nccl_ranks import Fake, build_fake, groups, stall


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("nccl"), "libfake.so")


@pytest.fixture
def fake(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """The NCCL that this process uses."""
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(fake_library))
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    stand_in = Fake(fake_library)
    stand_in.reset()
    yield stand_in
    stall(False)
    misuses = stand_in.misuses()
    stand_in.reset()
    assert misuses == 0, "a communicator was used after its end, or while an operation was not under way"


@pytest.fixture
def alone(fake: Fake) -> Iterator[Any]:
    """A group of one rank."""
    (group,) = groups(1)
    yield group
    group.close("the test is over")

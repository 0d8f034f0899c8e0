"""Fixtures of the tests on the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transport.nccl_ranks import build_fake


@pytest.fixture(scope="session")
def fake_nccl_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("nccl"), "libfake.so")


@pytest.fixture
def fake_nccl(fake_nccl_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NCCL, for this process."""
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(fake_nccl_library))

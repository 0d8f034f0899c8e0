"""What the tests on GPUs use, where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.kernels import gpus
from tests.kernels.gpus import waits_refused, why_skipped


class SyncDebugMode:
    """torch's, which warns the first time that it is set, after it has been."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modes: list[int | str] = [1]
        self.warned = False
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.modes[-1])
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: int | str) -> None:
        self.modes.append(mode)
        if not self.warned:
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)


def test_waits_are_refused_and_the_mode_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although warnings are errors here, and whatever happens inside."""
    torch_has = SyncDebugMode(monkeypatch)
    with waits_refused():
        assert torch_has.modes == [1, "error"]
    assert torch_has.warned
    assert torch_has.modes == [1, "error", 1]
    with pytest.raises(ZeroDivisionError), waits_refused():
        raise ZeroDivisionError
    assert torch_has.modes == [1, "error", 1, "error", 1]


@pytest.mark.parametrize(
    ("emulated", "cuda", "skipped"),
    [
        (False, False, {"requires_gpu", "requires_cuda"}),
        (True, False, {"requires_cuda"}),
        (True, True, {"requires_cuda"}),
        (False, True, set()),
    ],
)
def test_who_is_skipped(emulated: bool, cuda: bool, skipped: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "EMULATED", emulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    found = {name for name in ("requires_gpu", "requires_cuda", "slow") if why_skipped({name}) is not None}
    assert found == skipped

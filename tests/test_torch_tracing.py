"""Private names of torch for tracing, compiled code and TorchScript: each does what pycomm needs of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pycomm import torch_internals


def test_profiling_and_classes_of_tensors() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise AssertionError

    loud = torch.ones(2).as_subclass(Loud)
    with torch_internals.without_torch_function():
        assert loud.numel() == 2
    with pytest.raises(AssertionError):
        loud.numel()
    with torch.profiler.profile() as prof, torch_internals.profiled_range("a range"):
        assert torch_internals.is_profiling()
    assert "a range" in {event.key for event in prof.key_averages()}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_leave_hooks_out() -> None:
    class Hook:
        def __call__(self, *_: Any) -> None:
            recording.append(torch_internals.is_recording())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    recording: list[bool] = []
    torch_internals.leave_out_of_scripts(Hook)
    model, x, hook = Outer(), torch.ones(1, 2), Hook()
    model.inner.register_forward_hook(hook)
    model.inner.register_forward_pre_hook(hook)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), model(x))
    assert recording == [False, False]
    for record in (torch.fx.symbolic_trace, lambda traced: torch.jit.trace(traced, x)):
        del recording[:]
        record(model)
        assert set(recording[:2]) == {True}
    for kept in (model.inner._forward_hooks, model.inner._forward_pre_hooks):
        assert list(kept.values()) == [hook]

"""Private names of torch for tracing, compiled code and TorchScript: each does what pycomm needs of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycomm import torch_internals


def test_compiled_code_and_classes_of_tensors(tmp_path: Path) -> None:
    code = (
        "import torch; from pycomm.torch_internals import has_compiled as has; "  # torch_internals.has_compiled
        "f = torch.compile(lambda x: x + 1, backend='eager'); assert not has(); f(torch.ones(2)); assert has()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)

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


def test_graphs_are_prepared(tmp_path: Path) -> None:
    code = (
        "import torch; from pycomm.torch_internals import prepare_graphs; said = []; "  # torch_internals.prepare_graphs
        "kind = type('Graph', (), dict(capture_begin=lambda self, pool: said.append(pool), "
        "replay=lambda self: said.append('launched'))); torch.cuda.CUDAGraph = kind; "
        "note = lambda: said.append('prepared'); prepare_graphs(note); prepare_graphs(note); "
        "kind().capture_begin(pool=7); kind().replay(); "
        "assert said == ['prepared', 7, 'prepared', 'launched'], said"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)


def test_transforms_are_prepared(tmp_path: Path) -> None:
    code = (
        "import torch; from pycomm.torch_internals import prepare_transforms; "  # torch_internals.prepare_transforms
        "said = []; "
        "prepare_transforms(said.append); prepare_transforms(said.append); x = torch.ones(2); "
        "torch.func.grad(lambda x: x.sum())(x); torch.func.functionalize(lambda x: x + 1)(x); "
        "torch.func.vjp(lambda x: x + 1, x); assert len(said) == 3 and all(each is x for each in said), said"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)


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
    seen: list[nn.Module] = []
    torch_internals.leave_out_of_scripts(Hook)
    torch_internals.prepare_scripts(seen.append)
    model, x, hook = Outer(), torch.ones(1, 2), Hook()
    model.inner.register_forward_hook(hook)
    model.inner.register_forward_pre_hook(hook)
    scripted = torch.jit.script(model)
    assert seen[:3] == [model, model.inner, model.inner[0]]
    assert torch_internals.has_scripted()
    assert torch.equal(scripted(x), model(x))
    assert recording == [False, False]
    for record in (torch.fx.symbolic_trace, lambda traced: torch.jit.trace(traced, x)):
        del recording[:]
        record(model)
        assert set(recording[:2]) == {True}
    for kept in (model.inner._forward_hooks, model.inner._forward_pre_hooks):
        assert list(kept.values()) == [hook]

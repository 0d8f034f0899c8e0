"""Parameters of awkward shapes, gradients that are a function of the step, and how near two runs are."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

Params = list[nn.Parameter]
Make = Callable[[Params], torch.optim.Optimizer]


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> Params:
    """A matrix, a vector, a convolution in channels_last, one number, nothing, and one that is frozen."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(17, 9), (33,), (4, 3, 3, 5), (), (0, 3), (6,)]
    # Rounded to bfloat16: what every dtype can start from.
    params = [nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(dtype)) for s in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    params[5].requires_grad_(False)
    return params


def give_gradients(params: Sequence[torch.Tensor], step: int, dtype: torch.dtype = torch.float32) -> None:
    """The same for parameters of all dtypes; rounded to ``dtype`` first. Now and then one has none."""
    for i, param in enumerate(params):
        param.grad = None
        if not param.requires_grad or (step + i) % 5 == 3:
            continue
        if (step + i) % 6 == 4:  # as from sum(): one number for all elements
            param.grad = torch.full((), 0.125 * i - 0.25, dtype=param.dtype).expand(param.shape)
        else:
            param.grad = _noise(step, i, param.shape).to(dtype).to(param.dtype, copy=True)


def small_parameters(seed: int = 0) -> Params:
    """Contiguous ones of many shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(5, 3), (7,), (2, 3, 3, 2), (), (1,), (4, 1, 1, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def fresh_gradients(params: Sequence[torch.Tensor], step: int) -> None:
    """A gradient for each, laid out like it, in memory of its own."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@functools.cache
def _noise(step: int, i: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + i))


def take_steps(optimizer: torch.optim.Optimizer, steps: Iterable[int], dtype: torch.dtype = torch.float32) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_gradients(params, step, dtype)
        optimizer.step()


def assert_near(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    """Compare each parameter in its norm."""
    for i, error in enumerate(errors(actual, wanted)):
        assert error <= tolerance, f"parameter {i} of shape {list(wanted[i].shape)} is off by {error:.3g}"


def errors(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[float]:
    def error(a: torch.Tensor, w: torch.Tensor) -> float:
        return float((a - w).norm()) / max(float(w.norm()), 1e-300)

    return [error(a.detach().double(), w.detach().double()) for a, w in zip(actual, wanted, strict=True)]


def assert_equal(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for a, w in zip(actual, wanted, strict=True):
        assert a.dtype == w.dtype
        assert torch.equal(a, w)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` after a round trip through a file, as a checkpoint makes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


def snapshot(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def look_of(state_dict: dict[str, Any]) -> Any:
    """Keys in order, types, dtypes and shapes; hyperparameters themselves."""

    def look(value: Any) -> Any:
        return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)

    state = {i: [(key, look(value)) for key, value in entry.items()] for i, entry in state_dict["state"].items()}
    return state, copy.deepcopy(state_dict["param_groups"])

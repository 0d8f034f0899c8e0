"""Models of which two ranks of a mesh hold parts, and what one process makes of the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import pycomm
from tests.reducer.attaching import attached

BATCH, TOKENS, WIDTH = 3, 4, 6


class Block(nn.Module):
    """A norm, two layers to split, and a head that stays whole."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up, self.down = nn.Linear(WIDTH, 10, dtype=dtype), nn.Linear(10, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "layers": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    # Each rank sees a part of the tokens: gradients of what all ranks have come as sums still to be made.
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    },
}


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def split_block(mesh: DeviceMesh, plan: str = "layers", dtype: torch.dtype = torch.float64) -> Any:
    model = Block(dtype)
    parallelize_module(model, mesh["tp"], PLANS[plan]())
    if plan == "sequence":
        size, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
        model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(size, 1)[rank],))
    return model


def tokens(number: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The data of replica ``number``."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    x = tokens(number, step, next(model.parameters()).dtype)
    return (model(x) ** 2).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # collective
    return found.detach().clone()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        off = (found[name] - tensor).abs().max()
        assert torch.allclose(found[name], tensor, rtol=tolerance, atol=tolerance), f"{name} is off by {off:.3g}"


def gradients_alone(model: nn.Module, replicas: int, step: int) -> None:
    """Leave in ``.grad`` of a whole model what the replicas' averages have to be."""
    model.zero_grad()
    sum(loss_of(model, number, step) for number in range(replicas)).div(replicas).backward()  # type: ignore[union-attr]


@contextmanager
def attached_block(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    dp: int = 2,
    tp: int = 2,
    plan: str = "layers",
    **options: Any,
) -> Iterator[tuple[Any, torch.optim.Optimizer, pycomm.Reducer, DeviceMesh]]:
    mesh = mesh_of(dp, tp)
    model = split_block(mesh, plan)
    optimizer = make_optimizer(model.parameters())
    with attached(optimizer, model, process_group=mesh["dp"], **options) as reducer:
        yield model, optimizer, reducer, mesh


def replica(mesh: DeviceMesh) -> int:
    return int(mesh["dp"].get_local_rank())


def size() -> int:
    return dist.get_world_size()

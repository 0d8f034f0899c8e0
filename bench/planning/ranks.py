"""WorkerGroup of ``bench.planning``: a model in one layout, whose steps are timed and whose memory is counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import pycomm
from bench.harness.ranks import join_group
from bench.planning.models import CASES, Case
from bench.planning.timing import time_layers
from bench.training.ranks import _own_bytes
from pycomm import torch_internals
from pycomm.collectives.calibration import calibrate
from pycomm.collectives.communicator import Communicator
from pycomm.parallel.cut import cut
from pycomm.parallel.mesh import mesh as make_mesh
from pycomm.parallel.pipeline import Pipeline
from pycomm.parallel.split import split

Layout = dict[str, Any]
"""What a plan says: mesh, split, stages, microbatches."""


class Trained:
    """Model in a layout, its optimizer, and what a step is."""

    def __init__(self, case: Case, layout: Layout, tiny: bool) -> None:
        torch.manual_seed(0)
        self._case, self._layout, self._tiny = case, layout, tiny
        self.mesh = make_mesh(**layout["mesh"])
        names = self.mesh.mesh_dim_names or ()
        model: nn.Module = case.make(tiny)
        if "tp" in names:
            split(model, self.mesh, layout["split"])
        self._pipeline: Pipeline | None = None
        if "pp" in names:
            stages = cut(model, layout["stages"])
            self._pipeline = Pipeline(stages, self.mesh, microbatches=layout["microbatches"], loss=case.loss)
            ((_, model),) = self._pipeline.stages.items()
        self.module = model
        parts = [p for p in model.parameters() if isinstance(p, DTensor)]
        others = [p for p in model.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": each} for each in (parts, others) if each]  # torch steps no group of both kinds at once
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self._reducer = None
        if "dp" in names:
            self._reducer = pycomm.attach(self.optimizer, model, process_group=self.mesh["dp"].get_group())
        own = case.samples // layout["mesh"].get("dp", 1)
        self._inputs, self._target = case.batch(own, tiny), case.target(own, tiny)

    def passes(self) -> None:
        """Compute the gradients."""
        self.optimizer.zero_grad()
        if self._pipeline is None:
            self._case.loss(self.module(self._inputs), self._target).backward()  # type: ignore[no-untyped-call]
        else:
            self._pipeline.step(self._inputs, target=self._target)

    def step(self) -> None:
        self.passes()
        self.optimizer.step()

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.detach()


class PlanRank:
    """Rank that describes its network and layers, and trains in any layout."""

    def __init__(self, port: int) -> None:
        self.rank, _ = join_group(port)
        group = dist.group.WORLD
        assert group is not None
        store, size = torch_internals.PrefixStore("planning", torch_internals.store_of(group)), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("pycomm", store=store, rank=self.rank, world_size=size)
        self._trained: dict[str, Trained] = {}

    def calibrate(self) -> str:
        """Return the network of all ranks, as JSON."""
        with Communicator() as communicator:
            return calibrate(communicator).to_json()

    def layers(self, name: str, names: Sequence[str], samples: int) -> list[tuple[float, float]]:
        """Return seconds of each layer, forward and backward, while all ranks do the same."""
        case = CASES[name]
        torch.manual_seed(0)
        model, target = case.make(False), case.target(samples, False)
        dist.barrier()
        return time_layers(model, (case.batch(samples, False),), names, lambda output: case.loss(output, target))

    def update(self, name: str) -> float:
        """Return the bytes per second at which AdamW steps the whole model, while all ranks do: 7 passes."""
        model = CASES[name].make(False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        dist.barrier()
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - start)
        return 7 * sum(p.nbytes for p in model.parameters()) / sorted(taken)[2]

    def prepare(self, key: str, name: str, layout: Layout) -> None:
        """Make the model of a layout and train two steps."""
        self._trained[key] = Trained(CASES[name], layout, tiny=False)
        for _ in range(2):
            self._trained[key].step()

    def turn(self, key: str, steps: int) -> list[float]:
        """Return the seconds of each of ``steps`` steps."""
        trained = self._trained[key]
        trained.step()
        taken = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            trained.step()
            taken.append(time.perf_counter() - start)
        return taken

    def drop(self, key: str) -> None:
        """Forget the model of a layout."""
        self._trained.pop(key).close()

    def memory(self, name: str, layout: Layout) -> int:
        """Return the bytes that training takes at the most, beyond what it takes for a tiny model."""
        tiny = Trained(CASES[name], layout, tiny=True)
        for _ in range(2):
            tiny.step()
        before = _own_bytes()
        trained = Trained(CASES[name], layout, tiny=False)
        trained.step()
        most = _Most(trained.module)
        trained.step()
        most.close()
        found = most.bytes - before
        trained.close()
        tiny.close()
        return found

    def close(self) -> None:
        dist.destroy_process_group()


class _Most:
    """The most memory at any moment when a layer begins or ends its forward or backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes = 0
        self._hooks = [layer.register_forward_hook(self._after) for layer in module.children()]

    def _after(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self._look()
        if output.requires_grad:
            output.register_hook(self._look)  # type: ignore[no-untyped-call]

    def _look(self, *_: Any) -> None:
        self.bytes = max(self.bytes, _own_bytes())

    def close(self) -> None:
        self._look()
        for hook in self._hooks:
            hook.remove()

"""One run on one rank: a model, its optimizer, and one way to average its gradients."""

from __future__ import annotations

import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.compression import Compression
from pycomm.tools.cli.demo.model import loss_of
from pycomm.tools.cli.demo.settings import MOMENTUM, DemoMethod
from pycomm.tools.launching import PATIENCE

_ADAM_RATE, _SGD_RATE = 1e-3, 0.01
_RAMP_STEPS = 10


def make_optimizer(model: nn.Module, momentum: float | None) -> torch.optim.Optimizer:
    """Return AdamW, or SGD with ``momentum``."""
    if momentum is None:
        return torch.optim.AdamW(model.parameters(), lr=_ADAM_RATE, betas=(0.9, 0.99), fused=True)
    return torch.optim.SGD(model.parameters(), lr=_SGD_RATE, momentum=momentum, fused=True)


def compression_of(method: DemoMethod) -> Compression:
    """Return pycomm's equivalent of the method's compression."""
    if method.dgc is not None:
        return pycomm.DGC(method.dgc, momentum=MOMENTUM)
    return pycomm.FP16() if method.fp16_hook else pycomm.NoCompression()


def _ramp(step: int) -> float:
    return min(1.0, (step + 1) / _RAMP_STEPS)


class Trainee:
    """Trains ``model`` by ``method``, with SGD if ``sgd``, else with AdamW."""

    def __init__(self, model: nn.Module, method: DemoMethod, sgd: bool) -> None:
        self.model, self._forward = model, model
        compression = compression_of(method)
        momentum = 0.0 if isinstance(compression, pycomm.DGC) else MOMENTUM  # DGC applies momentum itself
        self._optimizer = make_optimizer(model, momentum if sgd else None)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, _ramp)
        self._reducer: pycomm.Reducer | None = None
        if method.ddp:
            # DDP at its best: its default copies every gradient once more.
            self._forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if method.fp16_hook:
                self._forward.register_comm_hook(None, fp16_compress_hook)
        else:
            self._reducer = pycomm.attach(
                self._optimizer,
                model,
                compression=compression,
                shard=method.shard,
                tuning=pycomm.Tuning(timeout=PATIENCE),
            )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Do an ordinary training step; return its seconds and its loss."""
        start = time.perf_counter()
        loss = loss_of(self._forward(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start, loss.item()

    def close(self) -> None:
        """Stop averaging."""
        if self._reducer is not None:
            self._reducer.detach()
        self._forward, self._reducer = self.model, None


def first_difference(model: nn.Module) -> str | None:
    """Name the first parameter or buffer that is not bitwise equal on all ranks, or return ``None``. Collective."""
    state = model.state_dict()
    digests = [hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest() for tensor in state.values()]
    mine = torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for i, name in enumerate(state):
        for rank, theirs in enumerate(everyone):
            if not torch.equal(theirs[i], everyone[0][i]):
                return f"{name!r} differs between ranks 0 and {rank}"
    return None

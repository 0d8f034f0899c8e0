"""GPU side of a group: torch's own NCCL where torch has it, else pycomm's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.collectives.backend.engine import GroupEngine, name_of
from pycomm.torch_internals import PrefixStore


class GpuSide:
    """Operations of one group on tensors of this rank's GPU.

    Args:
        engine: the group's engine.
        device: the GPU.

    Attributes:
        target: torch's backend for NCCL, or :class:`OwnNccl`.
    """

    def __init__(self, engine: GroupEngine, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"backend 'pycomm': a tensor is on {device}, wanted the CPU or an NVIDIA GPU")
        self.target: Any = _torch_nccl(engine) if dist.is_nccl_available() else OwnNccl(engine, device)

    def call(self, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        """Call an operation by the first of ``names`` that exists; torch's releases differ in them."""
        method = next((found for name in names if (found := getattr(self.target, name, None))), None)
        if method is None:
            raise RuntimeError(f"{names[0]} is not available on a GPU without torch's own NCCL")
        return method(*args, **kwargs)


def _torch_nccl(engine: GroupEngine) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=engine.timeout)
    options.global_ranks_in_group = list(engine.place.ranks)
    options.group_name = cast(Any, f"{engine.place.name}/cuda")
    store = PrefixStore("pycomm/cuda", engine.place.store)
    try:
        return dist.ProcessGroupNCCL(store, engine.rank, engine.size, options)
    except ValueError as error:  # no GPU: new_group() of torch 2.4 tries all the same, and expects a RuntimeError
        raise RuntimeError(f"backend 'pycomm': {error}") from None


class OwnNccl:
    """Operations over pycomm's own NCCL, for a torch that was built without."""

    def __init__(self, engine: GroupEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device.index or 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce a tensor in place."""
        return self._run("all_reduce", tensors[0], name_of(opts.reduceOp))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite a tensor with the root's."""
        return self._run("broadcast", tensors[0], opts.rootRank)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Gather a tensor of every rank in one tensor."""
        return self._run("all_gather", output, x)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor with a part per rank into this rank's part."""
        return self._run("reduce_scatter", output, x, name_of(opts.reduceOp))

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send a tensor to rank ``dst``."""
        return self._run("send", tensors[0], dst)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive a tensor from rank ``src``."""
        return self._run("recv", tensors[0], src)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for earlier work on the GPU, then for all ranks."""
        torch.cuda.synchronize(self._device)
        return self._engine.run("barrier", lambda: self._engine.barrier(self._engine.timeout), [], False)

    def abort(self) -> None:
        """Do nothing: the engine's channel ends its own operations."""

    shutdown = abort

    def _run(self, name: str, *args: Any) -> Any:
        self._engine.channel.gpu(self._device).run(name, False, *args)  # torch's current stream waits for it
        written = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return self._engine.run(name, lambda: None, written, False)

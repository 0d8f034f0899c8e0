"""GPU side of a group: torch's own NCCL where torch has it, else pycomm's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.backend.engine import GroupEngine
from pycomm.backend.tensors import name_of
from pycomm.torch_internals import PrefixStore


class GpuSide:
    """Operations of one group on tensors of this rank's GPU.

    Args:
        engine: the group's engine.
        device: the GPU.

    Attributes:
        target: torch's backend for NCCL, or :class:`OwnNccl`.

    Raises:
        RuntimeError: neither torch nor this machine has NCCL, or ``device`` is no NVIDIA GPU.
    """

    def __init__(self, engine: GroupEngine, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"backend 'pycomm': a tensor is on {device}, wanted the CPU or an NVIDIA GPU")
        self.target: Any = _torch_nccl(engine) if dist.is_nccl_available() else OwnNccl(engine, device)

    def call(self, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        """Call the operation that has these names in torch; releases differ in them."""
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
    except ValueError as error:  # there is no GPU: new_group() of torch 2.4 asks all the same, and takes a RuntimeError
        raise RuntimeError(f"backend 'pycomm': {error}") from error


class OwnNccl:
    """Operations over pycomm's own NCCL, for a torch that was built without."""

    def __init__(self, engine: GroupEngine, device: torch.device) -> None:
        self._channel, self._device = engine.channel, device.index or 0
        self._engine = engine

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce a tensor in place."""
        op = name_of(opts.reduceOp)
        return self._enqueue("all_reduce", tensors, lambda nccl, *when: nccl.all_reduce(tensors[0], op, *when))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite a tensor with the root's."""
        root = opts.rootRank
        return self._enqueue("broadcast", tensors, lambda nccl, *when: nccl.broadcast(tensors[0], root, *when))

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Gather a tensor of every rank in one tensor."""
        return self._enqueue("all_gather", [output, x], lambda nccl, *when: nccl.all_gather(output, x, *when))

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor with a part per rank into this rank's part."""
        op = name_of(opts.reduceOp)
        return self._enqueue(
            "reduce_scatter", [output, x], lambda nccl, *when: nccl.reduce_scatter(output, x, op, *when)
        )

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send a tensor to rank ``dst``."""
        return self._enqueue("send", tensors, lambda nccl, *when: nccl.send(tensors[0], dst, *when))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive a tensor from rank ``src``."""
        return self._enqueue("recv", tensors, lambda nccl, *when: nccl.recv(tensors[0], src, *when))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks, and for the work on the GPU before."""
        torch.cuda.synchronize(self._device)
        return self._engine.run("barrier", lambda: self._engine.barrier(self._engine.timeout), [], False)

    def abort(self) -> None:
        """Do nothing: the engine's channel ends its own operations."""

    shutdown = abort

    def _enqueue(self, name: str, tensors: Any, operation: Callable[..., None]) -> Any:
        self._channel.on_gpu(self._device, tensors, operation)  # torch's current stream waits for it
        return self._engine.run(name, lambda: None, list(tensors), False)

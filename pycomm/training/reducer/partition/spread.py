"""SpreadPartition: a sharded step between ranks on several hosts, or on GPUs.

If P hosts average n gradients and each steps all parameters, each sends 2 (P - 1) / P n elements before the step. Here
each sends (P - 1) / P n before the step, and as many after it: the new parameters of its part. A step ends when all of
them have arrived; on GPUs the host does not wait, but torch's current stream. Each rank keeps the optimizer state of
its own part (ZeRO, Rajbhandari et al., 2020, section 5.1).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import view_like
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.collectives.transport.rendezvous import order_of
from pycomm.errors import CommError, DamageError
from pycomm.optim.parameters import optimizer_parameters
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.partition.comparison import CompareReplicas
from pycomm.training.reducer.partition.partition import GpuMemory, Memory, Segment, StepPartition, begins_of
from pycomm.training.reducer.settings import Options
from pycomm.worker import Work

_LOG = logging.getLogger("pycomm")

States = dict[int, dict[str, torch.Tensor]]
"""Whole state of parameters, by their ids, then by key."""


class SpreadSegment(Segment):
    """Segment of ranks that reach each other by messages.

    State is laid out as that of all ranks, but only this rank's part is ever touched, so that only that takes memory.
    """

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return []

    def _zeros(self, num_bytes: int) -> Memory:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def gather(self, channel: Channel) -> None:
        """Overwrite each part of the parameters with that of its rank. Collective."""
        parts = self.parts_in(self.own, self.dtype)
        channel.all_gather_v(parts, parts[self._rank])

    def whole_states(self, sent: SentBucket) -> States:
        """Return all state of the parameters of ``sent``, gathered in new memory. Collective."""
        found: States = {id(slot.param): {} for slot in sent.slots}
        for key, dtype in sorted(self._states, key=str):  # in an order that is the same on all ranks
            whole = torch.empty(self.num_elements, dtype=dtype)
            mine = self.parts_in(self._states[key, dtype], dtype)[self._rank]
            sent.communicator.channel.all_gather_v([whole[share] for share in self.shares], mine)
            for slot, part in zip(sent.slots, torch.split(whole, sent.bucket.numels), strict=True):
                found[id(slot.param)][key] = view_like(part.clone(), slot.param)
        return found


_GPU_ALIGNMENT = 256
"""Alignment of parameters on GPUs in bytes. Matrix products are slow, or kernels fail, where it is less than 16."""


class SpreadPartition(StepPartition):
    """Partition over ranks that reach each other by messages; on GPUs it is by whole parameters."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        settings: Options,
        compare: CompareReplicas,
        on_gpu: bool = False,
    ) -> None:
        self._optimizer, self._on_gpu = optimizer, on_gpu
        self._segments: dict[SentBucket, SpreadSegment] = {}
        self._is_lost = False
        order = order_of(communicator.channel.transport.hosts)
        super().__init__(communicator, optimizer, module, settings, compare, order, on_gpu)
        self._hook = self._optimizer.register_state_dict_post_hook(self._complete)

    def _adopt(self, buckets: Sequence[SentBucket]) -> None:
        rank = self._communicator.rank
        for sent in buckets:
            bucket, params = sent.bucket, [slot.param for slot in sent.slots]
            shares = self.spans.shares(sent.slots)
            alignment = _GPU_ALIGNMENT // bucket.dtype.itemsize if self._on_gpu else 1
            num_bytes = begins_of(bucket.numels, alignment)[-1] * bucket.dtype.itemsize
            room = self._communicator.empty(num_bytes, torch.uint8, bucket.device)
            own = GpuMemory(room, 0, num_bytes) if room.is_cuda else room.numpy()
            segment = self._segments[sent] = SpreadSegment(bucket, params, shares, rank, own, alignment)
            self._move_in(sent, segment)

    def reduction_failed(self, error: BaseException) -> None:
        # A stream waits for parameters, not the host, which finds out later that they have not arrived.
        if self._on_gpu and isinstance(error, CommError) and not isinstance(error, DamageError):
            self._lost(self._optimizer, error)

    # Steps.

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        if not self._is_lost:
            self._is_lost = True
            super()._lost(optimizer, error)
            torch.optim.Optimizer.zero_grad(optimizer)  # else step() would first say that gradients are used

    def _hand_out(self) -> None:
        works = [self._submit(sent) for sent in self._buckets]
        try:
            for work in works:
                work.wait()
        except BaseException:
            for work in works:
                work.ends_within(None)  # then nothing writes to parameters any more
            raise

    def _submit(self, sent: SentBucket) -> Work | GpuWork:
        """Begin to send the new parameters of ``sent``, and to receive those of other ranks."""
        channel, bucket = sent.communicator.channel, sent.bucket

        def gather() -> None:
            # The ranks have agreed on the step.
            with contextlib.nullcontext() if bucket.on_gpu else channel.skip_checks():
                self._segments[sent].gather(channel)

        return channel.submit_on_gpu(bucket.device, gather, (), ()) if bucket.on_gpu else channel.submit(gather)

    def _is_complete(self) -> bool:
        return False

    # State.

    def _whole_states(self) -> States:
        """Return all state that is kept by parts, gathered in new memory, by parameter. Collective."""
        return {p: s for sent, segment in self._segments.items() for p, s in segment.whole_states(sent).items()}

    def _completed(self, entry: dict[str, Any], param: torch.Tensor, whole: States) -> dict[str, Any]:
        """Return the state ``entry`` of ``param`` with whole tensors in place of parts."""
        if param not in self._places:
            return entry
        segment, index = self._places[param]
        parts = [k for k, v in entry.items() if isinstance(v, torch.Tensor) and segment.is_home(index, k, v)]
        return {**entry, **{key: whole[id(param)][key] for key in parts}}

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace parts by whole tensors. Collective."""
        whole, states = self._whole_states(), state_dict["state"]
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if index in states:
                states[index] = self._completed(states[index], param, whole)

    def move_out(self) -> None:
        """Move parameters and whole state to this rank's own memory, and let it step alone. Collective."""
        self._hook.remove()
        try:
            whole = self._whole_states()
            self._stepper.take_whole(lambda entry, param: self._completed(entry, param, whole))
        except (CommError, ValueError) as error:
            _LOG.warning(
                "the optimizer's state was kept by parts on all ranks, and those of others are lost (%s): it begins "
                "anew; load a checkpoint",
                error,
            )
            self._stepper.take_whole(None)
        super().move_out()
        self._segments.clear()

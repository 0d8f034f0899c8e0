"""Steps of a model under DistributedDataParallel: its buckets are exchanged as they come, and committed together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling
from pycomm.compression.nonfinite import NonfiniteSource
from pycomm.ddp.exchanges import Sorting
from pycomm.ddp.pass_end import at_pass_end
from pycomm.ddp.settings import Settings
from pycomm.ddp.stopping import Stopping
from pycomm.ddp.verdict import StepCounts, all_finite
from pycomm.errors import HALF_SENT
from pycomm.optim.loss_scaler import loss_scale_of
from pycomm.torch_internals import GradBucket, current_graph_task, current_node
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


@dataclass(frozen=True)
class Taken:
    """Bucket that DistributedDataParallel has handed over, and the future that it waits for.

    Attributes:
        params: its parameters.
        grads: views of ``buffer``, one for each parameter.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[Any]


@dataclass(frozen=True)
class Weighting:
    """Share of this rank in the average.

    Attributes:
        by_active: whether to divide by the number of ranks that still have inputs, in place of the group's size.
        joined: whether this rank has none any more, and only stands in for itself.
    """

    by_active: bool = False
    joined: bool = False


class Steps:
    """Steps of one model. Methods named ``_on_...`` run on the communication thread.

    A bucket's exchange is a job of the communication thread (on a GPU, of a stream). The last bucket's is followed by
    the end of the step: state changes if all buckets are finite on all ranks, and every future gets its average. All of
    it is waited for in a final callback of the backward pass, which autograd calls before the model's own: an
    error is raised there, and comes out of ``backward()`` as it is. An error in a future would lose its type.

    Args:
        sorting: exchanges by bucket.
        device: device of the gradients.
    """

    def __init__(self, sorting: Sorting, communicator: Communicator, settings: Settings, device: torch.device) -> None:
        self._sorting, self._communicator = sorting, communicator
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._loss_scale = loss_scale_of(settings.loss_scaler)
        self._scaling = Scaling(communicator.size)
        self._weighting = Weighting()
        self._taken: list[Taken] = []
        self._is_open = False
        self._error: BaseException | None = None
        self.counts, self.source = StepCounts(device), NonfiniteSource()
        self.stopping = Stopping(communicator, device)
        self.num_steps = 0
        self.wait_seconds = 0.0
        self.stopped = ""
        """Error after which this rank no longer takes part; empty while it does."""

    def take(
        self, bucket: GradBucket, weighting: Weighting, zeros_are_unused: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to exchange ``bucket``; return the future of its average, a flat tensor.

        Args:
            bucket: as DistributedDataParallel hands it to its hook, in the order of their numbers.
            weighting: share of this rank, looked at with the first bucket of a step.
            zeros_are_unused: whether a gradient of zeros may be that of a parameter which was not used.
        """
        index, is_last = bucket.index(), bucket.is_last()
        taken = self._taken_over(bucket)
        if index == 0:
            self._begin(weighting)
        elif not self._is_open or index != len(self._taken):
            raise RuntimeError(f"bucket {index} came after {len(self._taken)} others of its step, wanted all in order")
        self._taken.append(taken)
        self._submit(lambda: self._on_bucket(index, taken, zeros_are_unused), [taken.buffer])
        end = self._submit(self._on_end, []) if is_last else None
        if current_node() is not None:
            at_pass_end(self, None if end is None else partial(self.wait, end))
        elif end is not None:
            # Outside of backward, for a rank that has joined; or already in its final callbacks, with static_graph.
            self.wait(end)
        return taken.future.then(_average_or_error)

    def _taken_over(self, bucket: GradBucket) -> Taken:
        if self.stopped:
            raise RuntimeError(f"pycomm's hook no longer takes part after an earlier error: {self.stopped}")
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError("a gradient is sparse; pycomm reduces dense gradients")
        devices: list[Any] | None = [self._device] if self._on_gpu else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        # The bucket itself is gone when the hook returns.
        return Taken(bucket.parameters(), bucket.gradients(), buffer, future)

    def _begin(self, weighting: Weighting) -> None:
        if self._is_open:
            self._require_alone()
        self._is_open, self._error = True, None
        self._taken = []
        self._weighting = weighting
        loss_scale = self._loss_scale.current(self._device, self._on_gpu)
        self._scaling = Scaling(self._communicator.size, loss_scale=loss_scale, step=self.counts.next_number)

    def _require_alone(self) -> None:
        """Go on after a pass that failed half-way if there are no other ranks; else stop, and raise RuntimeError."""
        if self._communicator.size > 1:
            self._stop(RuntimeError(HALF_SENT))
            raise RuntimeError(HALF_SENT)
        self._submit(lambda: None, []).wait()

    def _submit(self, job: Callable[[], None], reads: Sequence[torch.Tensor | None]) -> Work | GpuWork:
        channel = self._communicator.channel
        if self._on_gpu:
            return channel.submit_on_gpu(self._device, job, reads, {channel.current_stream(self._device)})
        return channel.submit(job)

    def wait(self, work: Work | GpuWork) -> None:
        """Wait for the end of the step, and raise what went wrong in it."""
        start = time.perf_counter()
        try:
            work.wait()
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._is_open = False
            self.wait_seconds += time.perf_counter() - start

    def fail(self) -> None:
        """Note that the backward pass has ended with an exception."""
        if self._is_open and self._communicator.size > 1:
            self._stop(RuntimeError(HALF_SENT))

    def _stop(self, error: BaseException) -> None:
        """Stop taking part, and tell the ranks that wait for this one."""
        if self.stopped or self._communicator.size == 1:
            return
        self.stopped = str(error) or type(error).__name__
        self._communicator.channel.abandon(self.stopped, in_step=False)

    @property
    def is_open(self) -> bool:
        """Whether buckets have been taken of a step that has not ended."""
        return self._is_open

    # Jobs, on the communication thread.

    def _on_bucket(self, index: int, taken: Taken, zeros_are_unused: bool) -> None:
        if self._error is not None:
            return
        try:
            if index == 0:
                self._weigh()
            grads: list[torch.Tensor | None] = [*taken.grads]
            if zeros_are_unused:
                grads = [grad if bool(grad.any()) else None for grad in taken.grads]
            exchanges = self._sorting.of(index, taken.params)
            # DistributedDataParallel has compared the parameters, and agrees on their order.
            checks = (
                contextlib.nullcontext() if index == 0 or self._on_gpu else self._communicator.channel.skip_checks()
            )
            scaling = self._scaling if index > 0 else replace(self._scaling, fingerprint=self.stopping.flags())
            with checks:
                exchanges.exchange(grads, scaling)
        except BaseException as error:
            self._error = error  # raised by the end of the step
            if self._on_gpu:
                raise

    def _weigh(self) -> None:
        """Learn how many ranks have inputs, if it is by them that sums are divided."""
        if not self._weighting.by_active:
            return
        active = torch.tensor([0.0 if self._weighting.joined else 1.0])
        self._communicator.all_reduce(active)
        relative = 0.0 if self._weighting.joined else self._communicator.size / float(active)
        self._scaling = replace(self._scaling, relative=relative)

    def _on_end(self) -> None:
        taken, self._taken = self._taken, []
        try:
            if self._error is not None:
                raise self._error
            self._finish(taken)
        except BaseException as error:
            for one in taken:
                if not one.future.done():
                    one.future.set_result(error)  # set_exception() would end the process in DistributedDataParallel
            raise
        finally:
            self._error = None

    def _finish(self, taken: Sequence[Taken]) -> None:
        mine = [self._sorting[index] for index in range(len(taken))]
        parts = [part for each in mine for part in each.parts]
        self.source.share(parts, self._communicator)
        self.stopping.hear(mine[0].parts)
        finite: Flag = True
        if any(part.exchange.transactional for part in parts):
            finite = all_finite([part.exchange for part in parts])
            self.counts.count(finite)
            self.source.count(finite)
        self.num_steps += 1
        for each in mine:
            each.finish(finite)
        for each, one in zip(mine, taken, strict=True):
            one.future.set_result(each.averages(one.buffer, one.grads))


def _average_or_error(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def weighting_of(by_active: bool) -> Weighting:
    """Return the share of this rank. A rank that has joined runs its hook outside of any backward pass."""
    return Weighting(by_active, joined=current_graph_task() == -1)

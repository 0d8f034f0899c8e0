"""Steps under DistributedDataParallel: buckets are exchanged as they arrive, and committed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pycomm.collectives.layout import view_like
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.ddp.comparison import PassComparison
from pycomm.ddp.registration import Registration
from pycomm.errors import HALF_SENT
from pycomm.torch_internals import GradBucket, current_graph_task, current_node
from pycomm.training.reducer import FinalCallback
from pycomm.training.reductions.phase import Role
from pycomm.worker import Work

Fingerprint = Callable[[], torch.Tensor]
"""Returns this rank's bits."""


@dataclass(frozen=True)
class TakenStep:
    """Bucket from DistributedDataParallel, and the future that it waits for."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[Any]


class Steps:
    """Steps of one model. Methods named ``_on_...`` run on the communication thread.

    A bucket's exchange is a job of the communication thread (on a GPU, of a stream). After the last bucket, state is
    committed if all buckets are finite on all ranks, and every future gets its average. A final callback of the
    backward pass, called before the model's own, waits for all of it. An error raised there leaves ``backward()``
    unchanged, whereas an error in a future would lose its type.
    """

    def __init__(self, registration: Registration, comparison: PassComparison) -> None:
        self._registration, self._comparison = registration, comparison
        self._communicator, self._exchanges = registration.communicator, registration.exchanges
        self._device, self._on_gpu = registration.device, registration.on_gpu
        self._state, self._reduction = registration.state, registration.reduction
        self._taken: list[TakenStep] = []
        self._error: BaseException | None = None

    def take(
        self, bucket: GradBucket, divides_by_active: bool, zeros_are_unused: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to exchange ``bucket``; return the future of its average, a flat tensor.

        Args:
            bucket: argument of DistributedDataParallel's hook; buckets come in the order of their numbers.
            divides_by_active: whether to divide by the number of ranks that still have inputs, not by the
                group's size.
            zeros_are_unused: whether a gradient of zeros may belong to an unused parameter. Both are used with the
                first bucket of a step.
        """
        index, is_last = bucket.index(), bucket.is_last()
        taken = self._taken_over(bucket)
        if index == 0:
            self._begin(divides_by_active, zeros_are_unused)
        elif not self._state.is_sending or index != len(self._taken):
            raise RuntimeError(f"bucket {index} came after {len(self._taken)} others of its step, wanted all in order")
        self._taken.append(taken)
        flags = self._comparison.bits() if is_last else None
        self._launch(index, taken, None if flags is None else lambda: flags)
        end = self._reduction.submit(self._on_end, self._communicator.channel) if is_last else None
        if current_node() is not None:
            FinalCallback((lambda: None) if end is None else partial(self.wait, end), self.fail)
        elif end is not None:
            # Outside of backward, for a rank that has joined; or already in its final callbacks, with static_graph.
            self.wait(end)
        return taken.future.then(_average_or_error)

    def _taken_over(self, bucket: GradBucket) -> TakenStep:
        self._registration.require_taking_part()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError("a gradient is sparse; pycomm reduces dense gradients")
        devices: list[Any] | None = [self._device] if self._on_gpu else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        params = bucket.parameters()
        pairs = zip(bucket.gradients(), params, strict=True)  # the former as if all parameters were contiguous
        grads = [grad if p.is_contiguous() else view_like(grad.view(-1), p) for grad, p in pairs]
        # The bucket itself is invalid once the hook has returned.
        return TakenStep(params, grads, buffer, future)

    def _begin(self, divides_by_active: bool, zeros_are_unused: bool) -> None:
        if self._state.is_sending:  # a failed pass, from which only a rank without others recovers
            if self._communicator.size > 1:
                self._registration.stop(RuntimeError(HALF_SENT))
                raise RuntimeError(HALF_SENT)
            self._reduction.submit(lambda: None, self._communicator.channel).wait()
            self._state.pass_fails()
        self._comparison.fingerprint.receive_late()
        # A rank that has joined, as it has no more inputs, calls its hook outside of any backward.
        self._state.pass_begins(True, Role.ABSENT if current_graph_task() == -1 else Role.BATCH)
        self._error, self._taken = None, []
        weigh = self._share_of_active if divides_by_active else None
        self._reduction.begin(self._registration.scaling(zeros_are_unused=zeros_are_unused), weigh)

    def _launch(self, index: int, taken: TakenStep, fingerprint: Fingerprint | None) -> None:
        """Exchange a bucket on the communication thread; on a GPU, pack it here, and send it on the stream."""
        channel, reduction = self._communicator.channel, self._reduction
        if self._on_gpu:
            exchanges = self._exchanges.of(index, taken.params)
            exchanges.lie_in(taken.buffer)
            reduction.pack(exchanges, taken.grads, fingerprint)
            reduction.submit(exchanges.send, channel)
        else:
            reduction.submit(lambda: self._on_bucket(index, taken, fingerprint), channel)

    def wait(self, work: Work | GpuWork) -> None:
        """Wait for the end of the step, and raise its error."""
        try:
            with self._registration.waiting():
                work.wait()
        finally:
            self._state.reduced(succeeded=True)

    def fail(self) -> None:
        """Note that the backward pass has ended with an exception."""
        if self._state.is_sending:
            self._registration.stop(RuntimeError(HALF_SENT))

    # Jobs, on the communication thread.

    def _on_bucket(self, index: int, taken: TakenStep, fingerprint: Fingerprint | None) -> None:
        if self._error is not None:
            return
        try:
            exchanges, channel = self._exchanges.of(index, taken.params), self._communicator.channel
            # DistributedDataParallel has compared the parameters, and agrees on their order.
            self._reduction.exchange(exchanges, taken.grads, channel, fingerprint, is_compared=index == 0)
        except BaseException as error:
            self._error = error  # raised at the end of the step

    def _share_of_active(self) -> float:
        """Return this rank's weight where sums are divided by the number of ranks with inputs. Collective."""
        has_batch = self._state.has_pass
        active = torch.tensor([1.0 if has_batch else 0.0])
        self._communicator.all_reduce(active)
        return 0.0 if not has_batch else self._communicator.size / float(active)

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

    def _finish(self, taken: Sequence[TakenStep]) -> None:
        mine = [self._exchanges[index] for index in range(len(taken))]
        parts = [part for each in mine for part in each.parts]
        self._reduction.share_source(parts)
        is_transactional = any(part.exchange.transactional for part in parts)
        finite = self._reduction.verdict(parts) if is_transactional else True
        self._comparison.fingerprint.receive(mine[-1].parts[0].exchange.differing())
        if is_transactional:
            self._reduction.count(finite)
        self._state.handed_out(False, has_averages=False)
        for each in mine:
            each.finish(finite)
        for each, one in zip(mine, taken, strict=True):
            one.future.set_result(each.averages(one.buffer, one.grads))


def _average_or_error(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value

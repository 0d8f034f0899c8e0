"""Steps of sharded gradients between replicas: averaged module by module, and taken back if one overflows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling, State
from pycomm.ddp.exchanges import BucketExchanges
from pycomm.ddp.pass_end import at_pass_end
from pycomm.ddp.settings import Settings
from pycomm.ddp.verdict import StepCounts, all_finite
from pycomm.optim.loss_scaler import loss_scale_of
from pycomm.reducer.nonfinite import NonfiniteSource
from pycomm.reducer.passes import HALF_SENT
from pycomm.torch_internals import ShardedGroup


class Shards:
    """Shards of one module's parameters on this rank, and their exchange between the replicas.

    Args:
        group: what torch has made of the module.
        names: names of its parameters.
    """

    def __init__(
        self, group: ShardedGroup, names: Sequence[str], communicator: Communicator, settings: Settings
    ) -> None:
        self.params = group.params
        self.numels = [math.prod(shape) for shape in group.shapes]
        device = group.params[0].to_local().device  # type: ignore[attr-defined]
        # Of parameters the exchange needs only what they look like: no memory behind it.
        looks = [torch.empty(1, dtype=group.dtype, device=device).expand(shape) for shape in group.shapes]
        self.exchanges = BucketExchanges(names, looks, settings.method, communicator, settings.algorithm)
        self._shapes = group.shapes
        self._before: State | None = None

    def views(self, reduced: torch.Tensor) -> list[torch.Tensor]:
        """Return views of ``reduced``, flat, for each parameter."""
        if reduced.numel() != sum(self.numels):
            raise RuntimeError(
                f"fully_shard reduced {reduced.numel()} elements of {self.exchanges.names[0]!r} and its neighbours, "
                f"wanted {sum(self.numels)}: have parameters been exchanged since register_hsdp()?"
            )
        parts = torch.split(reduced, self.numels)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def remember(self) -> None:
        """Keep a copy of the state as it was before this step."""
        if self._before is None:
            state = self.exchanges.state()
            self._before = {name: {key: t.clone() for key, t in entry.items()} for name, entry in state.items()}

    def settle(self, finite: Flag) -> None:
        """Put the state of before back unless ``finite``, and make the gradients of the step NaN then."""
        before, self._before = self._before, None
        if finite is True:
            return
        if before is not None:
            for name, entry in self.exchanges.state().items():
                for key, tensor in entry.items():
                    tensor.copy_(_chosen(finite, tensor, before[name][key]))
        for param in self.params:
            if param.grad is not None:
                grad = param.grad.to_local()  # type: ignore[attr-defined]
                grad.copy_(_chosen(finite, grad, torch.full_like(grad, math.nan)))


def _chosen(finite: Flag, this: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, this, other) if isinstance(finite, torch.Tensor) else (this if finite else other)


class ReplicaSteps:
    """Steps of all modules of a model.

    A module's shard has to be averaged by the time its hook returns, when nobody knows yet whether gradients of other
    modules overflow: its state is copied before, and put back at the end of the pass where that turns out to be due.

    Args:
        communicator: this rank's replicas.
        shard_communicator: the ranks that the parameters are sharded over, whose verdicts count too.
        device: device of the gradients.
    """

    def __init__(
        self,
        communicator: Communicator,
        shard_communicator: Communicator,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self._communicator, self._shard_communicator = communicator, shard_communicator
        self._device, self._on_gpu = device, device.type == "cuda"
        self._loss_scale = loss_scale_of(settings.loss_scaler)
        self._transactional = settings.method.transactional
        self._scaling = Scaling(communicator.size)
        self._verdicts: list[Flag] = []
        self._seen: dict[int, Shards] = {}  # in this step
        self.is_open = False
        self.counts, self.source = StepCounts(device), NonfiniteSource()
        self.num_steps = 0
        self.seconds = 0.0
        self.stopped = ""

    @torch.no_grad()
    def average(self, shards: Shards, reduced: torch.Tensor) -> None:
        """Replace ``reduced``, the flat gradients of a module's shards, by their averages over the replicas."""
        if self.stopped:
            raise RuntimeError(f"pycomm's hook no longer takes part after an earlier error: {self.stopped}")
        start = time.perf_counter()
        if not self.is_open:
            self._begin()
        self._seen[id(shards)] = shards
        if self._transactional:
            shards.remember()
        grads, exchanges = shards.views(reduced), shards.exchanges
        try:
            exchanges.exchange(grads, self._scaling)
            self.source.share(exchanges.parts, self._communicator)
            finite: Flag = True
            if self._transactional:
                finite = all_finite([part.exchange for part in exchanges.parts])
                self._verdicts.append(finite)
                self.source.count(finite)
            exchanges.finish(finite)
            exchanges.write(grads)
        except BaseException as error:
            self.stop(error)
            raise
        self.seconds += time.perf_counter() - start

    def _begin(self) -> None:
        self.is_open = True
        self._verdicts, self._seen = [], {}
        loss_scale = self._loss_scale.current(self._device, self._on_gpu)
        self._scaling = Scaling(self._communicator.size, loss_scale=loss_scale, step=self.counts.next_number)
        at_pass_end(self, self.end)

    @torch.no_grad()
    def end(self) -> None:
        """Keep or take back the state of the step, as all ranks' gradients are finite or not."""
        start = time.perf_counter()
        try:
            if self._transactional:
                finite = self._verdict()
                self.counts.count(finite)
                for shards in self._seen.values():
                    shards.settle(finite)
            self.num_steps += 1
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            self.is_open, self._seen = False, {}
            self.seconds += time.perf_counter() - start

    def _verdict(self) -> Flag:
        mine = torch.stack([torch.as_tensor(flag) for flag in self._verdicts]).all()
        failures = (~mine).to(device=self._device, dtype=torch.float32).reshape(1)
        self._shard_communicator.all_reduce(failures, "max")
        return (failures == 0.0)[0] if self._on_gpu else not failures.item()

    def fail(self) -> None:
        """Note that the backward pass has ended with an exception."""
        if self.is_open:
            self.is_open = False
            self.stop(RuntimeError(HALF_SENT))

    def stop(self, error: BaseException) -> None:
        """Stop taking part, and tell the ranks that wait for this one."""
        if self.stopped or (self._communicator.size == 1 and self._shard_communicator.size == 1):
            return
        self.stopped = str(error) or type(error).__name__
        for communicator in (self._communicator, self._shard_communicator):
            communicator.channel.abandon(self.stopped, in_step=False)


def state_of(all_shards: Mapping[Any, Shards]) -> State:
    """Return the state of all modules, by parameter name (not copied)."""
    return {name: entry for shards in all_shards.values() for name, entry in shards.exchanges.state().items()}

"""Steps of sharded gradients between replicas: averaged module by module, and undone on an overflow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Flag, State
from pycomm.ddp.comparison import PassComparison
from pycomm.ddp.registration import Registration
from pycomm.errors import HALF_SENT
from pycomm.torch_internals import accumulation_hooks, dtensor_around, local_of
from pycomm.torch_internals.wrappers import ShardedGroup
from pycomm.training.reducer import FinalCallback
from pycomm.training.reductions.exchanges import ExchangesByIndex

_END = -1


class ShardedReplicas:
    """Shards of one module's parameters on this rank, and their exchange between the replicas.

    Args:
        place: number of the module, the same on all ranks.
        exchanges: exchanges of all modules.
    """

    def __init__(self, place: int, group: ShardedGroup, names: Sequence[str], exchanges: ExchangesByIndex) -> None:
        self.place = place
        self.params = group.params
        self.numels = [math.prod(shape) for shape in group.shapes]
        device = group.params[0].to_local().device  # type: ignore[attr-defined]
        # The exchange needs only shapes and dtypes of parameters, without memory.
        looks = [torch.empty(1, dtype=group.dtype, device=device).expand(shape) for shape in group.shapes]
        self.exchanges = exchanges.make(place, names, looks)
        self._shapes, self._division = group.shapes, group.division
        self._before: State | None = None

    def views(self, reduced: torch.Tensor) -> list[torch.Tensor]:
        """Split the flat ``reduced`` into one view per parameter."""
        if reduced.numel() != sum(self.numels):
            raise RuntimeError(
                f"fully_shard reduced {reduced.numel()} elements of {self.exchanges.names[0]!r} and its neighbors, "
                f"wanted {sum(self.numels)}: have parameters been exchanged since register_hsdp()?"
            )
        parts = torch.split(reduced, self.numels)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def add_averages(self) -> bool:
        """Add the averages to this rank's gradients, as FSDP does not for a module that this rank has not used.

        Returns:
            Whether any replica has used it. Otherwise its gradients stay as they are. Waits for a GPU.
        """
        division = self._division()
        places = [place for part in self.exchanges.parts for place in part.bucket.places]
        indices = [i for part in self.exchanges.parts for i in part.indices]
        used = [is_used for part in self.exchanges.parts for is_used in part.exchange.used()]
        for i, place, is_used in zip(indices, places, used, strict=True):
            if not is_used:
                continue
            param: Any = self.params[i]
            local = local_of(param)
            # Reduced gradients are padded at the end to shards of equal size.
            shard = place.reshape(-1)[: local.numel()].view(local.shape).to(local.dtype) / division
            if param.grad is None:
                param.grad = dtensor_around(shard.to(local.device), param)
            else:
                local_of(param.grad).add_(shard.to(local.device))
            for hook in accumulation_hooks(param).values():
                hook(param)
        return any(used)

    def remember(self) -> None:
        """Keep a copy of the state as it was before this step."""
        if self._before is None:
            state = self.exchanges.state()
            self._before = {name: {key: t.clone() for key, t in entry.items()} for name, entry in state.items()}

    def commit(self, finite: Flag) -> None:
        """Unless ``finite``, restore the state from before this step, and make its gradients NaN."""
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

    A module's hook must return averages before it is known whether gradients of other modules overflow. So its state is
    copied before, and restored at the end of the pass if any gradient was not finite.

    Replicas may use different modules, in different orders. Before each average they exchange which module they have
    reached, and average the last of these in the order of registration, which backward reaches first. Replicas that
    have not reached it take part without gradients, and repeat this until their own module's turn, or at the end of the
    pass until all replicas have ended.

    This makes the hosts wait for each other, once for each module. After two passes with the same turns they are
    expected again, and replicas exchange what they have reached at the end of the pass alone, or where a replica is at
    a module whose turn has passed. A turn that no replica has used ends this, as do more turns than expected.

    Args:
        modules: shards of all modules, in the same order on all ranks.
        shard_communicator: the ranks that the parameters are sharded over, whose verdicts count too.
    """

    def __init__(
        self,
        modules: Sequence[ShardedReplicas],
        registration: Registration,
        comparison: PassComparison,
        shard_communicator: Communicator,
    ) -> None:
        self._modules, self._registration, self._comparison = modules, registration, comparison
        self._reduction = registration.reduction
        self._communicator, self._shard_communicator = registration.communicator, shard_communicator
        self._transactional, self._state = registration.method.transactional, registration.state
        self._verdicts: list[Flag] = []
        self._seen: dict[int, ShardedReplicas] = {}  # in this step
        self._turns: list[int] = []  # places of the modules that were averaged in this pass
        self._turns_before: list[int] = []  # in the pass before
        self._expected: deque[int] = deque()  # turns that are to come
        self._has_met = False  # in this pass

    @torch.no_grad()
    def average(self, shards: ShardedReplicas, reduced: torch.Tensor) -> None:
        """Replace ``reduced``, the flat gradients of a module's shards, by their averages over the replicas."""
        self._registration.require_taking_part()
        if not self._state.is_sending:
            self._begin()
        grads = shards.views(reduced)
        with self._registration.waiting():
            self._stand_in_until(shards.place)
            self._exchange(shards, grads)
            self._turns.append(shards.place)
            shards.exchanges.write(grads)

    def _stand_in_until(self, place: int) -> None:
        """Take part in averages of other modules until the turn of module ``place``; -1: until the pass has ended."""
        while (turn := self._next_turn(place)) != place:
            shards = self._modules[turn]
            self._exchange(shards, [None] * len(shards.params))
            if shards.add_averages():
                self._turns.append(turn)

    def _next_turn(self, place: int) -> int:
        """Return the place of the module to average next; -1 if all replicas have ended the pass."""
        return self._expected.popleft() if self._expected else self._meet(place)

    def _meet(self, place: int) -> int:
        """Return the greatest of all replicas' ``place``. Compares what they have done, once in a pass."""
        is_first, self._has_met = not self._has_met, True
        flags = self._comparison.bits().tolist() if is_first else []
        words = np.array([place, *flags], np.int64)
        gathered = np.empty(self._communicator.size * len(words), np.int64)
        self._communicator.all_gather(gathered, words)
        rows = gathered.reshape(-1, len(words))
        if is_first:
            self._comparison.fingerprint.judge((rows[:, 1:] != rows[0, 1:]).any(axis=0).tolist())
        return int(rows[:, 0].max())

    def _exchange(self, shards: ShardedReplicas, grads: Sequence[torch.Tensor | None]) -> None:
        self._seen[id(shards)] = shards
        self._state.launched += 1
        if self._transactional:
            shards.remember()
        exchanges, reduction = shards.exchanges, self._reduction
        reduction.exchange(exchanges, grads)
        reduction.share_source(exchanges.parts)
        self._verdicts.append(reduction.verdict(exchanges.parts) if self._transactional else True)
        exchanges.finish(self._verdicts[-1])

    def _begin(self) -> None:
        self._state.pass_begins(True)
        self._state.expects_gradients()
        self._verdicts, self._seen, self._has_met = [], {}, False
        self._expected = deque(self._turns if self._turns == self._turns_before else ())
        self._turns_before, self._turns = self._turns, []
        self._reduction.begin(self._registration.scaling())
        FinalCallback(self.end, self.fail)

    @torch.no_grad()
    def end(self) -> None:
        """Keep the state of the step if all ranks' gradients are finite, otherwise restore it."""
        try:
            with self._registration.waiting():
                self._stand_in_until(_END)
                if self._transactional:
                    finite = self._verdict()
                    self._reduction.count(finite)
                    for shards in self._seen.values():
                        shards.commit(finite)
                self._state.handed_out(False, has_averages=False)
        finally:
            self._state.reduced(succeeded=True)
            self._seen = {}

    def _verdict(self) -> Flag:
        mine = torch.stack([torch.as_tensor(flag) for flag in self._verdicts]).all()
        failures = (~mine).to(device=self._registration.device, dtype=torch.float32).reshape(1)
        self._shard_communicator.all_reduce(failures, "max")
        return (failures == 0.0)[0] if self._registration.on_gpu else not failures.item()

    def fail(self) -> None:
        """Note that the backward pass has ended with an exception."""
        if self._state.is_sending:
            self._state.pass_fails()
            self._registration.stop(RuntimeError(HALF_SENT))

"""Ways to average the gradients of an optimizer.

In buckets, in an order that is agreed once, as ``pycomm.attach`` does; one by one, by name (sparse gradients, other
reductions than mean and sum, users' compressions); or, with Adasum, what steps have changed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import pycomm.compression as methods
from pycomm import kernels
from pycomm.agreement import check_same_lines
from pycomm.collectives.broadcasting import ORDER, broadcast_state, names_in_order, share_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import hashable
from pycomm.horovod.collectives import AllReduce, Submission, synchronize
from pycomm.horovod.coordinator import ALLREDUCE
from pycomm.horovod.execution import split_list
from pycomm.horovod.names import Average, Compression, InvalidRequestError, ReduceOp, Sum, compressed
from pycomm.horovod.operations import begin_sparse_allreduce
from pycomm.horovod.process_sets import ProcessSet, members_of, world
from pycomm.optim.hyperparameters import Hyperparameters, Numbers
from pycomm.optim.module_hooks import ZeroGradHook
from pycomm.optim.wrappers import refuse_wrapped
from pycomm.training.reducer import Reducer, Tuning, attach
from pycomm.training.reductions.replicas import is_comparison_due

Named = list[tuple[str, torch.Tensor]]
_INTERVAL = 1000
"""Number of steps between two comparisons of the parameters, after the early ones."""
_TOO_OFTEN = (
    "the gradient of {name!r} was computed more than backward_passes_per_step={passes} times before step(): pass a "
    "larger backward_passes_per_step, or call zero_grad() and step() in between"
)


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``DistributedOptimizer``; ``sparse`` are the ``named`` parameters with sparse gradients."""

    named: Named
    compression: Any
    passes: int
    op: ReduceOp
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    sparse: Collection[torch.Tensor] = ()
    loss_scaler: Any = None

    def named_of(self, optimizer: torch.optim.Optimizer) -> Named:
        """Return the named parameters that ``optimizer`` steps."""
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [(name, param) for name, param in self.named if id(param) in own]

    def users_compression(self, others: str) -> Any:
        """Return the compression of named operations. Raises ValueError for pycomm's own, which require ``others``."""
        if isinstance(self.compression, methods.Compression | str):
            raise ValueError(f"compression is {self.compression!r}, which requires {others}")
        return self.compression or Compression.none


class AttachedAveraging:
    """Averaging of the gradients of ``optimizer`` by a Reducer. Collective."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        self._arguments, self._passes = arguments, arguments.passes
        self._named = arguments.named_of(optimizer)
        self._optimizer, self._world = optimizer, world()
        own = {name for name, _ in self._named}
        others = {name: param for name, param in arguments.named if name not in own}  # as of a frozen trunk
        with Communicator(members_of(arguments.process_set).group) as communicator:
            share_tensors(communicator, others, src=0)
        self.reducer = self._attach()

    def _attach(self) -> Reducer:
        members = members_of(self._arguments.process_set)
        reducer = attach(
            self._optimizer,
            self._named,
            compression=method_of(self._arguments.compression),
            process_group=members.group,
            accumulate=self._passes,
            average=self._arguments.op == Average,
            loss_scaler=self._arguments.loss_scaler,
            tuning=Tuning(timeout=self._world.timeout),
        )
        self._world.attached.add(reducer)
        return reducer

    def synchronize(self) -> None:
        """Reduce what has not been reduced yet; mostly nothing is left to do, as ``backward()`` has done it."""
        self.reducer.reduce_now()

    def set_passes(self, passes: int) -> None:
        """Attach again with ``passes`` per step, keeping what compression has not sent yet."""
        state = self.reducer.state_dict()
        self.detach()
        self._passes = passes
        self.reducer = self._attach()
        self.reducer.load_state_dict(state)

    def detach(self) -> None:
        """Stop reducing."""
        self.reducer.detach()
        self._world.attached.discard(self.reducer)


def method_of(compression: Any) -> methods.Compression | str | None:
    """Return pycomm's method for what Horovod calls a compression; raises TypeError if there is none."""
    if compression is None or compression is Compression.none:
        return None
    if compression is Compression.fp16:
        return methods.FP16()
    if isinstance(compression, methods.Compression | str):
        return compression
    raise TypeError(f"compression is {compression!r}, which is none of pycomm's methods")


def is_needed(arguments: Arguments) -> bool:
    """Return whether gradients have to go one by one, if none is sparse."""
    own = isinstance(arguments.compression, methods.Compression | str) or arguments.compression is None
    known = own or arguments.compression in (Compression.none, Compression.fp16)
    return arguments.op not in (Average, Sum) or arguments.sparse_as_dense or not known


class StepTerms:
    """Terms of a step's operations: what must be the same on all ranks. They are compared with the operations.

    Args:
        optimizer: the optimizer, which is equal on all ranks.
        params: the parameters that are averaged.
        names: names by id.
        has_numbers: whether to compare the numbers of its groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], names: dict[int, str], has_numbers: bool
    ) -> None:
        self._optimizer, self._params, self._names = optimizer, params, names
        self._reader = Hyperparameters(optimizer) if has_numbers else None
        self._at_first = self._reader.read() if self._reader is not None else []
        self._hook = ZeroGradHook(optimizer, self._zeroed)
        world().checks.add(self)
        self.restart()

    def restart(self) -> None:
        """Count from zero: all ranks have joined."""
        self._num_steps = self._num_zero_grads = 0
        self._of_all = ""
        self._first: torch.Tensor | None = None

    def _zeroed(self) -> None:
        self._num_zero_grads += 1

    def _own(self) -> list[torch.Tensor]:
        """Return the parameters in the optimizer's groups."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def of(self, params: Iterable[torch.Tensor]) -> str:
        """Return the terms of the operation for ``params``."""
        if not self._of_all:
            own = self._own()
            self._of_all = f"trainable={sum(param.requires_grad for param in own)}/{len(own)}"
            self._first = next((param for param in self._params if param.requires_grad), None)
        words = [self._of_all]
        params = list(params)
        if any(param is self._first for param in params):
            words += self._of_step()
        if is_comparison_due(self._num_steps, _INTERVAL):
            hashes = kernels.hashes([hashable(param.detach()) for param in params]).tolist()
            words += [f"{self._names[id(p)]}={h & (1 << 32) - 1:x}" for p, h in zip(params, hashes, strict=True)]
        return " ".join(word.replace(" ", "") for word in words)

    def _of_step(self) -> list[str]:
        """Return those terms that the first operation of a step has."""
        groups: list[Numbers] = self._reader.read() if self._reader is not None else []
        nothing: Numbers = {}
        numbers = [
            f"group{i}.{key}={value}"
            for i, (group, first) in enumerate(itertools.zip_longest(groups, self._at_first, fillvalue=nothing))
            for key, value in group.items()
            if key == "lr" or value != first.get(key)
        ]
        return [*numbers, f"zero_grads={max(1, self._num_zero_grads)}"]

    def end_step(self) -> None:
        """Count a step. Raise ValueError if the optimizer has trainable parameters that are not averaged."""
        self._num_steps, self._num_zero_grads, self._of_all = self._num_steps + 1, 0, ""
        known = {id(param) for param in self._params}
        new = [param for param in self._own() if param.requires_grad and id(param) not in known]
        if new:
            raise ValueError(
                f"the optimizer has {len(new)} parameters that are not averaged, the first of shape "
                f"{list(new[0].shape)}: they were added or replaced since. Call hvd.DistributedOptimizer(optimizer, "
                "...) again"
            )

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._hook.remove()


class NamedAveraging:
    """Averaging of the gradients of ``optimizer`` by named operations, started while ``backward()`` runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        self._compression = arguments.users_compression("op=Average or Sum and dense gradients")
        refuse_wrapped(dict(arguments.named), None)
        self._arguments, self._passes, self._sparse = arguments, arguments.passes, set(arguments.sparse)
        self._names = {id(param): name for name, param in arguments.named}
        self._params = [param for _, param in arguments.named_of(optimizer)]
        self._groups = {id(param): group for group in self._split() for param in group}
        self._counts: dict[int, int] = {}
        self._begun: dict[int, Callable[[], None]] = {}
        _make_equal(optimizer, arguments)
        self._terms = StepTerms(optimizer, self._params, self._names, has_numbers=True)
        self._hooks: dict[int, Any] = {}
        self._add_hooks()

    def _add_hooks(self) -> None:
        """Hook the trainable parameters, including those unfrozen since."""
        for param in self._params:
            leaf: Any = param
            if leaf.is_leaf and leaf.requires_grad and id(leaf) not in self._hooks:
                self._hooks[id(leaf)] = leaf.register_post_accumulate_grad_hook(self._on_gradient)

    def _split(self) -> list[list[torch.Tensor]]:
        """Return the groups of parameters that are reduced together."""
        groups = self._arguments.groups
        dense = [param for param in self._params if param not in self._sparse]
        if isinstance(groups, list):
            chosen = [[p for p in group if any(p is d for d in dense)] for group in groups]
            inside = {id(param) for group in chosen for param in group}
            return [group for group in chosen if group] + [[p] for p in self._params if id(p) not in inside]
        alone = [[param] for param in self._params if param in self._sparse]
        if not isinstance(groups, int) or groups == 0:
            return alone + [[param] for param in dense]
        return alone + [list(group) for group in split_list(dense, groups) if group]

    def _on_gradient(self, param: torch.Tensor) -> None:
        if id(param) in self._begun:
            raise RuntimeError(_TOO_OFTEN.format(name=self._names[id(param)], passes=self._passes))
        self._counts[id(param)] = self._counts.get(id(param), 0) + 1
        group = self._trained_with(param)
        if all(self._counts.get(id(member), 0) >= self._passes for member in group):
            self._begin(group)

    def _trained_with(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the members of the group of ``param`` that are not frozen."""
        return [member for member in self._groups[id(param)] if member.requires_grad]

    def _begin(self, group: Sequence[torch.Tensor]) -> None:
        """Begin to reduce the gradients of ``group``; missing ones count as zeros."""
        first = group[0]
        if len(group) == 1 and (first in self._sparse or (first.grad is not None and first.grad.is_sparse)):
            self._sparse.add(first)
            if not self._arguments.sparse_as_dense:
                self._begin_sparse(first)
                return
        was_sparse = {id(p) for p in group if p in self._sparse or (p.grad is not None and p.grad.is_sparse)}
        sent, undo = compressed(map(_dense_gradient, group), self._compression)
        name = f"gradient.{self._names[id(first)]}"
        handle = _begin_all_reduce(sent, name, self._arguments, self._terms.of(group))

        def end() -> None:
            for param, grad in zip(group, undo(synchronize(handle)), strict=True):
                param.grad = grad.to_sparse(1) if id(param) in was_sparse else grad.to(param.dtype)

        for param in group:
            self._begun[id(param)] = end if param is first else _nothing

    def _begin_sparse(self, param: torch.Tensor) -> None:
        if param.grad is None:
            param.grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), param.new_empty(0, *param.shape[1:]), param.shape
            )
        name = f"gradient.{self._names[id(param)]}"
        op, process_set = self._arguments.op, self._arguments.process_set
        handle = begin_sparse_allreduce(param.grad, name, op, process_set, self._terms.of([param]))

        def end() -> None:
            param.grad = handle()

        self._begun[id(param)] = end

    @torch.no_grad()
    def synchronize(self) -> None:
        """Begin the remaining reductions, then wait for all. Collective."""
        self._add_hooks()
        try:
            for param in self._params:
                if id(param) not in self._begun and param.requires_grad:
                    self._begin(self._trained_with(param))
            for end in list(self._begun.values()):
                end()
        except InvalidRequestError as error:
            self._refuse_others(error)
            raise
        finally:
            self._begun.clear()
            self._counts.clear()
        self._terms.end_step()

    def _refuse_others(self, problem: InvalidRequestError) -> None:
        """Refuse operations of parameters that are frozen here: a rank that trains them waits for these."""
        for name in [self._names[id(param)] for param in self._params if id(param) not in self._begun]:
            refusal = Submission(ALLREDUCE, f"gradient.{name}", self._arguments.process_set)
            with contextlib.suppress(InvalidRequestError), refusal:
                raise ValueError(str(problem))

    def set_passes(self, passes: int) -> None:
        """Reduce after every ``passes`` passes."""
        self._passes = passes
        self._counts.clear()

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._begun.clear()
        self._terms.close()


class DeltaAveraging:
    """Averaging by Adasum of parameter changes: each rank steps with its own gradients, then changes are combined."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        self._compression = arguments.users_compression("op=Average or Sum")
        refuse_wrapped(dict(arguments.named), None)
        self._params = [param for _, param in arguments.named_of(optimizer)]
        self._before: list[torch.Tensor] = []
        self._arguments = arguments
        _make_equal(optimizer, arguments)
        names = {id(param): name for name, param in arguments.named}
        self._terms = StepTerms(optimizer, self._params, names, has_numbers=False)  # each rank steps independently
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._note),
            optimizer.register_step_post_hook(self._combine),
        ]

    def synchronize(self) -> None:
        """Do nothing: gradients remain this rank's own."""

    def set_passes(self, passes: int) -> None:
        """Do nothing: gradients are added up until a step."""

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        self._before = [param.detach().clone() for param in self._params]
        self._detail = self._terms.of(self._params)

    @torch.no_grad()
    def _combine(self, *_: Any) -> None:
        changes = [param - before for param, before in zip(self._params, self._before, strict=True)]
        sent, undo = compressed(changes, self._compression)
        combined = undo(synchronize(_begin_all_reduce(sent, "adasum.changes", self._arguments, self._detail)))
        for param, before, change in zip(self._params, self._before, combined, strict=True):
            param.copy_(before + change)
        self._before = []
        self._terms.end_step()

    def detach(self) -> None:
        """Stop combining."""
        for hook in self._hooks:
            hook.remove()
        self._terms.close()


Averaging = AttachedAveraging | NamedAveraging | DeltaAveraging


def _begin_all_reduce(tensors: Sequence[torch.Tensor], name: str, arguments: Arguments, detail: str) -> int:
    """Begin to reduce ``tensors`` in place; return the handle. ``detail``: what must be the same on all ranks."""
    call = AllReduce(name, arguments.process_set, arguments.op)
    call.in_place, call.alone, call.detail = True, False, detail
    return call.submit(tensors).handle(call.finish)


def _make_equal(optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
    """Copy the first rank's named parameters and optimizer state to all. Collective."""
    with Communicator(members_of(arguments.process_set).group) as communicator:
        share_tensors(communicator, dict(arguments.named), src=0)
        order = names_in_order(optimizer, dict(arguments.named))
        check_same_lines(communicator.channel.all_gather_bytes, order, ORDER)
        broadcast_state(communicator, optimizer, src=0)


def _nothing() -> None:
    """Do nothing: the group's first parameter ends the operation."""


def _dense_gradient(param: torch.Tensor) -> torch.Tensor:
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad.to_dense() if param.grad.is_sparse else param.grad.detach()


def sparse_parameters(optimizer: torch.optim.Optimizer, named: Named) -> set[torch.Tensor]:
    """Return the ``named`` parameters whose gradients are sparse.

    These are all of a ``SparseAdam``'s, and weights of embeddings with ``sparse=True``, found among all objects of the
    process.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {param for _, param in named}
    ids = {id(param) for _, param in named}
    kinds = _with_subclasses(torch.nn.Embedding) | _with_subclasses(torch.nn.EmbeddingBag)
    found: set[Any] = set()
    for embedding in [candidate for candidate in gc.get_objects() if type(candidate) in kinds]:
        weight = getattr(embedding, "weight", None)  # one that is half constructed has none
        if id(weight) in ids and getattr(embedding, "sparse", False):
            found.add(weight)
    return found


def _with_subclasses(kind: type) -> set[Any]:
    """Return ``kind`` and all classes that derive from it."""
    found: set[Any] = {kind}
    derived: Any
    for derived in kind.__subclasses__():
        found |= _with_subclasses(derived)
    return found

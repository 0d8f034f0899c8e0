"""Plans of steps: the kernel calls for a group's parameters, made once and reused while they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from pycomm import kernels
from pycomm.collectives.layout import require_dense
from pycomm.collectives.tensor_memory import overlapping
from pycomm.kernels.arrays import PackScaling, PreparedGroup, PreparedStep
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.partition import Partition
from pycomm.optim.shards import Shards, matched
from pycomm.optim.targets import (
    Group,
    StepTarget,
    buffers_of,
    copies_of,
    counts_of,
    grads_of,
    mirrors_of,
    next_steps,
    weights_of,
)
from pycomm.torch_internals import is_dtensor, local_of, note_writes

Tensors = Mapping[torch.Tensor, torch.Tensor]

FIRST = "first"
"""Kind of targets whose first step differs from later ones."""

_UNSCALED = PackScaling()
_MOST_PLANS = 4
"""Most plans kept for a group: with experts or frozen layers, different gradients are missing in different steps."""


class Scratches(dict[str, kernels.Scratch]):
    """Scratch memory by name, made on first access."""

    def __missing__(self, name: str) -> kernels.Scratch:
        self[name] = kernels.Scratch()
        return self[name]


class PartKey(NamedTuple):
    """Properties that targets of the same kernel calls share; ``kind`` is the rule's.

    ``turn``: 0, or one more than the turn of an earlier target with the same memory (parameters tied by ``.data``).
    """

    dtype: torch.dtype
    device: torch.device
    has_copies: bool
    taken: int
    kind: Hashable
    turn: int


@dataclass(frozen=True)
class PlanPart:
    """Targets that are stepped by the same kernel calls.

    Attributes:
        label: name that is unique within the optimizer.
    """

    key: PartKey
    arrays: PreparedStep
    size: int
    scratches: Scratches
    label: str

    def scratch(self, name: str) -> kernels.Scratch:
        """Return the scratch memory that the kernel ``name`` keeps from step to step."""
        return self.scratches[f"{self.label} {name}"]

    def moved(self, scaling: PackScaling) -> PackScaling:
        """Return ``scaling`` with GradScaler's tensors on the part's device."""
        found, device = scaling.found, self.key.device
        if found is None or found.device == device:
            return scaling
        divisor = None if scaling.divisor is None else scaling.divisor.to(device, non_blocking=True)
        return scaling._replace(divisor=divisor, found=found.to(device, non_blocking=True))

    def numbers(self, count: int) -> torch.Tensor:
        """Return a new float64 tensor of ``count`` elements on the device."""
        return torch.empty(count, dtype=torch.float64, device=self.key.device)


class ByNorms(NamedTuple):
    """Halves of a step that depends on norms.

    Attributes:
        measure: returns squared norms, float64: a row for the weights, and one for the vectors they are compared
            with; ``None`` if the step of this part depends on no norms.
        apply: completes the step, given the squared norms or ``None``.
    """

    measure: Callable[[Group, PlanPart, PackScaling], torch.Tensor | None]
    apply: Callable[[Group, PlanPart, PackScaling, torch.Tensor | None], None]

    def run(self, group: Group, part: PlanPart, scaling: PackScaling) -> None:
        """Take the step of a part whose parameters are all whole."""
        self.apply(group, part, scaling, self.measure(group, part, scaling))


@dataclass(frozen=True)
class Rule:
    """How kernels step for one class of optimizers.

    Attributes:
        kernel: name of the (first) kernel.
        keys: returns the names of a group's states, with ``None`` for unused ones.
        kind: returns a property that targets of the same calls must share.
        has_counts: whether steps are counted, under "step".
        same_counts: whether targets of the same calls must have the same count, unless the kernels count.
        waits: returns whether a group's step depends on whether earlier steps were skipped, so the host must know.
        initial: returns the initial value of a group's states.
        norms: the two halves of ``run``, if it requires norms of whole parameters.
    """

    kernel: str
    keys: Callable[[Group], tuple[str | None, ...]]
    run: Callable[[Group, PlanPart, PackScaling], None]
    kind: Callable[[Group, StepTarget], Hashable] = lambda group, target: None
    has_counts: bool = False
    same_counts: bool = False
    waits: Callable[[Group], bool] = lambda group: False
    initial: Callable[[Group], float] = lambda group: 0.0
    norms: ByNorms | None = None


@dataclass(frozen=True)
class Step:
    """Arguments of :func:`step_by_rule`."""

    rule: Rule
    optimizer: torch.optim.Optimizer
    masters: Tensors | None
    grads: Tensors
    counted_by_kernels: bool
    partition: Partition | None = None

    def settings(self, group: Group) -> Hashable:
        """Return the settings that a plan of ``group`` depends on, in addition to its tensors."""
        partition = self.partition
        shared = None if partition is None else ref(partition)
        exclude, count = group.get("exclude"), len(group["params"])
        return self.rule, self.rule.keys(group), exclude, count, self.counted_by_kernels, shared


class StepPlan:
    """Kernel calls of one parameter group, for the parameters that have a gradient now.

    Attributes:
        params: parameters of each part, if some are DTensors; a plan of those is made for one step only.

    Raises:
        ValueError: a gradient is sparse, or a parameter has gaps or overlaps in memory.
    """

    def __init__(self, step: Step, group: Group, scratches: Scratches, label: str) -> None:
        self._rule, self._settings = step.rule, step.settings(group)
        targets = _targets(step, group)
        members = _split(step, group, targets)
        self._is_split = any(is_dtensor(target.param) for target in targets.values())
        self._has_norms_of_parts = self._is_split or step.partition is not None
        # No references to ordinary parameters, which the plan may outlive.
        self.params = [[target.param for target in some.values()] for some in members.values() if self._is_split]
        # Labelled by number: with a value such as the step count, each step would allocate new scratch memory.
        self._parts = [
            _part(step, group, key, list(some.values()), scratches, f"{label} {number}")
            for number, (key, some) in enumerate(members.items())
        ]
        self._written = [t for target in targets.values() for t in target.written()]
        part_of, begins = [-1] * len(group["params"]), [0] * len(group["params"])
        for number, some in enumerate(members.values()):
            for index, target in some.items():
                part_of[index], begins[index] = number, target.span.begin
        self._prepared = self._prepare(step, group, part_of, begins)
        shared = {} if step.partition is None else targets
        self._others = [index for index, target in shared.items() if target.span.begin == target.span.end]
        self._homes = self._addresses(step, group)

    def _prepare(self, step: Step, group: Group, part_of: list[int], begins: list[int]) -> PreparedGroup | None:
        if step.grads or self._is_split or any(part.key.kind == FIRST for part in self._parts):
            return None
        rule, arrays = step.rule, [part.arrays for part in self._parts]
        prepared = PreparedGroup(arrays, rule.keys(group), rule.has_counts, rule.same_counts)
        remembered = prepared.remember(group["params"], step.optimizer.state, step.masters, part_of, begins)
        return prepared if remembered else None

    def _addresses(self, step: Step, group: Group) -> list[int]:
        """Return the addresses of state that only other ranks step: its arrays are empty here, and show no change."""
        keys = [key for key in step.rule.keys(group) if key is not None]
        entries = [step.optimizer.state.get(group["params"][index], {}) for index in self._others]
        found = [entry.get(key) for entry in entries for key in keys]
        return [0 if tensor is None else tensor.data_ptr() for tensor in found]

    @property
    def lasts(self) -> bool:
        """Whether the plan may fit other gradients than those it was made for."""
        return self._prepared is not None

    def renew(self, step: Step, group: Group) -> bool:
        """Take the group's new gradients and count a step; return whether the plan still fits, else do nothing."""
        assert self._prepared is not None
        if self._settings != step.settings(group) or self._homes != self._addresses(step, group):
            return False
        written = self._prepared.renew(group["params"], step.optimizer.state, step.masters)
        self._written = written or []
        return written is not None

    def measure(self, group: Group, scaling: PackScaling) -> list[torch.Tensor | None] | None:
        """Return the squared norms of parts of parameters by the kernels' first half; ``None`` if there is none."""
        halves = self._rule.norms
        if halves is None or not self._has_norms_of_parts:
            return None
        return [halves.measure(group, part, part.moved(scaling)) for part in self._parts]

    def run(self, group: Group, scaling: PackScaling, squares: list[torch.Tensor | None] | None = None) -> None:
        """Run the kernels, or after :meth:`measure` their second half, and release all tensors."""
        try:
            for number, part in enumerate(self._parts):
                if squares is None:
                    self._rule.run(group, part, part.moved(scaling))
                else:
                    assert self._rule.norms is not None
                    self._rule.norms.apply(group, part, part.moved(scaling), squares[number])
            note_writes(self._written)
        finally:
            self._written = []
            if self._prepared is not None:
                self._prepared.release()


def _targets(step: Step, group: Group) -> dict[int, StepTarget]:
    """Return the group's parameters that have a gradient, by index."""
    masters, targets = step.masters or {}, {}
    for index, p in enumerate(group["params"]):
        grad = step.grads.get(p, p.grad) if step.grads else p.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(f"a gradient of shape {list(p.shape)} is sparse; fused steps need dense ones")
        local = local_of(p)
        require_dense(local)
        weight, grad = local_of(masters.get(p, p)), local_of(matched(grad, p))
        copy = local.detach() if p in masters else None
        targets[index] = StepTarget(weight, grad, step.optimizer.state, p, copy, step.partition)
    return targets


def _split(step: Step, group: Group, targets: dict[int, StepTarget]) -> dict[PartKey, dict[int, StepTarget]]:
    """Count a step, and return the targets that can be stepped by the same calls, in order of appearance."""
    rule, counts = step.rule, [0] * len(targets)
    if rule.has_counts and not step.counted_by_kernels:
        counts = next_steps(list(targets.values()))
    turns = [0] * len(targets)
    for earlier, later in overlapping([target.weight for target in targets.values()]):
        turns[later] = max(turns[later], turns[earlier] + 1)
    parts: dict[PartKey, dict[int, StepTarget]] = defaultdict(dict)
    for (index, target), count, turn in zip(targets.items(), counts, turns, strict=True):
        taken, has_copies = count if rule.same_counts else 0, target.copy is not None
        key = PartKey(target.weight.dtype, target.param.device, has_copies, taken, rule.kind(group, target), turn)
        parts[key][index] = target
    return parts


def _part(
    step: Step, group: Group, key: PartKey, targets: list[StepTarget], scratches: Scratches, label: str
) -> PlanPart:
    rule = step.rule
    # The count comes first in a parameter's entry, as torch has it.
    counts = counts_of(targets) if rule.has_counts and step.counted_by_kernels else None
    initial = rule.initial(group)
    states = [None if name is None else buffers_of(targets, name, initial) for name in rule.keys(group)]
    arrays = PreparedStep(
        *(rule.kernel, weights_of(targets), grads_of(targets), copies_of(targets), states, counts),
        mirrors_of(targets),
    )
    arrays.taken = key.taken
    return PlanPart(key, arrays, len(targets), scratches, label)


class _Memory:
    """State of an optimizer between steps: plans by group, and scratch memory."""

    def __init__(self) -> None:
        self._plans: dict[int, list[StepPlan]] = defaultdict(list)
        self._scratches = Scratches()
        self._shards: tuple[tuple[int, ...], Shards] = (), Shards([])

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards:
        params = list(optimizer_parameters(optimizer))
        ids = tuple(map(id, params))
        if ids != self._shards[0]:
            self._shards = ids, Shards(params)
        return self._shards[1]

    def plan(self, number: int, step: Step, group: Group) -> StepPlan:
        """Return a plan for the step of a group, with its gradients taken."""
        plans = self._plans[number]
        plan = next((plan for plan in plans if not step.grads and plan.renew(step, group)), None)
        if plan is None:
            plan = StepPlan(step, group, self._scratches, str(number))
        else:
            plans.remove(plan)
        if plan.lasts:
            plans.insert(0, plan)
            del plans[_MOST_PLANS:]
        return plan


_memories: WeakKeyDictionary[torch.optim.Optimizer, _Memory] = WeakKeyDictionary()


def step_by_rule(
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    scaling: PackScaling = _UNSCALED,
    masters: Tensors | None = None,
    grads: Tensors | None = None,
    partition: Partition | None = None,
) -> None:
    """Take one step of every parameter that has a gradient.

    Args:
        scaling: scaling of the gradients. With ``found``, the kernels count steps, on the device.
        masters: masters of half-precision parameters, which are updated and cast back.
        grads: gradients to use instead of ``.grad``, by parameter.
        partition: partition of the step over ranks; requires a context of :meth:`Partition.step`.

    Norms of DTensors, and norms under a partition, are of whole parameters: one message for all, collective over
    the ranks that have parts.
    """
    memory = _memories.get(optimizer)
    if memory is None:
        memory = _memories[optimizer] = _Memory()
    step = Step(rule, optimizer, masters, grads or {}, scaling.found is not None, partition)
    measured: list[_Measured] = []
    for number, group in enumerate(optimizer.param_groups):
        scaled = scaling._replace(factor=-scaling.factor) if group.get("maximize") else scaling
        plan = memory.plan(number, step, group)
        squares = plan.measure(group, scaled)
        if squares is None:
            plan.run(group, scaled)
        else:
            measured.append((plan, group, scaled, squares))
    if measured:
        if partition is None:
            _add_up(measured, memory.shards(optimizer).add_up)
        else:
            _add_up(measured, lambda values, _: partition.add_up(values))
        for plan, group, scaled, squares in measured:
            plan.run(group, scaled, squares)


_Measured = tuple[StepPlan, Group, PackScaling, list[torch.Tensor | None]]
"""Plan whose second half is still to be run, its arguments, and the squared norms of each of its parts."""


_AddUp = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""Function that returns values summed over the ranks that have parts, given the parameter of each. Collective."""


def _add_up(measured: list[_Measured], add_up: _AddUp) -> None:
    """Replace the squares of this rank's parts by the squares of whole parameters. Collective."""
    places = [
        (squares, i, plan.params[i] if plan.params else [])
        for plan, _, _, squares in measured
        for i in range(len(squares))
    ]
    found = [(squares, i, params, own) for squares, i, params in places if (own := squares[i]) is not None]
    flat = torch.cat([own.reshape(-1) for *_, own in found]) if found else torch.zeros(0, dtype=torch.float64)
    total = add_up(flat, [param for _, _, params, _ in found for param in (*params, *params)])
    summed = torch.split(total, [own.numel() for *_, own in found])
    for (squares, i, *_), values in zip(found, summed, strict=True):
        squares[i] = values.view(2, -1)


def forget_plans(optimizer: torch.optim.Optimizer) -> None:
    """Drop the plans and scratch memory of ``optimizer``, with the tensors that they refer to."""
    _memories.pop(optimizer, None)

"""Changes of attached parameters (added, unfrozen, replaced or moved in their module), and of the order of buckets."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from pycomm.collectives.layout import is_capturing
from pycomm.collectives.recorder import told_with
from pycomm.descriptions import name_ranks
from pycomm.optim.attached import is_covered
from pycomm.optim.guard import is_around
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import Places, children_of, local_of, own_parameters
from pycomm.training.reducer.buckets import Slot, are_sorted, bucket_sizes
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.window import WEIGHS
from pycomm.training.reductions.fields import raise_different_new
from pycomm.untrusted import ListOf, parse
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork


class ParameterPlaces:
    """Places of parameters in their modules, which show when a module's parameters are replaced.

    A replacement alone is no mistake: ``torch.func.functional_call`` replaces parameters for one forward, pruning and
    adapters move them, and new ones may be added to the optimizer. It is a mistake if the new parameter is still there
    when backward gives it a gradient.

    Args:
        refuse: called with the name of such a parameter; raises the error.
    """

    def __init__(self, table: ParameterTable, refuse: Callable[[str], None]) -> None:
        self._found: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; a WeakSet would compare tensors by ==
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._refuse = weakref.WeakMethod(refuse)
        self._at_first = _attached_names(table)
        self.find(table)

    def find(self, table: ParameterTable) -> None:
        owners = [] if table.module is None else list(table.module.modules())
        known = {id(param) for _, param in table.named()}
        self._params = Places(map(own_parameters, owners), lambda param: id(param) in known)
        self._parts = Places(map(children_of, owners))
        params = () if table.module is None else table.module.parameters()
        self._found = {id(param): weakref.ref(param) for param in params}
        self._find_moved(table)

    def _find_moved(self, table: ParameterTable) -> None:
        before, now = self._at_first, _attached_names(table)
        table.moved = {name: now.get(name, "") for name in before | now if before.get(name) != now.get(name)}

    def look(self, table: ParameterTable) -> bool:
        """Watch parameters that have replaced others; return whether parameters were added to the module."""
        if table.module is None or self.are_unchanged():
            return False
        others = self._params.others()
        if any(isinstance(other, torch.Tensor) and not isinstance(other, torch.nn.Parameter) for other in others):
            return False  # functional_call's
        self._find_moved(table)
        lost, new = self.exchanged(table)
        has_moved = not self._parts.are_unchanged() or self._params.has_others_beside()
        has_moved = has_moved or any(other is None for other in others)
        if lost:
            for name, param in new.items():
                self._watch(table.module, name, param)
        if has_moved:
            self.find(table)
        return bool(new) and not lost

    def are_unchanged(self) -> bool:
        """Return whether no parameter and no part of the module has been added, moved or replaced."""
        return self._params.are_unchanged() and self._parts.are_unchanged()

    def exchanged(self, table: ParameterTable) -> tuple[bool, dict[str, torch.Tensor]]:
        """Return whether the module has lost parameters, and its new ones by name."""
        names = {} if table.module is None else dict(table.module.named_parameters())
        there = set(map(id, names.values()))
        lost = any(id(param) not in there and _is(self._found, param) for _, param in table.named())
        return lost, {
            name: p for name, p in names.items() if p.is_leaf and not (_is(self._found, p) or table.covers(p))
        }

    def _watch(self, module: torch.nn.Module, name: str, param: torch.Tensor) -> None:
        if not param.requires_grad or _is(self._watched, param):
            return
        self._watched[id(param)] = weakref.ref(param)
        owner, _, key = name.rpartition(".")
        register: Any = param.register_post_accumulate_grad_hook
        register(_InPlaceOf(name, own_parameters(module.get_submodule(owner)), key, self._refuse))


def _attached_names(table: ParameterTable) -> dict[str, str]:
    """Map the module's present names of attached parameters to their names in ``table``."""
    names = {id(param): name for name, param in table.named()}
    here = () if table.module is None else table.module.named_parameters(remove_duplicate=False)
    return {name: names[id(param)] for name, param in here if id(param) in names}


def _is(found: Mapping[int, weakref.ref[torch.Tensor]], param: torch.Tensor) -> bool:
    reference = found.get(id(param))
    return reference is not None and reference() is param


class _InPlaceOf:
    """Hook of a parameter that has replaced another one."""

    def __init__(self, name: str, params: Mapping[str, torch.Tensor | None], key: str, refuse: Any) -> None:
        self._name, self._params, self._key, self._refuse = name, params, key, refuse

    def __call__(self, param: torch.Tensor) -> None:
        refuse = self._refuse()
        if refuse is not None and self._params.get(self._key) is param and not is_covered(param):
            refuse(self._name)

    def __deepcopy__(self, memo: object) -> _InPlaceOf:
        return _InPlaceOf(self._name, {}, self._key, self._refuse)


class ParameterChanges:
    """Changes of an optimizer's and a module's parameters; all ranks must make the same.

    Ranks exchange them before the next forward. Without a forward of the module, ranks announce them by a flag with the
    gradients, and exchange them after these.
    """

    def __init__(
        self, engine: Engine, hook_parameters: Callable[[Iterable[Slot]], None], stop: Callable[[Exception], None]
    ) -> None:
        self._engine, self._table, self._communicator = engine, engine.table, engine.communicator
        self._hook_parameters, self._stop = weakref.WeakMethod(hook_parameters), weakref.WeakMethod(stop)
        self.places = ParameterPlaces(engine.table, self._refuse)
        self._holding = WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]]()  # see steps_attached()

    def hook(self, slots: list[Slot]) -> None:
        """Put ``slots`` into buckets, and hook their parameters."""
        self._table.make_buckets(slots, self._engine.lanes, self._engine.settings)
        self._hook(slots)
        self.places.find(self._table)

    def _hook(self, slots: list[Slot]) -> None:
        hook_parameters = self._hook_parameters()
        assert hook_parameters is not None
        hook_parameters(slots)

    def find_new(self) -> None:
        """Add parameters that are new or unfrozen. Collective, if there are any."""
        if not self._table.has_new():
            return
        self._require_replaceable()
        try:
            with self._communicator.channel.recorder.telling(json.dumps(self._table.new_names()[:1])):
                self._admit()
        except ValueError as error:
            raise self.explained(error) from None
        if not self._engine.is_waited_for():
            self.drop_replaced()

    def admit_late(self) -> None:
        """Add parameters that this backward() has used. Collective. They must have had equal values."""
        before = {name: param.detach().clone() for name, param in self._table.added_by_name().items()}
        self._admit()
        named = dict(self._table.named())
        changed = [not torch.equal(local_of(named[name]), local_of(value)) for name, value in before.items()]
        differs = torch.tensor(changed, dtype=torch.uint8)
        self._communicator.all_reduce(differs, "max")
        if bool(differs.any()):
            name = list(before)[int(differs.argmax())]
            raise RuntimeError(
                f"the new parameter {name!r} had different values on the ranks in this backward(): initialize it "
                "equally on all ranks, or call the module itself, which makes new parameters equal before its forward"
            )

    def _admit(self) -> None:
        self._table.find_new(self._communicator)
        self.hook(self._table.admit())

    def _require_replaceable(self) -> None:
        """Raise RuntimeError if a parameter has been replaced under a sharded step, where other ranks write to it."""
        replaced = self._table.replaced() if self._table.partition is not None else []
        if replaced:
            raise RuntimeError(
                f"parameter {replaced[0].name!r} of the optimizer has been replaced, which shard="
                f"{self._engine.settings.shard} does not allow: detach() before, and attach() afterwards"
            )

    def drop_replaced(self) -> None:
        """Forget replaced parameters, and rebuild the buckets without them."""
        replaced = self._table.replaced()
        if replaced and self._table.partition is None:
            self._table.drop(replaced)
            self._rebuild()
            self.places.find(self._table)

    def _rebuild(self) -> None:
        self._engine.reduction.source.keep(self._table.buckets)
        self._table.rebuild(self._engine.lanes, self._engine.settings, adopt=True)
        self._engine.hash_state()
        self._hook(self._table.slots())

    # Errors of ranks that do not make the same changes.

    def explained(self, error: ValueError) -> Exception:
        """Return ``error``, or its cause if only some ranks have new parameters, or weights."""
        told = dict(enumerate(told_with(error)))
        new = {rank: text if text.startswith("[") else "[]" for rank, text in told.items()}
        try:
            raise_different_new({rank: parse(text, ListOf(str), "new names") for rank, text in new.items()})
        except RuntimeError as found:
            return found
        weighted = [rank for rank, text in told.items() if text == WEIGHS]
        if 0 < len(weighted) < len(told):
            return RuntimeError(
                f"reducer.set_weight() was called on {name_ranks(weighted)}, and not on the others: make the first "
                "call in the same step on all ranks"
            )
        return error

    # Parameters of the module that the optimizer does not have.

    def before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if another optimizer is about to step what has replaced attached parameters.

        Without a call of the module, nothing else shows them.
        """
        table = self._table
        if self.places.are_unchanged():
            return
        lost, new = self.places.exchanged(table)
        params = set(map(id, optimizer_parameters(optimizer))) if lost else set()
        for name, param in new.items():
            if id(param) in params and param.grad is not None and not is_covered(param):
                self._refuse(name)

    def steps_attached(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another ``optimizer`` holds attached parameters, and is no wrapper around the attached one.

        Looked up once for each optimizer, until it gets other parameters.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._holding.get(optimizer)
        if known is None or known[0] != size:
            holds = any(map(self._table.knows, optimizer_parameters(optimizer)))
            known = self._holding[optimizer] = size, holds and not is_around(optimizer, self._table.optimizer)
        return known[1]

    def _refuse(self, name: str) -> None:
        """Raise RuntimeError, on all ranks: the module trains a parameter ``name`` that is not the attached one."""
        error = RuntimeError(
            f"rank {self._communicator.rank}: parameter {name!r} of the module is another object than the one that "
            "was attached (load_state_dict(assign=True), a layer or a parametrization that was exchanged), and nothing "
            "averages its gradient. detach(), then attach() the optimizer that has the module's parameters now; or put "
            "the new parameter into the attached optimizer's groups, on all ranks"
        )
        stop = self._stop()
        if stop is not None:
            stop(error)
        raise error


_PATIENCE = 2.0  # seconds


class ArrivalOrder:
    """Order in which the gradients of the first reduction arrived on rank 0, by which all ranks sort their buckets.

    A bucket is sent once those before it have been sent. So a gradient that arrives late, or never, delays all buckets
    behind it. The reverse order of the parameters, in which buckets begin, is a guess.

    The buckets stay as they are where nothing is sent before the last gradient has arrived, where other ranks or a
    newcomer rely on their layout, and where the method measures each of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._table = engine, engine.table
        settings = engine.settings
        is_kept = engine.members.survives or engine.table.partition is not None or settings.compression.measures
        self._is_open = not is_kept and engine.communicator.size > 1 and settings.compression.clip_local_norm is None
        self._arrived: dict[Slot, None] = {}
        self._agreed = np.zeros(0, np.int64)  # places of the slots
        self._slots: list[Slot] = []
        self._work: Work | GpuWork | None = None  # that brings rank 0's

    def note(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated. Only the last accumulation of a pass counts."""
        if self._is_open:
            self._arrived.pop(slot, None)
            self._arrived[slot] = None

    def agree(self) -> None:
        """Begin to take rank 0's order. Collective after the first reduction; later calls do nothing.

        Does not wait: with several optimizers in one backward, ranks may complete them in different orders.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._slots, arrived = self._table.slots(), self._arrived
        places = {slot: len(arrived) - number for number, slot in enumerate(arrived)}
        self._agreed = np.array([places.get(slot, 0) for slot in self._slots], np.int64)
        self._work = self._engine.communicator.broadcast(self._agreed, 0, async_op=True)
        if isinstance(self._work, Work):
            # A failure would hide from others why a rank stops, or that it has ended normally.
            self._engine.communicator.channel.let_end = functools.partial(self._work.ends_within, _PATIENCE)

    def apply(self) -> bool:
        """Sort the buckets before the second reduction; return whether that has changed them.

        The addresses of gradients change, so a reduction that is captured into a CUDA graph keeps its buckets. Waits
        for a GPU, this once: what the first reduction counted, and whose gradient was not finite, is kept.
        """
        work, self._work = self._work, None
        if work is None:
            return False
        work.wait()
        engine, table = self._engine, self._table
        places = dict(zip(self._slots, self._agreed.tolist(), strict=True))
        self._slots, self._arrived = [], {}
        order = sorted(table.slots(), key=lambda slot: places.get(slot, 0))  # the first one to arrive is last
        sizes = bucket_sizes(engine.lanes, engine.settings, sum(slot.local.nbytes for slot in order), table.on_gpu)
        if is_capturing() or are_sorted(table.buckets, order, engine.settings.compression, *sizes):
            return False
        engine.reduction.source.keep(table.buckets)
        table.rebuild(engine.lanes, engine.settings, adopt=True, order=order)
        engine.hash_state()
        return True

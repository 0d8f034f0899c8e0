"""Parameters of an attach, their buckets, and tensors that ``ignore`` names."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import share_tensors, signature
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import on_gpu
from pycomm.compression.base import method_stats
from pycomm.optim.attached import all_attached
from pycomm.optim.parameter_checks import check_parameters, refuse_overlaps
from pycomm.optim.parameters import checked_optimizer, optimizer_parameters, parameter_ids
from pycomm.optim.shards import Shards, part_of
from pycomm.optim.step_override import Stepper, stepper_of
from pycomm.torch_internals import by_plain_names, local_of
from pycomm.training.reducer.buckets import (
    SentBucket,
    Slot,
    bucket_sizes,
    check_sharding,
    make_buckets,
    state_of,
)
from pycomm.training.reducer.settings import OPTIMIZER_STATE, Options

if TYPE_CHECKING:
    from pycomm.training.reducer.partition import StepPartition


class Ignored:
    """Parameters and buffers of a module that ``ignore`` names.

    Attributes:
        patterns: the patterns, with names in place of tensors, to be compared between ranks.
        keeps_state: whether each rank keeps the optimizer's state that it has.
    """

    def __init__(self, patterns: Sequence[str] = (), tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.patterns = tuple(dict.fromkeys(patterns))
        self.keeps_state = OPTIMIZER_STATE in self.patterns
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def __bool__(self) -> bool:
        """Whether there are patterns of tensors."""
        return len(self.patterns) > self.keeps_state

    def matches(self, name: str) -> bool:
        """Return whether the parameter or buffer called ``name`` is ignored."""
        return any(_is_match(name, pattern) for pattern in self.patterns)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Ignore ``tensor``, too, such as one that has replaced an ignored one."""
        self._names[id(tensor)] = name, weakref.ref(tensor)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is known to be ignored."""
        return self.name_of(tensor) is not None

    def finds(self, param: torch.Tensor, module: torch.nn.Module | None) -> bool:
        """Return whether ``param``, which may be new, is ignored by its present name in ``module``."""
        if self and not self.covers(param) and module is not None:
            name = next((name for name, p in module.named_parameters() if p is param), None)
            if name is not None and self.matches(name):
                self.add(name, param)
        return self.covers(param)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of ``tensor`` if it is ignored."""
        name, reference = self._names.get(id(tensor), ("", None))
        return name if reference is not None and reference() is tensor else None


def ignored_of(
    ignore: Any, pairs: Sequence[tuple[str, torch.Tensor]], buffers: Sequence[tuple[str, torch.Tensor]]
) -> Ignored:
    """Resolve ``ignore`` among the named parameters ``pairs`` and ``buffers``."""
    named = dict([*pairs, *buffers])
    names = {id(tensor): name for name, tensor in reversed([*pairs, *buffers])}
    patterns: list[str] = []
    for item in _items(ignore):
        if isinstance(item, str) and item == OPTIMIZER_STATE:
            patterns.append(item)
        elif isinstance(item, str):
            if not any(_is_match(name, item) for name in named):
                raise ValueError(f"ignore has {item!r}, which matches {_nothing_of(named, item)}")
            patterns.append(item)
        elif isinstance(item, torch.Tensor):
            if id(item) not in names:
                raise ValueError(f"ignore has a tensor of shape {list(item.shape)}, which is not among the model's")
            patterns.append(names[id(item)])
        else:
            raise TypeError(
                f"ignore has {item!r}, wanted names of parameters, patterns such as 'experts.*', parameters or modules"
            )
    tensors = {name: tensor for name, tensor in named.items() if any(_is_match(name, p) for p in patterns)}
    return Ignored(patterns, tensors)


def _items(ignore: Any) -> list[Any]:
    """Return the items of ``ignore``, with modules replaced by their parameters and buffers."""
    if isinstance(ignore, torch.nn.Module):
        ignore = [ignore]
    if isinstance(ignore, (str, torch.Tensor)) or not isinstance(ignore, Iterable):
        shown = repr(ignore) if isinstance(ignore, str) else f"a {type(ignore).__name__}"
        raise TypeError(f"ignore is {shown}, wanted a list of names, patterns, parameters or modules")
    items: list[Any] = []
    for item in ignore:
        own = [*item.parameters(), *item.buffers()] if isinstance(item, torch.nn.Module) else [item]
        if not own:
            raise ValueError(f"ignore has a {type(item).__name__} without parameters and buffers")
        items += own
    return items


def _is_match(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _nothing_of(named: Mapping[str, object], pattern: str) -> str:
    if any(name.startswith(f"{pattern}.") for name in named):
        return f"no parameter or buffer: for all of that module write {pattern + '.*'!r}"
    return f"none of the {len(named)} parameters and buffers, {', '.join(map(repr, list(named)[:3]))} ..."


class ParameterTable:
    """Table of an optimizer's parameters: the trainable ones, sorted into buckets, and the frozen ones.

    Args:
        module: the module, if ``attach`` was given one; it names parameters that are added later.

    Attributes:
        ranks: global ranks that gradients are averaged over; ``attach`` sets it.
        shards: the trainable parameters that are DTensors, with the ranks that their parts are on.
        partition: partition of a sharded step; ``None`` without one.
        moved: names of the module that now refer to another attached parameter than when it was attached, with that
            parameter's name; "" if none. Shows exchanged, tied or dropped layers; all ranks must do the same.
        rank_local: names of the module's other parameters that differ between ranks and stay so.
    """

    rank_local: frozenset[str] = frozenset()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[str, torch.Tensor],
        module: torch.nn.Module | None,
        ignored: Ignored | None = None,
    ) -> None:
        self.optimizer, self.module = optimizer, module
        self.ignored = Ignored() if ignored is None else ignored
        self._slots: dict[int, Slot] = {}
        own = set(map(id, optimizer_parameters(optimizer)))
        self._frozen = {id(param): Slot(name, param, in_optimizer=id(param) in own) for name, param in names.items()}
        self.buckets: list[SentBucket] = []
        self.ranks: tuple[int, ...] = ()
        self.shards = Shards([])
        self.partition: StepPartition | None = None
        self.earlier: dict[str, float] = {}
        self.moved: Mapping[str, str] = {}
        self._trained: tuple[list[Slot], list[tuple[str, torch.Tensor]]] = [], []
        self.takes_written = False
        self._known_ids, self._kept_ids = list[int](), list[int]()  # when none was new, when none was replaced
        devices = [p.device for p in names.values() if p.device.type != "meta"]
        self.device = devices[0] if devices else torch.device("cpu")
        self.on_gpu = any(on_gpu(p) for p in names.values())

    @property
    def stepper(self) -> Stepper:
        """Object that describes how the optimizer steps now."""
        return stepper_of(self.optimizer)

    @property
    def partial(self) -> StepPartition | None:
        """The partition, if each rank has only its own part of the averaged gradients."""
        return None if self.partition is None or self.partition.has_full_grad else self.partition

    def slots(self) -> list[Slot]:
        """Return the slots of all trainable parameters."""
        return list(self._slots.values())

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters with their names, trainable ones first."""
        return [(slot.name, slot.param) for slot in (*self._slots.values(), *self._frozen.values())]

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Return the trained parameters with their names; the same list while none is added."""
        slots = self.slots()
        if slots != self._trained[0]:
            self._trained = slots, [(slot.name, slot.param) for slot in slots]
        return self._trained[1]

    def locals(self) -> list[tuple[str, torch.Tensor]]:
        """Return the same as :meth:`named`, with this rank's part of each DTensor."""
        return [(slot.name, slot.local) for slot in (*self._slots.values(), *self._frozen.values())]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the module's buffers with their names, and this rank's part of those that are DTensors."""
        named = () if self.module is None else self.module.named_buffers()
        return [(name, local_of(b)) for name, b in named if not self.ignores(name, b)]

    def module_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the module, without what is ignored or was found to be rank-local."""
        if self.module is None:
            return {}
        named = by_plain_names(self.module, dict([*self.module.named_parameters(), *self.module.named_buffers()]))
        return {name: t for name, t in named.items() if name not in self.rank_local and not self.ignores(name, t)}

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the module's tensor ``name`` is ignored."""
        return self.ignored.covers(tensor) or self.ignored.matches(name)

    def labels(self) -> dict[str, str]:
        """Return the keys of trainable parameters in saved state, by name: with the part that this rank has, if any."""
        parts = {slot.name: part_of(slot.param) for slot in self._slots.values()}
        return {name: f"{name}[{part}]" if part else name for name, part in parts.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by name, or this rank's part of DTensors."""
        return {slot.name: grad for slot in self._slots.values() if (grad := slot.owner.grad) is not None}

    def drop_gradients(self, error: BaseException | None = None) -> None:
        """Set ``.grad`` of all trainable parameters to ``None``. ``error``: why they could not be reduced."""
        for slot in self._slots.values():
            slot.param.grad, slot.has_wide = None, False
        if error is not None and self.partition is not None:
            self.partition.reduction_failed(error)

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or will be once it is unfrozen."""
        return id(param) in self._slots or id(param) in self._frozen

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or left alone as ``ignore`` says."""
        return self.knows(param) or self.ignored.covers(param)

    def names_in_optimizer(self) -> list[str]:
        """Return the names of the parameters that are in the optimizer's groups."""
        ids = set(parameter_ids(self.optimizer))
        return [name for name, param in self.named() if id(param) in ids]

    def unfrozen(self) -> list[Slot]:
        """Return the slots of parameters that have become trainable and have not been admitted yet.

        With ``takes_written``, frozen parameters whose ``.grad`` the user has set are included.
        """
        written = self.takes_written
        return [s for s in self._frozen.values() if s.param.requires_grad or (written and s.param.grad is not None)]

    def admit(self) -> list[Slot]:
        """Move unfrozen parameters to the trainable ones, and return their slots; they have no buckets yet."""
        slots = self.unfrozen()
        for slot in slots:
            del self._frozen[id(slot.param)]
            self._slots[id(slot.param)] = slot
        self.shards = Shards(param for _, param in self.named())  # frozen ones take part in sums, too
        return slots

    def make_buckets(self, slots: list[Slot], lanes: Sequence[Communicator], settings: Options) -> None:
        """Sort ``slots`` into new buckets, which share ``lanes``."""
        most, first = bucket_sizes(lanes, settings, sum(slot.local.nbytes for slot in slots), self.on_gpu)
        partition: Any = self.partition
        made = make_buckets(
            *(slots, settings.compression, lanes, most, settings.tuning.algorithm),
            earlier=self.buckets,
            first_bytes=first,
            **({} if partition is None else {"place": partition.spans.sort_key, "divide": partition.divide}),
        )
        if self.partition is not None and made:
            self.partition.adopt(made)
        self.buckets += made

    def rebuild(
        self,
        lanes: Sequence[Communicator],
        settings: Options,
        *,
        adopt: bool,
        order: Sequence[Slot] | None = None,
    ) -> None:
        """Sort all parameters into new buckets with the old ones' state, and with their gradients if ``adopt``.

        ``order`` replaces the order of :meth:`slots`.
        """
        exchanges = [sent.exchange for sent in self.buckets]
        num_bytes = sum(exchange.bytes_sent for exchange in exchanges) + self.earlier.get("bytes_sent", 0)
        self.earlier = {**method_stats(exchanges, self.earlier), "bytes_sent": num_bytes}
        state, slots = state_of(self.buckets), self.slots() if order is None else list(order)
        self._slots = {id(slot.param): slot for slot in slots}
        expected = {slot: slot.expected for slot in slots}
        num_writes = {slot: slot.grad_version() - slot.version for slot in slots if adopt and slot.holds_average()}
        self.buckets = []
        for slot in slots:
            slot.sent = None  # frees its memory, unless that is a .grad
        self.make_buckets(slots, lanes, settings)
        for sent in self.buckets:
            sent.exchange.load_state(state)
            sent.expect([expected[slot] for slot in sent.slots])
            for slot in sent.slots:
                if slot in num_writes:
                    slot.move_to_bucket(num_writes[slot])
            if adopt:
                sent.bucket.note_handed_out()

    def has_new(self) -> bool:
        """Return whether parameters were added by ``add_param_group``, or unfrozen."""
        if self._frozen and self.unfrozen():
            return True
        ids = parameter_ids(self.optimizer)
        if ids != self._known_ids and self._added():
            return True
        self._known_ids = ids
        return False

    def _added(self) -> list[torch.Tensor]:
        """Return the optimizer's parameters that are neither known nor ignored."""
        unknown = [p for p in optimizer_parameters(self.optimizer) if not self.knows(p)]
        return [p for p in unknown if not self.ignored.finds(p, self.module)]

    def new_names(self) -> tuple[str, ...]:
        """Return the names of added and unfrozen parameters."""
        if not self.has_new():
            return ()
        return (*(slot.name for slot in self.unfrozen()), *self.added_by_name())

    def frozen_of_trained(self) -> tuple[str, ...]:
        """Return the names of frozen parameters in buckets, if a gradient is missing."""
        if all(sent.ready() for sent in self.buckets):
            return ()
        return tuple(slot.name for slot in self._slots.values() if not slot.param.requires_grad)

    def added_by_name(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's parameters that are neither known nor ignored, by name."""
        added = self._added()
        named = {} if self.module is None else by_plain_names(self.module, dict(self.module.named_parameters()))
        names = {id(p): name for name, p in named.items()}
        number = len(self._slots) + len(self._frozen)
        return {names.get(id(p), f"added.{number + i}"): p for i, p in enumerate(added)}

    def refuse_overlaps(self, moved: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if one of ``moved``, which ``shard`` moves, shares memory with another tensor known here."""
        others = [] if self.module is None else [*self.module.named_parameters(), *self.module.named_buffers()]
        refuse_overlaps(moved, "shard=", [*all_attached(), *self.named(), *others])

    def find_new(self, communicator: Communicator) -> None:
        """Add new parameters to the table, for :meth:`admit` to return. Collective between ranks that all have some.

        Raises:
            TypeError, ValueError: a parameter cannot be averaged on some rank, or they differ; on every rank.
        """
        new = self.added_by_name()

        def lines(_: None) -> dict[str, list[str]]:
            check_parameters({**new, **{slot.name: slot.param for slot in self.unfrozen()}}, self.device)
            check_sharding(new, self.ranks, self.module)
            if self.partition is not None:
                self.refuse_overlaps(new)
            named = [*((slot.name, slot.param) for slot in self.unfrozen()), *new.items()]
            return {"new parameter": [f"{name}: {signature(p)}" for name, p in named]}

        agreed(communicator.channel.all_gather_bytes, None, "take a new parameter", lines)
        share_tensors(communicator, new, src=0)
        self._frozen.update({id(p): Slot(name, p, in_optimizer=True) for name, p in new.items()})

    def replaced(self) -> list[Slot]:
        """Return the slots of parameters that have been removed from the optimizer."""
        ids = parameter_ids(self.optimizer)
        if ids == self._kept_ids:
            return []
        own = set(ids)
        slots = (*self._slots.values(), *self._frozen.values())
        replaced = [slot for slot in slots if slot.in_optimizer and id(slot.param) not in own]
        if not replaced:
            self._kept_ids = ids
        return replaced

    def drop(self, slots: Iterable[Slot]) -> None:
        """Forget ``slots``; :meth:`rebuild` then makes buckets without them."""
        self._known_ids = []  # a new parameter may get the id of a dropped one
        for slot in slots:
            slot.leave_bucket()
            self._slots.pop(id(slot.param), None)
            self._frozen.pop(id(slot.param), None)
            if slot.hook is not None:
                slot.hook.remove()

    def require_no_unknown_gradients(self) -> None:
        """Raise RuntimeError if a parameter got a gradient before it was admitted."""
        for slot in self.unfrozen():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} has not been averaged: the parameter was unfrozen after attach, "
                    "and no parameter that pycomm already knew took part in this backward; attach the module itself, "
                    "not its named_parameters()"
                )

    def require_as_attached(self) -> None:
        """Raise RuntimeError if a parameter no longer has the shape, dtype or device of its place in a bucket.

        Its memory order may change: its gradients then follow.
        """
        for sent in self.buckets:
            if change := sent.kinds.change():
                raise RuntimeError(f"{change}: detach() before the module is converted or moved, attach() afterwards")
            sent.bucket.follow()

    def clear(self) -> None:
        """Forget all parameters, and release the memory of the buckets."""
        self.buckets.clear()
        self._slots.clear()
        self._frozen.clear()
        self._trained = [], []


def table_of(optimizer: Any, model_or_named_parameters: Any, all_parameters: bool, ignore: Any = ()) -> ParameterTable:
    """Return the parameters of ``optimizer``, checked, with the names that the model gives them."""
    optimizer = checked_optimizer(optimizer, model_or_named_parameters, "attach")
    module = model_or_named_parameters if isinstance(model_or_named_parameters, torch.nn.Module) else None
    pairs = list(map(_pair, model_or_named_parameters) if module is None else module.named_parameters())
    ignored = ignored_of(ignore, pairs, [] if module is None else list(module.named_buffers()))
    names = by_plain_names(module, _names_of(optimizer, pairs, all_parameters, ignored))
    if ignored and not any(param.requires_grad for param in names.values()):
        raise ValueError(f"ignore={list(ignored.patterns)} leaves no parameter of the optimizer to average")
    check_parameters(names)
    return ParameterTable(optimizer, names, module, ignored)


def _names_of(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[str, torch.Tensor]], all_parameters: bool, ignored: Ignored
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters, or with ``all_parameters`` all, by name in the model's order.

    Ignored ones are left out.
    """
    wanted = {id(p) for p in optimizer_parameters(optimizer)}
    names: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, param in pairs:
        if name in names and names[name] is not param:
            raise ValueError(f"two parameters are called {name!r}")
        if ignored.covers(param):
            wanted.discard(id(param))
        elif id(param) in wanted or (all_parameters and id(param) not in taken):
            names[name] = param
            taken.add(id(param))
            wanted.discard(id(param))
    if wanted:
        shape = next(list(p.shape) for p in optimizer_parameters(optimizer) if id(p) in wanted)
        raise ValueError(
            f"{len(wanted)} parameter(s) of the optimizer are not among model_or_named_parameters, "
            f"the first of shape {shape}: was it given a different model?"
        )
    return names


def _pair(item: object) -> tuple[str, torch.Tensor]:
    if isinstance(item, tuple) and len(item) == 2:
        name, param = item
        if isinstance(name, str) and isinstance(param, torch.Tensor):
            return name, param
    raise TypeError(
        f"model_or_named_parameters yields {type(item).__name__}, wanted a torch.nn.Module or (name, tensor) pairs "
        "as from named_parameters()"
    )

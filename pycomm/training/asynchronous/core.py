"""Core of a server: its shard of the parameters, the optimizer that steps it, and the effect of pulls and pushes."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm.optim import fuse
from pycomm.optim.fused import RULES
from pycomm.training.asynchronous.buffers import ServerBuffers
from pycomm.training.asynchronous.modes import Compensator, Rules
from pycomm.training.asynchronous.packing import Unpackers
from pycomm.training.checkpoint.files import DamagedError, checked
from pycomm.untrusted import ANYTHING, COUNT, INTEGER, ListOf, MapOf, OneOf, PairOf


@dataclass(frozen=True)
class Piece:
    """Elements ``begin`` to ``end`` of parameter ``index``, held by one server."""

    index: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@contextlib.contextmanager
def flat_parts(params: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> Iterator[list[torch.Tensor]]:
    """Return a context that yields flat tensors with the values of ``pieces``; writes to them reach ``params``."""
    flats = {piece.index: params[piece.index].detach().reshape(-1) for piece in pieces}
    yield [flats[piece.index][piece.begin : piece.end] for piece in pieces]
    for index, flat in flats.items():
        if not params[index].is_contiguous():  # then they are copies
            params[index].detach().copy_(flat.view(params[index].shape))


def shard_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which servers hold and step parameters of ``dtype``: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cut(sizes: Sequence[int], num_shards: int, *, anywhere: bool) -> list[list[Piece]]:
    """Return the pieces of each shard, in order, for parameters with ``sizes`` elements.

    Without ``anywhere``, a cut through a parameter moves to the nearest border between two parameters.
    """
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    cuts = [total * k // num_shards for k in range(num_shards + 1)]
    if not anywhere:
        borders = [0, *ends]
        cuts = [0, *(min(borders, key=lambda b: abs(b - cut)) for cut in cuts[1:-1]), total]
    shards: list[list[Piece]] = []
    for first, last in itertools.pairwise(cuts):
        pieces = []
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            begin = end - size
            low, high = max(first, begin), min(last, end)
            if low < high:
                pieces.append(Piece(index, low - begin, high - begin))
        shards.append(pieces)
    return shards


_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is known to update each element independently: then parameters may be cut."""
    kind = type(optimizer)
    return any(kind is getattr(torch.optim, name, None) for name in _ELEMENTWISE)


def group_sizes(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return how many parameters a :class:`ShardOptimizer` of ``pieces`` has in each of its groups."""
    ends = list(itertools.accumulate(len(group["params"]) for group in optimizer.param_groups))
    indices = sorted(piece.index for piece in pieces)
    return tuple(
        bisect.bisect_left(indices, end) - bisect.bisect_left(indices, begin)
        for begin, end in itertools.pairwise([0, *ends])
    )


@contextlib.contextmanager
def explained(text: str) -> Iterator[None]:
    """Turn any error inside, such as an error of a user's object, into a ValueError that begins with ``text``."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{text}: {type(error).__name__}: {error}") from error


_LEAST_PACKED, _TIMES_SHARD = 1 << 16, 4


def packed_limit(shard_bytes: int) -> int:
    """Return how many bytes a packed push may have at most."""
    return _LEAST_PACKED + _TIMES_SHARD * shard_bytes


@dataclass
class _Schedule:
    scheduler: Any
    samples: float | None
    num_steps: int = 0


class ShardOptimizer:
    """Optimizer of the pieces of one shard, which lie one after the other in ``memory``.

    The user's optimizer itself steps: its groups keep their options, but now hold the shard's parameters only.
    A whole parameter remains the same object, with its values in ``memory``. A part of a parameter becomes a flat
    parameter; a half-precision one becomes a float32 parameter of its shape.

    Args:
        optimizer: the user's.
        pieces: pieces of the optimizer's parameters, numbered in the order of its groups.
        memory: flat tensor for all elements, which is overwritten with the parameters' values.

    Attributes:
        num_updates: number of steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], memory: torch.Tensor) -> None:
        self._optimizer, self.memory, self.num_updates = optimizer, memory, 0
        self._params: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._weight = self._samples = 0.0
        self._count, self._all_samples = 0, 0.0
        self._schedules: list[_Schedule] = []
        self._take_over(pieces)
        if type(optimizer) in RULES:
            fuse(optimizer)

    @torch.no_grad()
    def _take_over(self, pieces: Sequence[Piece]) -> None:
        by_index = {piece.index: piece for piece in pieces}
        index, found = 0, dict[int, tuple[int, list[torch.Tensor]]]()
        for group in self._optimizer.param_groups:
            kept: list[torch.Tensor] = []
            for p in group["params"]:
                if index in by_index:
                    found[index] = len(kept), kept
                    kept.append(p)
                else:
                    self._optimizer.state.pop(p, None)
                index += 1
            group["params"] = kept
        begin = 0
        for piece in pieces:
            position, kept = found[piece.index]
            view = self.memory[begin : begin + piece.size]
            begin += piece.size
            kept[position] = self._in_memory(kept[position], piece, view)
            self._params.append(kept[position])

    def _in_memory(self, p: torch.Tensor, piece: Piece, view: torch.Tensor) -> torch.Tensor:
        view.copy_(p.detach().reshape(-1)[piece.begin : piece.end])
        is_whole = piece.size == p.numel()
        if is_whole and p.dtype == view.dtype:
            p.data = view.view(p.shape)
            return p
        part = nn.Parameter(view.view(p.shape) if is_whole else view)
        state = self._optimizer.state
        if p in state:
            state[part] = {
                key: value.reshape(-1)[piece.begin : piece.end].to(view.dtype, copy=True).view(part.shape)
                if isinstance(value, torch.Tensor) and value.shape == p.shape
                else value
                for key, value in state.pop(p).items()
            }
        return part

    def collect(self, gradient: torch.Tensor, samples: float, rate: float) -> None:
        """Add ``gradient`` to the next update, with the learning rate scaled by ``rate``.

        The gradient must not change until :meth:`update`, or :meth:`copy_collected`.
        """
        weight = samples * rate
        self._all_samples += samples
        if self._count == 0:
            self._sum = gradient
        else:
            assert self._sum is not None
            if self._count == 1:
                self._sum = self._sum * self._weight
            self._sum.add_(gradient, alpha=weight)
        self._count += 1
        self._weight += weight
        self._samples += samples

    def copy_collected(self) -> None:
        """Copy the collected gradient if it still is the caller's tensor."""
        if self._count == 1 and self._sum is not None:
            self._sum = self._sum.clone()

    def update(self) -> None:
        """Step by the weighted mean of the collected gradients."""
        gradient, weight = self._sum, self._weight
        assert gradient is not None
        if self._count > 1:
            gradient = gradient / weight if weight else gradient
        rate = weight / self._samples if self._samples else 1.0
        self._count, self._sum, self._weight, self._samples = 0, None, 0.0, 0.0
        begin = 0
        for p in self._params:
            if p.data_ptr() != self.memory[begin:].data_ptr():  # the module was converted
                p.data = self.memory[begin : begin + p.numel()].view(p.shape)
            p.grad = gradient[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rate != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * rate
        try:
            self._optimizer.step()
        finally:
            for group, before in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = before
            for p in self._params:
                p.grad = None
        self.num_updates += 1
        for each in self._schedules:
            due = self.num_updates if each.samples is None else self._all_samples / each.samples
            while each.num_steps + 1 <= due:
                each.scheduler.step()
                each.num_steps += 1

    def schedule(self, scheduler: Any, samples: float | None) -> None:
        """Step ``scheduler`` after each update, or after every ``samples`` samples."""
        self._schedules.append(_Schedule(scheduler, samples))

    def group_sizes(self) -> tuple[int, ...]:
        return tuple(len(group["params"]) for group in self._optimizer.param_groups)

    def state(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "updates": self.num_updates,
            "optimizer": self._optimizer.state_dict(),
            "sum": self._sum,
            "collected": [self._count, self._weight, self._samples, self._all_samples],
            "schedules": [[each.scheduler.state_dict(), each.num_steps] for each in self._schedules],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state`. Raise ValueError if it is of another model or optimizer."""
        if len(state["schedules"]) != len(self._schedules):
            raise ValueError(
                f"the checkpoint has {len(state['schedules'])} schedules, this server {len(self._schedules)}"
            )
        with explained("the optimizer rejects the saved state"):
            self._optimizer.load_state_dict(state["optimizer"])
            self.memory.copy_(state["memory"])
        self.num_updates, self._sum = state["updates"], state["sum"]
        self._count, self._weight, self._samples, self._all_samples = state["collected"]
        for each, (own, num_steps) in zip(self._schedules, state["schedules"], strict=True):
            with explained(f"a {type(each.scheduler).__name__} rejects the saved state"):
                each.scheduler.load_state_dict(own)
            each.num_steps = num_steps


_NUMBER = OneOf(INTEGER, float)  # sums of weights may have become infinite
_TENSOR = OneOf(None, torch.Tensor)
_SHAPE = {
    "settings": str,
    "shard": {
        "memory": torch.Tensor,
        "updates": COUNT,
        "optimizer": MapOf(ANYTHING, key=ANYTHING),
        "sum": _TENSOR,
        "collected": ListOf(_NUMBER, 4),
        "schedules": ListOf(PairOf(ANYTHING, COUNT)),
    },
    "mode": {
        "collected": COUNT,
        "workers": ListOf(COUNT),
        "clocks?": MapOf(INTEGER, key=COUNT),
        "done?": ListOf(COUNT),
    },
    "compensator": {"then": MapOf(torch.Tensor, key=COUNT), "squares": _TENSOR},
    "staleness": MapOf(COUNT, key=INTEGER),
    "counts": MapOf(COUNT),
    "lives": MapOf(str, key=COUNT),
    "last": MapOf(COUNT, key=COUNT),
    "pulled": MapOf(COUNT, key=COUNT),
    "buffers?": MapOf(torch.Tensor, key=COUNT),
}


@dataclass(frozen=True)
class StateSpec:
    """Form of the state that a server accepts.

    Attributes:
        settings: settings that updates depend on.
        size, dtype: of its shard of the parameters.
        groups: number of parameters in each group of its optimizer.
        mode: keys of the mode's state.
    """

    settings: str
    size: int
    dtype: torch.dtype
    groups: tuple[int, ...]
    mode: Collection[str]

    def check(self, state: Any, what: str) -> None:
        """Check ``state``; ``what`` names it in errors."""
        checked(state, {"settings": str, "shard": {"memory": torch.Tensor}}, what)
        if state["settings"] != self.settings:
            raise ValueError(
                f"{what}: the checkpoint is of a server with {state['settings']}, this one has {self.settings}"
            )
        memory = state["shard"]["memory"]
        if tuple(memory.shape) != (self.size,) or memory.dtype != self.dtype:
            found, here = f"{memory.numel()} elements of {memory.dtype}", f"{self.size} of {self.dtype}"
            raise ValueError(f"{what}: the checkpoint has {found}, and this shard {here}: it is of another model")
        checked(state, _SHAPE, what)
        self._check_groups(state["shard"]["optimizer"], what)
        problem = self._problem(state)
        if problem:
            raise DamagedError(f"{what} is malformed: {problem}")

    def _check_groups(self, optimizer: dict[Any, Any], what: str) -> None:
        """Compare the sizes of the groups, if the state has the form of torch's optimizers."""
        groups = optimizer.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            return
        found = [len(g["params"]) if isinstance(g["params"], list) else -1 for g in groups]
        if found != list(self.groups):
            here = f"this server's has {list(self.groups)}"
            raise ValueError(f"{what}: the checkpoint is of an optimizer with groups of {found} parameters, {here}")

    def _problem(self, state: dict[str, Any]) -> str:
        """Return how parts of ``state`` contradict each other or the server; "" if they do not."""
        mode, shard, then = state["mode"], state["shard"], state["compensator"]["then"]
        flat = [shard["sum"], state["compensator"]["squares"], *then.values()]
        if any(each is not None and (tuple(each.shape), each.dtype) != ((self.size,), self.dtype) for each in flat):
            return "it has a tensor that does not fit the shard"
        if not set(self.mode) <= mode.keys():
            return f"its mode has {sorted(mode)}, wanted {sorted(self.mode)}"
        if not set(mode["workers"]) <= mode.get("clocks", dict.fromkeys(mode["workers"])).keys():
            return "a worker has no clock"
        if mode["collected"] > 0 and (shard["sum"] is None or not shard["collected"][0] > 0):
            return "gradients that were collected are missing"
        if state["lives"].keys() != state["last"].keys():
            return "it does not know the last push of every worker"
        return ""


class Core:
    """State machine of a server. Its state depends only on the order of calls.

    Args:
        shard: parameters and their optimizer.
        mode: rules that say which gradients count, and which workers wait.
        compensator: corrects stale gradients.
        wire: dtype of parameters and gradients on the workers.
        unpackers: unpack compressed gradients; ``None`` without compression.
        settings: settings that a restarted server must share with this one.
        buffers: the model's buffers, if workers push them.

    Attributes:
        staleness: number of gradients by staleness, the number of updates since their parameters were pulled.
        counts: "pushes", "dropped" (pushes that came too late), "duplicates", and "lost" (pushes of which a restarted
            server knows nothing).
    """

    def __init__(
        self,
        shard: ShardOptimizer,
        mode: Rules,
        compensator: Compensator,
        wire: torch.dtype,
        unpackers: Unpackers | None = None,
        settings: str = "",
        buffers: ServerBuffers | None = None,
    ) -> None:
        self.shard, self.mode, self._compensator, self.wire = shard, mode, compensator, wire
        self.unpackers, self._settings, self.buffers = unpackers, settings, buffers
        self.staleness: Counter[int] = Counter()
        self.counts: Counter[str] = Counter(pushes=0, dropped=0, duplicates=0, lost=0)
        self._lives: dict[int, str] = {}  # unique token of each worker's process
        self._last: dict[int, int] = {}  # number of each worker's last push
        self._pulled: dict[int, int] = {}  # number of updates when it pulled

    def join(self, worker: int, life: str, acknowledged: int = 0) -> int:
        """Add ``worker``, whose process has the token ``life``; return how many of its pushes were lost since.

        Pushes up to number ``acknowledged`` were applied, by an earlier server if this one knows fewer.
        """
        if self._lives.get(worker) != life:
            if worker in self._lives:  # the mode knows the first process with that number from the start
                self.mode.leave(worker)
            self._forget(worker)
            self._pulled.pop(worker, None)
            self._lives[worker], self._last[worker] = life, 0
        self.mode.join(worker)
        lost = max(0, acknowledged - self._last[worker])
        self._last[worker] += lost
        self.counts["lost"] += lost
        return lost

    def leave(self, worker: int) -> None:
        """Remove ``worker``, and update if others waited for it only. It may join again."""
        self.mode.leave(worker)
        self._forget(worker)
        self.update_if_due()

    def _forget(self, worker: int) -> None:
        self._compensator.leave(worker)
        if self.unpackers is not None:
            self.unpackers.forget(worker)

    def pull(self, worker: int) -> int:
        """Note that ``worker`` gets the present parameters; return the number of updates so far."""
        self._pulled[worker] = self.shard.num_updates
        self._compensator.pulled(worker, self.shard.memory)
        return self.shard.num_updates

    def gradient_of(self, worker: int, number: int, sent: torch.Tensor) -> torch.Tensor:
        """Return the gradients in the data ``sent`` with a push, flat. They may share its memory."""
        if self.unpackers is not None:
            return self.unpackers.unpack(worker, number, sent)
        return sent.view(self.wire).to(self.shard.memory.dtype)

    @torch.no_grad()
    def push(self, worker: int, number: int, samples: float, gradient: torch.Tensor) -> None:
        """Apply push ``number`` of ``worker``, which has joined. Ignore it if it has been applied before."""
        if number <= self._last[worker]:
            self.counts["duplicates"] += 1
            return
        self._last[worker] = number
        staleness = self.shard.num_updates - self._pulled.get(worker, self.shard.num_updates)
        self.counts["pushes"] += 1
        self.staleness[staleness] += 1
        if not self.mode.push(worker, staleness):
            self.counts["dropped"] += 1
            return
        gradient = self._compensator.compensate(worker, gradient, self.shard.memory)
        self.shard.collect(gradient, samples, self._compensator.weight(staleness))
        if not self.update_if_due():
            self.shard.copy_collected()

    def update_if_due(self) -> bool:
        """Update with the collected gradients if the mode says so; return whether it did."""
        is_due = self.mode.num_collected > 0 and self.mode.is_due()
        if is_due:
            self.shard.update()
            self.mode.updated()
        return is_due

    def state(self) -> dict[str, Any]:
        return {
            "settings": self._settings,
            "shard": self.shard.state(),
            "mode": self.mode.state(),
            "compensator": self._compensator.state(),
            "staleness": dict(self.staleness),
            "counts": dict(self.counts),
            "lives": dict(self._lives),
            "last": dict(self._last),
            "pulled": dict(self._pulled),
            "buffers": {} if self.buffers is None else self.buffers.by_worker,
        }

    def state_spec(self) -> StateSpec:
        """Return the form of state that :meth:`load_state` accepts."""
        memory = self.shard.memory
        groups, mode = self.shard.group_sizes(), self.mode.state().keys()
        return StateSpec(self._settings, len(memory), memory.dtype, groups, mode)

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state`. Raise ValueError if it is of another model, optimizer, or settings."""
        self.state_spec().check(state, "the state")
        self.shard.load_state(state["shard"])
        self.mode.load_state(state["mode"])
        self._compensator.load_state(state["compensator"])
        self.staleness, self.counts = Counter(state["staleness"]), Counter(state["counts"])
        self._lives, self._last = dict(state["lives"]), dict(state["last"])
        self._pulled = dict(state["pulled"])
        if self.buffers is not None:
            self.buffers.load(state.get("buffers", {}))

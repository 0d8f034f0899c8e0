"""State for a rank that comes later: what it must have before its first step, from a rank that has it.

Ranks that were there are within a backward pass, whose graph holds their parameters: theirs are read, and not
written to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import kernels
from pycomm.checks import shown
from pycomm.communicator import Communicator
from pycomm.compression.base import State
from pycomm.reducer.agreement import agreed
from pycomm.reducer.attached_tensors import module_tensors, shared_parts
from pycomm.reducer.broadcast import group_sizes, restructure_state, shared_parameters, signature, state_nodes
from pycomm.reducer.buckets import state_of
from pycomm.reducer.checkpoint import CONTRIBUTIONS
from pycomm.reducer.engine import Engine
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.plain_state import Node, decode, encode
from pycomm.reducer.progress import Progress
from pycomm.reducer.sample_weights import SampleWeights
from pycomm.reducer.settings import Settings
from pycomm.transport.choice import version

_CHUNK_BYTES = 32 << 20


def checked_carry(carry: Any) -> dict[str, Any]:
    """Return what newcomers are to get besides the rest, by name; nothing for ``None``.

    Raises:
        TypeError: ``carry`` is no mapping of names to objects with state.
    """
    if carry is None:
        return {}
    if not isinstance(carry, Mapping):
        raise TypeError(f"carry is {shown(carry)}, wanted a mapping of names to objects with state_dict()")
    for name, value in carry.items():
        if not isinstance(name, str):
            raise TypeError(f"carry has the name {shown(name)}, wanted strings")
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"carry[{name!r}] is {shown(value)}, wanted an object with state_dict() and load_state_dict()"
            )
    return dict(carry)


def lines_of(settings: Settings, table: ParameterTable, carry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a newcomer must have in common with the ranks: kinds and texts."""
    names = dict(table.named())
    parameters = [f"{name}: {signature(p)}{'' if p.requires_grad else ' frozen'}" for name, p in names.items()]
    sizes = group_sizes(table.optimizer, table.ignored.covers)
    return [
        ("the version of pycomm", version()),
        ("the optimizer", type(table.optimizer).__name__),
        ("the master weights", str(bool(table.stepper.masters()))),
        *(("a setting", line) for line in settings.lines()),
        *(("a parameter", line) for line in parameters),
        *(("an optimizer parameter group", size) for size in sizes),
        ("what is carried", ", ".join(sorted(carry))),
    ]


@dataclass(frozen=True)
class Carried:
    """Everything besides parameters that a newcomer gets.

    Attributes:
        table: parameters, optimizer, and the state of compression.
        progress: counters of this rank.
        committed_steps: number of steps that compression has committed, 0-d int64.
        scaler: the loss scaler, or ``None``.
        objects: other objects with ``state_dict`` and ``load_state_dict``, by name.
        weights: weights by samples.
    """

    table: ParameterTable
    progress: Progress
    committed_steps: torch.Tensor
    scaler: Any
    objects: Mapping[str, Any]
    weights: SampleWeights

    @classmethod
    def of(cls, engine: Engine, objects: Mapping[str, Any]) -> Carried:
        """Return what a newcomer gets from ``engine``, and ``objects``."""
        scaler, weights = engine.settings.loss_scaler, engine.window.weights
        return cls(engine.table, engine.progress, engine.outcome.committed_steps, scaler, objects, weights)

    def plain(self) -> dict[str, Any]:
        """Return it as numbers, texts, tensors and containers of them."""
        scaler = self.scaler
        return {
            "progress": [self.progress.num_reductions, self.progress.num_steps, int(self.committed_steps)],
            "scaler": scaler.state_dict() if hasattr(scaler, "state_dict") else None,
            "objects": {name: each.state_dict() for name, each in sorted(self.objects.items())},
            "compression": self._common_state(),
            "weighted": self.weights.in_use,
        }

    def take(self, plain: Mapping[str, Any]) -> None:
        """Take what :meth:`plain` has returned on another rank."""
        reductions, steps, committed = plain["progress"]
        self.progress.resume(reductions, steps)
        self.committed_steps.fill_(committed)
        if plain["scaler"] is not None:
            self.scaler.load_state_dict(plain["scaler"])
        for name, each in self.objects.items():
            each.load_state_dict(plain["objects"][name])
        if plain["weighted"]:
            self.weights.set(0, 0)

    def take_compression(self, plain: Mapping[str, Any]) -> None:
        """Take the state of compression from what :meth:`plain` has returned, once there are buckets."""
        for flight in self.table.flights:
            flight.exchange.load_state(plain["compression"])

    def _common_state(self) -> State:
        """Return the state of compression that is equal on all ranks."""
        return {
            name: {key: tensor for key, tensor in entry.items() if key not in CONTRIBUTIONS}
            for name, entry in state_of(self.table.flights).items()
        }


@torch.no_grad()
def share_state(communicator: Communicator, carried: Carried, newcomer: bool) -> dict[str, Any]:
    """Give ``newcomer`` ranks the state of rank 0, and compare that of all. Collective.

    Returns:
        To a newcomer, rank 0's :meth:`Carried.plain`.

    Raises:
        ValueError: the optimizer state does not fit a newcomer, or the ranks' states differ; on every rank.
    """
    table = carried.table
    optimizer, stepper = table.optimizer, table.stepper
    params = shared_parameters(optimizer, table.ignored.covers)
    tensors: list[torch.Tensor] = []
    nodes = [*state_nodes(optimizer, params, tensors), encode(carried.plain(), tensors)]
    mine = json.dumps(nodes).encode() if communicator.rank == 0 else b""
    nodes = json.loads(communicator.channel.all_gather_bytes(mine)[0])
    outcome: tuple[dict[str, Any], list[torch.Tensor]] | Exception = ({}, tensors)
    if newcomer:
        try:
            outcome = _restructured(table, params, nodes, carried.plain())
        except ValueError as error:
            outcome = error
    plain, tensors = agreed(communicator, outcome, "take the state of rank 0")
    everything = dict(table.named()) | module_tensors(table)
    masters = stepper.masters(table.ignored.covers)
    _spread(communicator, [*shared_parts(list(everything.values())), *masters, *tensors], newcomer)
    if newcomer:
        stepper.restore()
        carried.take(plain)
    _compare(communicator, [*shared_parts([p for _, p in table.named()]), *masters, *tensors])
    return plain


def _restructured(
    table: ParameterTable, params: list[torch.Tensor], nodes: list[Node], old: dict[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    tensors = restructure_state(table.optimizer, params, nodes[:-1])
    return decode(nodes[-1], old, torch.empty(0), tensors), tensors


def _spread(communicator: Communicator, tensors: Sequence[torch.Tensor], write: bool) -> None:
    """Send rank 0's ``tensors`` to all ranks; those that ``write`` overwrite theirs."""
    for chunk in _chunks(tensors):
        parts = [t.detach().contiguous().view(-1).view(torch.uint8) for t in chunk]
        flat = torch.cat(parts)
        communicator.broadcast(flat, 0)
        if write:
            for t, piece in zip(chunk, torch.split(flat, [len(part) for part in parts]), strict=True):
                # Cloned, as a piece of flat may start at an address that is not aligned for its dtype.
                t.copy_(piece.clone().view(t.dtype).view(t.shape))


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() > 0:
            chunk.append(tensor)
        if sum(t.nbytes for t in chunk) >= _CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _compare(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError, on every rank, if the hashes of ``tensors`` differ between ranks."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
    mine = kernels.hashes(flat).numpy().tobytes() if flat else b""
    everyones = communicator.channel.all_gather_bytes(mine)
    different = [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if different:
        raise ValueError(f"the state of rank {different[0]} differs from that of rank 0")

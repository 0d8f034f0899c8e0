"""State that a newcomer receives before its first step.

The other ranks are inside a backward pass, whose graph holds their parameters: these are read, but not written to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import kernels
from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import (
    Node,
    decode,
    encode,
    group_sizes,
    restructure_state,
    shared_parameters,
    signature,
    state_nodes,
)
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import shared_parts
from pycomm.collectives.transport.choice import version
from pycomm.compression.base import State
from pycomm.compression.saved_state import CONTRIBUTIONS
from pycomm.errors import attempt
from pycomm.training.reducer.attached_tensors import module_tensors
from pycomm.training.reducer.buckets import state_of
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import AttachSettings
from pycomm.training.reducer.window import SampleWeights, TrainingProgress
from pycomm.untrusted import ANYTHING, ListOf, parse

_CHUNK_BYTES = 32 << 20


def lines_of(settings: AttachSettings, table: ParameterTable) -> list[tuple[str, str]]:
    """Return what a newcomer must have in common with the ranks, as kinds and texts."""
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
    ]


@dataclass(frozen=True)
class Carried:
    """State that a newcomer receives besides parameters.

    Attributes:
        table: parameters, optimizer, and the state of compression.
        progress: counters of this rank.
        committed_steps: number of steps that compression has committed, 0-d int64.
        scaler: the loss scaler, or ``None``.
        objects: other objects with ``state_dict`` and ``load_state_dict``, by name.
        weights: weights by samples.
    """

    table: ParameterTable
    progress: TrainingProgress
    committed_steps: torch.Tensor
    scaler: Any
    objects: Mapping[str, Any]
    weights: SampleWeights

    @classmethod
    def of(cls, engine: Engine) -> Carried:
        """Return the state of ``engine`` for a newcomer."""
        scaler, survive, steps = engine.settings.loss_scaler, engine.settings.survive, engine.outcome.committed_steps
        objects = (survive and survive.carry) or {}
        return cls(engine.table, engine.progress, steps, scaler, objects, engine.window.weights)

    def plain(self) -> dict[str, Any]:
        """Return it as numbers, strings, tensors and containers of them."""
        scaler = self.scaler
        return {
            "progress": [self.progress.num_reductions, self.progress.num_steps, int(self.committed_steps)],
            "scaler": scaler.state_dict() if hasattr(scaler, "state_dict") else None,
            "objects": {name: each.state_dict() for name, each in sorted(self.objects.items())},
            "compression": self._common_state(),
            "weighted": self.weights.in_use,
        }

    def take(self, plain: Mapping[str, Any]) -> None:
        """Load a result of :meth:`plain` from another rank."""
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
        """Load compression's state from a result of :meth:`plain`, once there are buckets."""
        for flight in self.table.flights:
            flight.exchange.load_state(plain["compression"])

    def _common_state(self) -> State:
        """Return compression's state as far as it is equal on all ranks."""
        return {
            name: {key: tensor for key, tensor in entry.items() if key not in CONTRIBUTIONS}
            for name, entry in state_of(self.table.flights).items()
        }


@torch.no_grad()
def share_state(communicator: Communicator, carried: Carried, newcomer: bool) -> dict[str, Any]:
    """Send rank 0's state to a newcomer, and compare the state of all ranks. Collective.

    Args:
        communicator: all ranks, including the newcomer.
        carried: state of this rank.
        newcomer: whether this rank is the newcomer.

    Returns:
        Rank 0's :meth:`Carried.plain` on the newcomer; an empty dict on the others.

    Raises:
        ValueError: the optimizer state does not fit a newcomer, or the ranks' states differ; on every rank.
    """
    table = carried.table
    optimizer, stepper = table.optimizer, table.stepper
    params = shared_parameters(optimizer, table.ignored.covers)
    tensors: list[torch.Tensor] = []
    nodes = [*state_nodes(optimizer, params, tensors), encode(carried.plain(), tensors)]
    mine = json.dumps(nodes).encode() if communicator.rank == 0 else b""
    nodes = parse(communicator.channel.all_gather_bytes(mine)[0], ListOf(ANYTHING), "the state of rank 0")
    outcome: tuple[dict[str, Any], list[torch.Tensor]] | Exception = attempt(
        lambda: _restructured(table, params, nodes, carried.plain()) if newcomer else ({}, tensors)
    )
    plain, tensors = agreed(communicator.channel.all_gather_bytes, outcome, "take the state of rank 0")
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
    """Send rank 0's ``tensors`` to all ranks; overwrite this rank's own if ``write``."""
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

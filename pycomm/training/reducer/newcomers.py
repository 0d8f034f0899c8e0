"""State that a newcomer receives before its first step.

The other ranks are inside a backward pass, whose graph holds their parameters: these are read, but not written to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm import kernels
from pycomm.agreement import agreed
from pycomm.collectives import broadcasting
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
from pycomm.training.reducer.settings import Options
from pycomm.untrusted import ANYTHING, ListOf, parse


def lines_of(settings: Options, table: ParameterTable) -> list[tuple[str, str]]:
    """Return what a newcomer must have in common with the ranks, as kinds and texts."""
    names = dict(table.named())
    parameters = [
        f"{name}: {broadcasting.signature(p)}{'' if p.requires_grad else ' frozen'}" for name, p in names.items()
    ]
    sizes = broadcasting.group_sizes(table.optimizer, table.ignored.covers)
    order = broadcasting.names_in_order(table.optimizer, names, table.ignored.covers)
    return [
        ("the version of pycomm", version()),
        ("the optimizer", type(table.optimizer).__name__),
        ("the master weights", str(bool(table.stepper.masters()))),
        *(("a setting", line) for line in settings.lines()),
        *(("a parameter", line) for line in parameters),
        *(("an optimizer parameter group", size) for size in sizes),
        *(("the order of the optimizer's parameters", name) for name in order),
    ]


def plain_state(engine: Engine) -> dict[str, Any]:
    """Return what a newcomer receives besides parameters and optimizer state, as numbers, strings, tensors, containers.

    Of compression's state, what is equal on all ranks.
    """
    state, scaler, weights = engine.step_state, engine.settings.loss_scaler, engine.window.weights
    return {
        "progress": [state.reductions, state.steps, int(engine.reduction.committed)],
        "scaler": scaler.state_dict() if hasattr(scaler, "state_dict") else None,
        "objects": {name: each.state_dict() for name, each in sorted(_objects_of(engine).items())},
        "compression": {
            name: {key: tensor for key, tensor in entry.items() if key not in CONTRIBUTIONS}
            for name, entry in state_of(engine.table.flights).items()
        },
        "weighted": weights.in_use,
    }


def _objects_of(engine: Engine) -> Mapping[str, Any]:
    survive = engine.settings.survive
    return (survive and survive.carry) or {}


def _take(engine: Engine, plain: Mapping[str, Any]) -> None:
    """Load a result of :func:`plain_state` from another rank, but for compression's, as there are no buckets yet."""
    reductions, steps, committed = plain["progress"]
    engine.step_state.resumes(reductions, steps)
    engine.reduction.committed.fill_(committed)
    if plain["scaler"] is not None:
        engine.settings.loss_scaler.load_state_dict(plain["scaler"])
    for name, each in _objects_of(engine).items():
        each.load_state_dict(plain["objects"][name])
    if plain["weighted"]:
        engine.window.weights.set(0, 0)


@torch.no_grad()
def share_state(engine: Engine, newcomer: bool) -> State:
    """Send rank 0's state to a newcomer, and compare the state of all ranks, the newcomer among them. Collective.

    ``newcomer``: whether this rank is it. It gets compression's state as the result, the others an empty dict.

    Raises:
        ValueError: the optimizer state does not fit a newcomer, or the ranks' states differ; on every rank.
    """
    table, communicator = engine.table, engine.communicator
    optimizer, stepper = table.optimizer, table.stepper
    params = broadcasting.shared_parameters(optimizer, table.ignored.covers)
    tensors: list[torch.Tensor] = []
    nodes = [*broadcasting.state_nodes(optimizer, params, tensors), broadcasting.encode(plain_state(engine), tensors)]
    mine = json.dumps(nodes).encode() if communicator.rank == 0 else b""
    nodes = parse(communicator.channel.all_gather_bytes(mine)[0], ListOf(ANYTHING), "the state of rank 0")

    def restructured() -> tuple[Any, list[torch.Tensor]]:
        if not newcomer:
            return {}, tensors
        found = broadcasting.restructure_state(optimizer, params, nodes[:-1])
        return broadcasting.decode(nodes[-1], plain_state(engine), torch.empty(0), found), found

    plain, tensors = agreed(communicator.channel.all_gather_bytes, attempt(restructured), "take the state of rank 0")
    everything = dict(table.named()) | module_tensors(table)
    masters = stepper.masters(table.ignored.covers)
    parts = [*shared_parts(list(everything.values())), *masters, *tensors]
    broadcasting.broadcast_parts(communicator, [part.detach() for part in parts], 0, writes=newcomer)
    if newcomer:
        stepper.restore()
        _take(engine, plain)
    _compare(communicator, [*shared_parts([p for _, p in table.named()]), *masters, *tensors])
    return plain["compression"] if newcomer else {}


def _compare(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError, on every rank, if the hashes of ``tensors`` differ between ranks."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
    mine = kernels.hashes(flat).numpy().tobytes() if flat else b""
    everyones = communicator.channel.all_gather_bytes(mine)
    different = [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if different:
        raise ValueError(f"the state of rank {different[0]} differs from that of rank 0")

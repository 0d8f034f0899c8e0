"""Entry point ``join``: a new process joins ranks that have called ``attach`` with ``survive``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from pycomm.checks import shown
from pycomm.collectives.communicator import communicator_at
from pycomm.collectives.transport.own_group import timeout_seconds
from pycomm.compression.base import Compression
from pycomm.errors import CommError
from pycomm.optim.attached import register
from pycomm.training.elastic.join_requests import JoinClient
from pycomm.training.elastic.liveness import this_process
from pycomm.training.elastic.membership import Membership
from pycomm.training.reducer.attach import checked
from pycomm.training.reducer.buckets import open_lanes
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.members import Survival, SurvivingMembers, lines_of, listener_of, next_index, share_state
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.reducer import Reducer
from pycomm.training.reducer.settings import Options, Survive, Tuning, refuse_unknown


def join(
    address: str,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    compression: Compression | str | None = None,
    accumulate: int | Callable[[], bool] = 1,
    loss_scaler: Any = None,
    average: bool = True,
    buffers: str = "local",
    survive: Survive | None = None,
    tuning: Tuning | None = None,
    **unknown: NoReturn,
) -> Reducer:
    """Join the ranks that have called ``attach(..., survive=pycomm.Survive(...))``, between two of their steps.

    The new process calls no ``init_process_group``. It receives all state from the others, and takes part in its first
    step with weight zero.

    Args:
        address: "host:port" or "[::1]:port" of the store in which the other ranks have met.
        optimizer, model: as for :func:`attach`, like all further arguments. Settings must equal the other ranks'.
        survive: ``None`` means ``pycomm.Survive()``.

    Returns:
        The :class:`Reducer`.

    Raises:
        CommError: no rank answers.
        TypeError, ValueError: an argument is wrong, has an unknown name, or differs from the other ranks' argument.
    """
    if not isinstance(address, str):
        raise TypeError(f"address is {shown(address)}, wanted a text such as 'host:port'")
    refuse_unknown(unknown)
    given: Any = {"compression": compression, "accumulate": accumulate, "loss_scaler": loss_scaler, "tuning": tuning}
    given |= {"average": average, "buffers": buffers, "survive": Survive() if survive is None else survive}
    options = Options(**given, shard=None)  # a newcomer has no part of the others' step
    settings, table, _ = checked(options, optimizer, model, ())
    assert settings.survive is not None
    timeout = timeout_seconds(None if tuning is None else tuning.timeout)
    client = JoinClient(address, next_index(), timeout)
    while True:
        try:
            return _join(client, table, settings, settings.survive, timeout)
        except CommError:  # also if a rank is lost while this process joins
            if client.is_late():
                raise


def _join(client: JoinClient, table: ParameterTable, settings: Options, survive: Survive, timeout: float) -> Reducer:
    lines = lines_of(settings, table)
    answer = client.ask(this_process(), lines)
    membership, place = Membership.accept(answer, client.store, survive.min_ranks, timeout)
    with contextlib.ExitStack() as until_joined:
        until_joined.callback(membership.close)
        communicator = communicator_at(place, timeout)
        until_joined.callback(communicator.close)
        lanes = open_lanes(communicator, settings, table.on_gpu)
        membership.confirm(communicator)
        listener = listener_of(membership, client.store, client.index, lines)
        listener.skip_to(answer["request"])
        until_joined.callback(listener.close)
        survival = Survival(membership, communicator, table, settings, listener)
        members = SurvivingMembers(survival)
        engine = Engine(table, lanes, settings, members)
        until_joined.callback(engine.release)
        state = share_state(engine, newcomer=True)
        until_joined.pop_all()
    table.ranks = membership.world
    reducer = Reducer(engine)
    for sent in table.buckets:
        sent.exchange.load_state(state)
    engine.reported_world = membership.world[:-1]
    survival.note_join(engine.step_state.reductions, 0.0)
    register(reducer)
    members.enter(engine)
    return reducer

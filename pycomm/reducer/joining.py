"""Beginnings of ranks that may be lost: with the first ones, or later, let in by those that are there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from pycomm.communicator import Communicator, communicator_at
from pycomm.elastic.join_requests import JoinClient, JoinListener
from pycomm.elastic.liveness import this_process
from pycomm.elastic.membership import Membership
from pycomm.errors import CommError
from pycomm.optim.attached import register
from pycomm.optim.wrappers import watch_constructions
from pycomm.reducer.backup import BackupPolicy
from pycomm.reducer.engine import Engine
from pycomm.reducer.lanes import open_lanes
from pycomm.reducer.newcomers import Carried, lines_of, share_state
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.settings import AttachSettings, Survive
from pycomm.reducer.statistics import Waits
from pycomm.reducer.surviving import Survival, SurvivingPolicy
from pycomm.torch_internals import Store

_indices = itertools.count()
"""Of the attaches of this process that can gain ranks: the n-th of a newcomer joins the n-th of the others."""


def surviving_policy(
    communicator: Communicator, table: ParameterTable, settings: AttachSettings, survive: Survive
) -> SurvivingPolicy:
    """Return the policy by which ranks go on without lost ones, and with newcomers. Collective."""
    membership = Membership.found(communicator, survive.min_ranks, settings.backup > 0)
    door = _door(membership, membership.store, next(_indices), lines_of(settings, table))
    return _policy(settings, Survival(membership, communicator, table, settings, door))


def _policy(settings: AttachSettings, survival: Survival) -> SurvivingPolicy:
    return BackupPolicy(survival) if settings.backup > 0 else SurvivingPolicy(survival)


def _door(membership: Membership, store: Store, index: int | str, lines: Sequence[tuple[str, str]]) -> JoinListener:
    return JoinListener(store, index, lines, str(this_process()["host"]) if membership.is_on_one_host else "")


def join_ranks(
    address: str, table: ParameterTable, settings: AttachSettings, survive: Survive, timeout: float
) -> Reducer:
    """Return the Reducer of this process as one more rank of those whose store listens at ``address``.

    It asks again where a rank is lost while it is let in.

    Raises:
        ValueError: they refuse it; or ``address`` is malformed.
        CommError: they do not answer, or failed.
    """
    client = JoinClient(address, next(_indices), timeout)
    while True:
        try:
            return _join(client, table, settings, survive, timeout)
        except CommError:
            if client.is_late():
                raise


def _join(
    client: JoinClient, table: ParameterTable, settings: AttachSettings, survive: Survive, timeout: float
) -> Reducer:
    lines = lines_of(settings, table)
    answer = client.ask(this_process(), lines)
    membership, place = Membership.accept(answer, client.store, survive.min_ranks, timeout, settings.backup > 0)
    with contextlib.ExitStack() as until_joined:
        until_joined.callback(membership.close)
        communicator = communicator_at(place, timeout)
        until_joined.callback(communicator.close)
        lanes = open_lanes(communicator, settings, table.on_gpu)
        membership.settle(communicator)
        door = _door(membership, client.store, client.index, lines)
        door.skip_to(answer["request"])
        until_joined.callback(door.close)
        survival = Survival(membership, communicator, table, settings, door)
        policy = _policy(settings, survival)
        engine = Engine(table, lanes, settings, policy)
        engine.statistics.waits = Waits(ranks=engine)
        plain = share_state(communicator, Carried.of(engine), newcomer=True)
        until_joined.pop_all()
    table.ranks = membership.world
    reducer = Reducer(engine)
    Carried.of(engine).take_compression(plain)
    engine.told_world = membership.world[:-1]
    survival.welcome(engine.progress.num_reductions, 0.0)
    register(reducer)
    watch_constructions(reducer)
    policy.enter()
    return reducer

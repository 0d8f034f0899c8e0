"""Attached reducers, and what a rank can say about its own and the other ranks' replicas."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives import communicator
from tests.reducer.models import loss_of, make_model, sgd

_TUNING = frozenset(field.name for field in fields(pycomm.Tuning))
_SHARDING = frozenset(field.name for field in fields(pycomm.Sharding)) - {"kind"}
_SURVIVE = frozenset(field.name for field in fields(pycomm.Survive))


def grouped(**options: Any) -> dict[str, Any]:
    """Return arguments of ``attach``: fields of its options, given one by one, in the options that they belong to.

    ``on_failure="shrink"`` makes a Survive without any fields.
    """
    tuning = {name: options.pop(name) for name in list(options) if name in _TUNING}
    survive = {name: options.pop(name) for name in list(options) if name in _SURVIVE}
    if tuning:
        options["tuning"] = replace(options.get("tuning") or pycomm.Tuning(), **tuning)
    if options.pop("on_failure", "raise") == "shrink" or survive:
        options["survive"] = pycomm.Survive(**survive)
    sharding = {name: options.pop(name) for name in list(options) if name in _SHARDING}
    if sharding:
        options["shard"] = pycomm.Sharding(options["shard"], **sharding)
    return options


@contextmanager
def attached(optimizer: torch.optim.Optimizer, model: Any, **options: Any) -> Iterator[pycomm.Reducer]:
    reducer = pycomm.attach(optimizer, model, **grouped(timeout=30, **options))
    try:
        yield reducer
    finally:
        reducer.detach()


@contextmanager
def over(transport: str) -> Iterator[None]:
    """Communicators that are made inside use ``transport``; "auto": the one that they choose."""
    original = vars(communicator)["choose_transport"]
    if transport != "auto":
        vars(communicator).update(choose_transport=lambda place, _, *rest: original(place, transport, *rest))
    try:
        yield
    finally:
        vars(communicator).update(choose_transport=original)


def over_tcp(on: bool = True) -> AbstractContextManager[None]:
    """Communicators that are made inside go over TCP, as between hosts."""
    return over("tcp" if on else "auto")


class Training:
    """Training of a small model on all ranks."""

    def __init__(self, over_hosts: bool = False, **options: Any) -> None:
        self.rank, self.model = dist.get_rank(), make_model()
        self.optimizer = sgd(self.model)
        with over_tcp(over_hosts):
            self.reducer = pycomm.attach(self.optimizer, self.model, **grouped(timeout=30, **options))

    def step(self, index: int, nap: float = 0.0) -> None:
        """Take step ``index``, with a pause of ``nap`` seconds before ``backward()``."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.rank, index)
        time.sleep(nap)
        loss.backward()
        self.optimizer.step()


def assert_replicas_equal(model: nn.Module) -> None:
    """Bit for bit, through torch.distributed itself."""
    flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(other, everyone[0]) for other in everyone)


def make_equal(model: nn.Module) -> None:
    """Overwrite parameters with those of rank 0, through torch.distributed itself, where they differ."""
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, param):
            with torch.no_grad():
                param.copy_(first)


@contextmanager
def warnings_noted(said: list[str]) -> Iterator[None]:
    """Append to ``said`` every warning that is given inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said += [str(warning.message) for warning in caught]


@contextmanager
def logged() -> Iterator[list[str]]:
    """Have what pycomm logs on this rank added to the list that is yielded."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("pycomm").removeHandler(handler)


def own_state(reducer_or_saved: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return one rank's part of ``Reducer.state_dict()``: name -> key -> tensor."""
    saved = reducer_or_saved if isinstance(reducer_or_saved, dict) else reducer_or_saved.state_dict()
    (state,) = saved["ranks"].values()
    return dict(state)


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()

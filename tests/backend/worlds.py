"""Default process groups on "pycomm" for tests: ``@on_world(2, 3)`` runs a test's body on every rank of such groups."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import torch_internals
from tests.on_ranks import Body, on_ranks

BACKEND = os.environ.get("PYCOMM_TEST_BACKEND", "pycomm")
"""Another name shows whether a test's expectations are torch's: ``PYCOMM_TEST_BACKEND=gloo pytest tests/backend``."""

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_NUMBERS = itertools.count()


def on_world(*sizes: int, timeout: float = 60.0, fresh: bool = False, **options: Any) -> Callable[[Body], Body]:
    """Run the decorated function as ``on_ranks`` does, in a default group on "pycomm" made with ``options``."""

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def inside(**arguments: Any) -> None:
            with world(**options):
                body(**arguments)

        return on_ranks(*sizes, timeout=timeout, fresh=fresh)(inside)

    return decorate


@contextmanager
def world(backend: str = BACKEND, **options: Any) -> Iterator[None]:
    """Have a default group on ``backend`` in the place of the one that the pool's ranks have. Collective."""
    default = dist.group.WORLD
    assert default is not None
    store, rank, size = torch_internals.store_of(default), default.rank(), default.size()
    dist.destroy_process_group()
    _join(backend, store, rank, size, **options)
    yield  # after a failure the pool's ranks end anyway
    if dist.is_initialized():
        dist.destroy_process_group()
    _join("gloo", store, rank, size)


def _join(backend: str, store: torch_internals.Store, rank: int, size: int, **options: Any) -> None:
    options.setdefault("timeout", timedelta(seconds=30))
    meeting = torch_internals.PrefixStore(f"world-{next(_NUMBERS)}", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, **options)

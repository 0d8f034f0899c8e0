"""``@on_ranks(2, 3)``: a test whose body runs on every rank of groups of two and of three ranks."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import RankPool

Body = Callable[..., None]
Pools = Callable[[int], RankPool]


def on_ranks(*sizes: int, timeout: float = 60.0, fresh: bool = False) -> Callable[[Body], Body]:
    """Run the decorated function on every rank of a pool of each of ``sizes``, with ``timeout`` seconds for it.

    The function may take parameters and fixtures like any test; pytest's process makes them, and they must be
    picklable. A ``fresh`` pool is for this test alone: other tests cannot use its ranks afterwards.
    """
    assert sizes, "on_ranks() requires at least one number of ranks"
    pools = "new_ranks" if fresh else "rank_pools"

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            pool = arguments.pop(pools)(arguments.pop("pool_size"))
            pool.run(_run_body, body.__module__, body.__name__, arguments, timeout=timeout)

        # pytest passes what the signature names: the function's own arguments, and the pools.
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (pools, "pool_size")]
        own = inspect.signature(body)
        vars(test)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *added])
        marked: Body = pytest.mark.parametrize("pool_size", sizes, ids="{} ranks".format)(test)
        return marked

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call the function under the decorator. It is found by name, since ``name`` itself means the decorated one."""
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    finally:
        for value in arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()  # the next test runs in this process, too

"""The face under which libraries are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pycomm.cli.bench.operations import Case

Call = Callable[[], object]


class UnsupportedError(Exception):
    """The library does not have this collective, dtype or reduction; the message says which."""


class Library(Protocol):
    """Collectives of one library among the ranks of one group.

    Attributes:
        rank, size: of this process.
    """

    rank: int
    size: int

    def bind(self, case: Case, given: torch.Tensor, result: torch.Tensor) -> Call:
        """Return the call for ``case`` that reads ``given`` and leaves the result in ``result``.

        Where they share memory, the call is to work in place. What a library cannot do by itself, out of place or in
        place, is made up for with a copy inside the call: the time is that until the user has the result. An array
        that this rank does not have (what a root alone hands in, or gets) may be used as scratch.

        Raises:
            UnsupportedError: the library does not have it.
        """

    def barrier(self) -> None: ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return memory to work on, as uint8."""

    def synchronize(self) -> None:
        """Wait for what has been enqueued on a device."""

    def close(self) -> None:
        """Leave the group, after the last call."""


def in_place(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether both lie in the same array."""
    return given.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()


def same(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether both are the same memory."""
    return given.data_ptr() == result.data_ptr()


def then_copy(call: Callable[[torch.Tensor], Any], result: torch.Tensor) -> Call:
    """Return ``call`` into memory of its own, followed by a copy to ``result``: in place, for who cannot do that."""
    scratch = torch.empty_like(result)

    def both() -> None:
        call(scratch)
        result.copy_(scratch)

    return both


def copy_first(given: torch.Tensor, result: torch.Tensor, call: Call) -> Call:
    """Return a copy of ``given`` to ``result``, followed by ``call`` on that: out of place, for who cannot do that."""
    if same(given, result):
        return call

    def both() -> None:
        result.copy_(given)
        call()

    return both

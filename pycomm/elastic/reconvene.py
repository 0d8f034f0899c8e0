"""Meeting anew after a rank was lost: agreement on who is left, and new connections among these."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pycomm.communicator import Communicator
from pycomm.elastic.membership import Decision, Membership
from pycomm.errors import CommError

_SIGNS = {"timed out": "was waited for in vain", "is stopped": "is stopped"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Reconvened(Generic[_T]):
    """What the ranks that are left have come to.

    Attributes:
        decision: who they are.
        committed: number of operations that count.
        opened: what ``open_again`` has returned.
    """

    decision: Decision
    committed: int
    opened: _T


def reconvene(
    membership: Membership,
    communicator: Communicator,
    error: CommError,
    committed: int,
    *,
    catch_up: Callable[[int], None],
    open_again: Callable[[], _T],
    nobody_waits: bool = False,
) -> Reconvened[_T]:
    """Agree with the ranks that are left on who they are, and let ``communicator`` go on among them. Collective.

    Args:
        membership: who has belonged to the group.
        communicator: that on which an operation failed; all memory of it is left behind.
        error: how this rank learned of it.
        committed: number of operations that count, as far as this rank knows.
        catch_up: called with that number if it turns out to be larger; takes over what the operations have left.
        open_again: opens what else the ranks need, over the communicator; again if another rank is lost meanwhile.
        nobody_waits: no rank waits for this one on the communicator: it need not be told that this one goes on.

    Raises:
        CommError: this rank is left behind, or too few are left.
    """
    start = time.monotonic()
    while True:
        reason = f"it goes on without others: {error}"
        if not nobody_waits:
            communicator.close(reason)
        decision = membership.agree(committed, _silent(membership, error), str(error))
        communicator.close(reason)
        if decision.committed > committed:
            committed = decision.committed
            catch_up(committed)
        try:
            communicator.move(membership.place())
            opened = open_again()
            membership.settle(communicator)
            return Reconvened(decision, committed, opened)
        except CommError as another:  # one of them was lost meanwhile, or cannot be reached by all
            if time.monotonic() - start > communicator.channel.timeout:
                raise
            error, nobody_waits = another, False


def _silent(membership: Membership, error: CommError) -> dict[int, str]:
    """Return the rank that was waited for in vain, if ``error`` says so; death is seen without it."""
    world = membership.world
    if error.peer is None or error.peer >= len(world):
        return {}
    fate = next((fate for sign, fate in _SIGNS.items() if sign in str(error)), None)
    return {} if fate is None else {world[error.peer]: fate}

"""Training that goes on, from the last commit, when ranks are lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pycomm.communicator import Communicator
from pycomm.elastic.membership import Membership, reconvene
from pycomm.errors import CommError
from pycomm.horovod.basics import begin_among, leave_world
from pycomm.horovod.elastic.state import State
from pycomm.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, InvalidRequestError
from pycomm.horovod.state import world


class Survivors:
    """Survivors of the world: they agree on who is left, and make a world of those.

    Args:
        min_ranks: fewest ranks that go on.
    """

    def __init__(self, min_ranks: int) -> None:
        here = world()
        self._communicator = Communicator(here.sets[0].group, here.timeout)
        self._membership = Membership.found(self._communicator, min_ranks, False)

    def begin_anew(self, error: Exception) -> None:
        """Leave the world, and begin another one with those that are left. Collective among these.

        Raises:
            CommError: too few are left, or this rank is left behind, or the store in which they agree is gone.
        """
        rank = world().rank
        cause = _cause(error, rank, alone=len(world().sets) == 1)
        leave_world(f"it begins anew: {cause}")
        reconvene(
            self._membership,
            self._communicator,
            cause,
            0,
            catch_up=lambda _: None,
            open_again=lambda: begin_among(self._communicator),
        )

    def close(self) -> None:
        """Release what agreeing takes."""
        self._communicator.close()
        self._membership.close()


def _cause(error: Exception, rank: int, alone: bool) -> CommError:
    if isinstance(error, CommError) and alone:
        return error
    return CommError.during("elastic", str(error), rank=rank)


def run(func: Callable[..., Any], min_ranks: int = 1) -> Callable[..., Any]:
    """Return ``func`` as a function that goes on when ranks are lost. A decorator.

    Its first argument is a :class:`State`, which is made equal on all ranks before ``func`` begins. When an operation
    or ``backward()`` fails because a rank is lost, the others agree on who is left, go back to the last ``commit()``,
    and begin ``func`` anew among themselves; a ``DistributedOptimizer`` in the state goes on too. Mistakes
    (``InvalidRequestError``) end it, as they would come again. New ranks are not let in.

    Args:
        func: of a state, and anything else. It may not end on one rank before the others.
        min_ranks: fewest ranks that go on.

    Raises:
        CommError: from the function that is returned: fewer than ``min_ranks`` are left, or this rank is left behind.
        ValueError: it is called before ``init()``.
    """
    if not isinstance(min_ranks, int) or min_ranks < 1:
        raise ValueError(f"min_ranks is {min_ranks!r}, wanted an integer from 1")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        survivors = Survivors(min_ranks)
        try:
            return _loop(functools.partial(func, state, *args, **kwargs), state, survivors.begin_anew)
        finally:
            survivors.close()

    return wrapper


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return ``func`` as a function that calls ``reset`` and begins anew when ranks are lost; see :func:`run`."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        return _loop(functools.partial(func, state, *args, **kwargs), state, lambda _: reset())

    return wrapper


def _loop(body: Callable[[], Any], state: State, begin_anew: Callable[[Exception], None]) -> Any:
    skips_sync = False
    failure: Exception | None = None
    while True:
        if failure is not None:
            begin_anew(failure)  # what goes wrong in here ends it
        try:
            if failure is not None:
                state.on_reset()
            if not skips_sync:
                state.sync()
            return body()
        except InvalidRequestError:
            raise
        except HostsUpdatedInterrupt as interrupt:
            skips_sync, failure = interrupt.skip_sync, interrupt
        except (HorovodInternalError, CommError) as error:
            state.restore()
            skips_sync, failure = False, error

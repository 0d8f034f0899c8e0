"""Exceptions under Horovod's names."""

from __future__ import annotations

from pycomm.errors import CommError


class HorovodInternalError(RuntimeError):
    """Failure of an operation on which ranks had to agree. :func:`pycomm.horovod.elastic.run` recovers from it."""


class InvalidRequestError(HorovodInternalError, ValueError):
    """Mistake in an operation, on this rank or on another: the ranks go on, as if nobody had asked for it.

    Horovod raises a ``RuntimeError`` for some of these mistakes and a ``ValueError`` for others; this is both.
    """


class LostPeerError(HorovodInternalError, CommError):
    """Failure of a peer or of the link to it: :class:`pycomm.CommError` under Horovod's name."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Notice that ranks have come or will go. :func:`pycomm.horovod.elastic.run` begins anew.

    Args:
        skip_sync: whether the state is the same on all ranks already, so that it need not be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync


def not_initialised() -> ValueError:
    """Return the error of what is called before ``init()``."""
    return ValueError("Horovod has not been initialized; call hvd.init() first")

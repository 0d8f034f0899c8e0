"""Group of a pipeline's own for its messages, which can be ended when a step fails, so that no rank waits in vain."""

from __future__ import annotations

import contextlib
import secrets
import weakref

import torch
import torch.distributed as dist

from pycomm.backend.process_group import PycommProcessGroup
from pycomm.parallel.groups import all_gather_text
from pycomm.torch_internals import backend_of, make_process_group, number_process_group, store_of, timeout_of
from pycomm.transport.own_group import OWN, PYCOMM, destroy_group


class OwnMessages:
    """Group for messages between the ranks of ``users``. Collective.

    Where messages are pycomm's, that is another group of the same ranks: what a failed step has sent and nobody has
    received is lost with it, and ranks that wait are told of its end. On other backends it is ``users`` itself.

    Attributes:
        group: the group.
        can_end: whether it is another one, so that :meth:`end` ends it.
    """

    def __init__(self, users: dist.ProcessGroup) -> None:
        self.group, self.can_end = users, isinstance(backend_of(users, torch.device("cpu")), PycommProcessGroup)
        if not self.can_end:
            return
        name = f"{users.group_name}{OWN}pipeline/{all_gather_text(secrets.token_hex(8), users)[0]}"
        ranks = dist.get_process_group_ranks(users)
        seconds = timeout_of(users).total_seconds()
        self.group = make_process_group(store_of(users), users.rank(), ranks, PYCOMM, name, seconds, seconds)
        number_process_group(self.group, ranks)
        self._finalizer = weakref.finalize(self, _destroy, self.group)

    def end(self, reason: str) -> None:
        """Tell ranks that wait for messages of this one the ``reason``, and send and receive no more."""
        if self.can_end:
            backend = backend_of(self.group, torch.device("cpu"))
            backend.abort(reason)
            self._finalizer()


def _destroy(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # torch's own groups are destroyed already
        destroy_group(group)

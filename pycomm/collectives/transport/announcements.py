"""Announcements: 56 bytes by which each rank describes its next operation, so that a disagreement is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.collectives.transport.host_tensors import OPS
from pycomm.collectives.transport.torch_group import DIRECT_RANKS, TorchGroup
from pycomm.kernels.arrays import DTYPES

_KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "barrier",
    "refused",
    "schedule",
    "all_to_all",
    "reduce",
    "all_to_all_v",
    "reduce_scatter_v",
    "all_gather_v",
    "reduce_on_host",
)
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


class OperationComparison:
    """Announcements of all ranks' next operations, under way. Collective.

    Args:
        group: the ranks.
        kind: name of the operation.
        x: its array, of which dtype and number of elements are compared.
        op: its reduction.
        root: its source or destination rank, or the digest of its schedule.
        timeout: limit of every wait, in seconds.
        tag: tag of the array's dtype if the operation only moves bytes, else 0.
        word: 64 bits to exchange, not compared.
    """

    def __init__(
        self,
        group: TorchGroup,
        kind: str,
        x: torch.Tensor,
        op: str,
        root: int,
        timeout: float,
        tag: int = 0,
        word: int = 0,
    ) -> None:
        self._group, self._kind, self._timeout = group, kind, timeout
        mine = [_KINDS.index(kind), _DTYPES.index(x.dtype), OPS.index(op), root, x.numel(), tag, word]
        self._rows = torch.tensor([mine] * group.size, dtype=torch.int64)
        self._seen = {group.rank: mine}
        self._receives: dict[int, Any] = {}
        self._sends: dict[int, Any] = {}
        if group.size > DIRECT_RANKS:
            group.gather(kind, self._rows.view(-1), torch.tensor(mine), timeout)
            return
        peers = [(group.rank + distance) % group.size for distance in range(1, group.size)]
        for p in peers:
            self._receives[p] = group.begin_receive(p, self._rows[p], kind)
        for p in peers:
            self._sends[p] = group.begin_send(p, self._rows[group.rank], kind)

    def agrees_with(self, rank: int) -> bool:
        """Wait for the announcement of ``rank``; return whether it is the same as this rank's."""
        return self._row(rank)[:-1] == self._row(self._group.rank)[:-1]

    def finish(self) -> list[int]:
        """Wait for all announcements; return every rank's ``word``.

        Raises:
            ValueError: on every rank: the operations differ, or a rank cannot take part.
            CommError: a rank sent an invalid announcement, or failed.
        """
        rows = [self._row(p) for p in range(self._group.size)]
        while self._sends:
            peer, work = self._sends.popitem()
            self._group.wait(self._kind, work, self._timeout, peer)
        if self._kind == "refused":
            return []  # this rank has its own error to report
        for p, row in enumerate(rows):
            if _KINDS[row[0]] == "refused":
                why = self._group.refusal_of(p) or "its arguments were wrong (its own error says how)"
                raise ValueError(f"{self._kind}: rank {p} could not take part: {why}")
        for p, row in enumerate(rows):
            if row[:-1] != rows[0][:-1]:
                raise ValueError(
                    f"the ranks disagree: rank {p} called {_describe(row)} where rank 0 called {_describe(rows[0])}"
                )
        return [row[-1] for row in rows]

    def _row(self, rank: int) -> list[int]:
        if rank not in self._seen:
            work = self._receives.pop(rank, None)
            if work is not None:
                self._group.wait(self._kind, work, self._timeout, rank)
            row: list[int] = self._rows[rank].tolist()
            if not _is_valid(row):
                raise self._group.fail(self._kind, rank, f"rank {rank} announced an impossible operation", 0.0)
            self._seen[rank] = row
        return self._seen[rank]


def agree_on_lengths(
    group: TorchGroup, kind: str, sends: Sequence[torch.Tensor], receives: Sequence[int], timeout: float
) -> None:
    """Raise ValueError on every rank if a rank's tensor for another one, in ``sends``, has not the bytes it expects.

    Collective. ``receives``: number of bytes that this rank expects from each rank.
    """
    mine = torch.tensor([[x.nbytes for x in sends], receives], dtype=torch.int64)
    gathered = torch.empty(group.size * mine.numel(), dtype=torch.int64)
    group.gather(kind, gathered, mine.view(-1), timeout)
    lengths = gathered.view(group.size, 2, group.size)
    wrong = (lengths[:, 0] != lengths[:, 1].T).nonzero().tolist()
    if wrong:
        p, q = wrong[0]
        has, expected = int(lengths[p, 0, q]), int(lengths[q, 1, p])
        raise ValueError(f"{kind}: rank {p} has {has} bytes for rank {q}, which expects {expected}")


def _is_valid(row: list[int]) -> bool:
    kind, dtype, op, _, count, _, _ = row
    return 0 <= kind < len(_KINDS) and 0 <= dtype < len(_DTYPES) and 0 <= op < len(OPS) and count >= 0


def _describe(row: list[int]) -> str:
    kind, dtype, op, root, count, tag, _ = row
    what = f"{count} elements of {DTYPES[dtype] if tag == 0 else 'bytes of another dtype'}"
    if _KINDS[kind] in ("all_reduce", "reduce_scatter"):
        return f'{_KINDS[kind]}({what}, op="{OPS[op]}")'
    if _KINDS[kind] == "schedule":
        return f'all_reduce({what}, op="{OPS[op]}", algorithm=a schedule with digest {root:x})'
    if _KINDS[kind] == "reduce":
        return f'reduce({what}, dst={root}, op="{OPS[op]}")'
    if _KINDS[kind] == "reduce_scatter_v":  # counts are compared later
        return f'reduce_scatter_v({DTYPES[dtype]}, op="{OPS[op]}")'
    if _KINDS[kind] == "broadcast":
        return f"broadcast({what}, src={root})"
    return f"{_KINDS[kind]}({what if _KINDS[kind] in ('all_gather', 'all_to_all') else ''})"

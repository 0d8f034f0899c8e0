"""Codec of the k largest sums of every parameter, with their indices. Shared by TopK and DGC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Operation, State
from pycomm.compression.codec import Accumulated, Outcome, wide_dtype
from pycomm.compression.report import Report, Told
from pycomm.compression.sparse.choice import make_sparse_sum, operations
from pycomm.compression.sparse.sums import Selected, SparseSum
from pycomm.layout import to_device

ENTRY_BYTES = 1.5
"""Bytes of an entry, for each byte of its value, about: there is an index too."""

Density = Callable[[int | torch.Tensor], float]
"""Fraction of the entries to send, as a function of the step's number."""


class SparseCodec:
    """Codec that selects entries in the pass that accumulates, and sums them over the ranks.

    Where an entry is sent, its velocity is zeroed (momentum factor masking), unless the whole parameter
    is sent: there is nothing to mask then, and momentum would vanish.

    Args:
        half_values: send values as float16, and leave the rounding error in what was accumulated.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, density: Density, half_values: bool) -> None:
        self._bucket, self._communicator = bucket, communicator
        self._density_at, self._half_values = density, half_values
        self._density = 0.0
        self._counts: list[int] = []
        num_params = len(bucket.names)
        self._ends = to_device(torch.tensor(bucket.numels).cumsum(0), bucket.device)
        # The last step's k-th magnitudes: this step's selection begins there.
        self._thresholds = torch.zeros(num_params, dtype=torch.float32, device=bucket.device)
        self._num_selections = 0
        self._num_missed = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self._sum: SparseSum | None = None
        self._bytes_before = 0  # by sums of other densities

    @property
    def bytes_sent(self) -> int:
        return self._bytes_before + (0 if self._sum is None else self._sum.bytes_sent)

    def begin(self, step: int | torch.Tensor) -> None:
        density = self._density_at(step)
        if density == self._density:
            return
        self._bytes_before = self.bytes_sent
        bucket = self._bucket
        self._density = density
        self._counts = [max(1, round(density * n)) for n in bucket.numels]
        dtype, total = wide_dtype(bucket), sum(self._counts)
        self._values = torch.empty(total, dtype=dtype, device=bucket.device)
        self._indices = torch.empty(total, dtype=torch.int32, device=bucket.device)
        self._largest = torch.zeros(1, dtype=torch.float32, device=bucket.device) if dtype == torch.float32 else None
        self._whole = self._keeps = None
        whole = [n == k for n, k in zip(bucket.numels, self._counts, strict=True)]
        if any(whole):
            each = torch.tensor(whole)
            self._whole = to_device(each, bucket.device)
            self._keeps = to_device(each.repeat_interleave(torch.tensor(self._counts)), bucket.device)
        self._sum = make_sparse_sum(bucket, self._communicator, total, self._half_values)

    def accumulate(
        self,
        acc: torch.Tensor,
        residual: torch.Tensor | None,
        grads: Sequence[torch.Tensor],
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        out = self._values, self._indices
        options |= {"num_missed": self._num_missed, "largest": self._largest}
        finite, _ = kernels.sparsify(acc, residual, grads, self._counts, out, self._thresholds, *args, **options)
        self._num_selections += len(self._counts)
        return finite  # type: ignore[no-any-return]

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        assert self._sum is not None
        entries = self._values, self._indices, self._largest
        return self._sum.send(Selected(accumulated, *entries, self._ends, self._whole, self._keeps), told)

    def finite(self, report: Report, accumulated: Accumulated) -> torch.Tensor:
        assert self._sum is not None
        return self._sum.finite(report, accumulated)

    def settle(self, outcome: Outcome) -> None:
        assert self._sum is not None
        self._sum.settle(outcome)

    def commit(self, finite: Flag) -> None:
        assert self._sum is not None
        self._sum.commit(finite)

    def operations_among(self, size: int) -> list[Operation] | None:
        bucket = self._bucket
        return operations(bucket.num_elements, sum(self._counts), size, wide_dtype(bucket), self._half_values)

    def stats(self) -> dict[str, int]:
        return {"selections": self._num_selections, "selections_missed": int(self._num_missed)}

    def state(self) -> State:
        return {}

"""The order of gradients in a bucket: as many as can begin at a border of 16 bytes, and nothing lies between them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.models import sgd

PACKET = 16


class Model(nn.Module):
    """A classifier whose last bias comes first in the reverse order, and other sizes that fill no packets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 16)
        self.odd = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.randn(()))
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh()) * self.scale + self.odd.sum()
        return out


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, 0.001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_whole_packets_begin_at_their_borders(dtype: torch.dtype, bucket_mb: float) -> None:
    model = Model().to(dtype)
    optimizer = sgd(model)
    with attached(optimizer, model, bucket_mb=bucket_mb):
        for _ in range(2):
            model(torch.ones(3, 24, dtype=dtype)).sum().backward()
            optimizer.step()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        assert len(grads) == 6
        places = {name: (grad.data_ptr(), grad.nbytes) for name, grad in grads.items()}
        even = [name for name, (_, num_bytes) in places.items() if num_bytes % PACKET == 0]
        assert {"first.weight", "first.bias", "last.weight"} <= set(even)
        assert "odd" not in even
        assert [name for name in even if places[name][0] % PACKET != 0] == []
        if bucket_mb == 25:  # one bucket
            _check_order(places, even)
        assert_replicas_equal(model)


@on_ranks(2)
def test_buckets_on_a_gpu_go_by_what_is_sent() -> None:
    """As long as they hold no more than eight times as much."""
    methods = [pycomm.NoCompression(), pycomm.TopK(0.5), pycomm.DGC(0.25), pycomm.TopK(0.001)]
    expected = {False: [16, 16, 16, 16], True: [16, 16, 8, 2]}
    for pretend, numbers in expected.items():
        found = []
        for method in methods:
            model = nn.Sequential(*(nn.Linear(64, 16, bias=False) for _ in range(16)))  # 4 KiB each
            with pytest.MonkeyPatch.context() as context:
                context.setattr("pycomm.training.reducer.buckets.on_gpu", lambda _, pretend=pretend: pretend)
                with attached(
                    torch.optim.SGD(model.parameters(), lr=0.1), model, compression=method, bucket_mb=1 / 256
                ) as r:
                    found.append(r.stats()["num_buckets"])
        assert found == numbers


def _check_order(places: dict[str, tuple[int, int]], even: list[str]) -> None:
    order = sorted(places, key=lambda name: places[name][0])
    assert order[: len(even)] == even[::-1]  # about as they arrive
    rest = [places[name][1] for name in order[len(even) :]]
    assert rest == sorted(rest, reverse=True)
    for before, after in itertools.pairwise(order):
        assert sum(places[before]) == places[after][0]

"""ChunkTopK, step by step: what it sends and forgets, its bytes, and SparseLoCo, which is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import kernels
from pycomm.collectives.bucket import FINGERPRINT_BITS
from tests.asynchronous.averaged import NUMEL, flat
from tests.asynchronous.runs import loss_of, model_of
from tests.kernels.test_chunks import defined
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, own_state

TIMEOUT = 110.0


def gradient(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("bits", [2, 4, 8])
@on_ranks(3, timeout=TIMEOUT)
def test_it_is_what_a_plain_computation_comes_to(bits: int) -> None:
    rank, size, count = dist.get_rank(), 3, 1003  # the last chunk has fewer elements than entries
    method = pycomm.ChunkTopK(17, 64, bits, decay=0.9)
    config = kernels.Chunks(17, 64, bits)
    p = nn.Parameter(torch.zeros(count))  # of one dimension, which other methods send as it is
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    optimizer = torch.optim.SGD([p], lr=0.1)
    with attached(optimizer, [("p", p)], compression=method) as reducer:
        for step in range(6):
            optimizer.zero_grad()
            loss: Any = (p * gradient(rank, step, count)).sum()
            loss.backward()
            wanted = np.zeros(count, np.float32)
            for other in range(size):
                due = residuals[other] + gradient(other, step, count).numpy() * np.float32(1 / size)
                _, sent = defined(due, config)
                residuals[other] = (due - sent) * np.float32(0.9)
                wanted = wanted + sent
            assert p.grad is not None
            torch.testing.assert_close(p.grad, torch.from_numpy(wanted), rtol=1e-6, atol=1e-7)
            residual = own_state(reducer)["p"]["residual"]
            torch.testing.assert_close(residual, torch.from_numpy(residuals[rank]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4095, 4096, 4097, 50_001])
@on_ranks(2, timeout=TIMEOUT)
def test_bytes(count: int) -> None:
    """84 bytes for a full chunk, as docs/compression.md says, and what its size requires for the last one."""
    p = nn.Parameter(torch.zeros(count))
    method = pycomm.ChunkTopK(64)
    with attached(torch.optim.SGD([p], lr=0.1), [("p", p)], compression=method) as reducer:
        for step in range(3):
            p.grad = None
            loss: Any = (p * gradient(dist.get_rank(), step, count)).sum()
            loss.backward()
        sent = reducer.stats()["bytes_sent"]
    codes = 1 + FINGERPRINT_BITS  # a byte each, and padding to eight
    of_words = 84 * (count // 4096) + 4 * kernels.Chunks(64).num_words(count % 4096)
    assert sent == 3 * 8 * (-(-codes // 8) + -(-of_words // 8))


@pytest.mark.parametrize("fragments", [1, 2])
@on_ranks(3, timeout=TIMEOUT)
def test_sparseloco(fragments: int) -> None:
    """Algorithm 1 of arXiv:2508.15706, in one process and in three."""
    rank, size, rate, every = dist.get_rank(), 3, 0.8, 4
    config = kernels.Chunks(3, 16)
    pieces = [(slice(0, 30), 2), (slice(30, NUMEL), 4)] if fragments == 2 else [(slice(0, NUMEL), 4)]
    models = [model_of() for _ in range(size)]
    optimizers = [torch.optim.Adam(each.parameters(), 0.02) for each in models]
    anchor = flat(models[0])
    feedback = torch.zeros(size, NUMEL, dtype=torch.float64)

    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    options: dict[str, Any] = {"every": every, "fragments": fragments, "outer": pycomm.Nesterov(rate, momentum=0.0)}
    handle = pycomm.local_sgd(optimizer, model, compression=pycomm.ChunkTopK(3, 16, decay=0.95), timeout=60, **options)
    for step in range(13):
        for number, (each, its) in enumerate(zip(models, optimizers, strict=True)):
            its.zero_grad()
            loss_of(each, number, step).backward()
            its.step()
        for piece, turn in pieces:
            if step % every + 1 != turn:
                continue
            total = torch.zeros(piece.stop - piece.start, dtype=torch.float64)
            for number, each in enumerate(models):
                due = feedback[number, piece] + (anchor - flat(each))[piece] / size
                sent = torch.from_numpy(defined(due.float().numpy(), config)[1]).double()
                feedback[number, piece] = 0.95 * (due - sent)
                total += sent
            anchor[piece] -= rate * total
            for each in models:
                now = flat(each)
                now[piece] = anchor[piece]
                torch.nn.utils.vector_to_parameters(now, each.parameters())
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        # What is sent is computed in float32.
        torch.testing.assert_close(flat(model), flat(models[rank]), rtol=1e-6, atol=1e-7)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_momentum_besides_the_decay_is_refused() -> None:
    model = model_of()
    decayed, plain = pycomm.ChunkTopK(3, 16), pycomm.ChunkTopK(3, 16, decay=1.0)
    says = r"ChunkTopK\(decay=0.95\) with momentum=0.9: the decayed residual takes the place of momentum"
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ValueError, match=says):
        pycomm.attach(optimizer, model, compression=decayed)
    pycomm.attach(optimizer, model, compression=plain).detach()
    with pytest.raises(ValueError, match=rf"outer=Nesterov\(lr=0.7, momentum=0.9\): {says}"):
        pycomm.local_sgd(optimizer, model, every=4, outer=pycomm.Nesterov(), compression=decayed, timeout=60)
    with pytest.raises(ValueError, match=r"outer=Nesterov\(.*\): DGC\(momentum=0.9\) .* would apply momentum twice"):
        pycomm.local_sgd(optimizer, model, every=4, outer=pycomm.Nesterov(), compression=pycomm.DGC(0.1), timeout=60)
    # The ranks' own optimizers may have momentum.
    for outer, method in ((None, decayed), (pycomm.Nesterov(1.0, 0.0), decayed), (pycomm.Nesterov(), plain)):
        pycomm.local_sgd(optimizer, model, every=4, outer=outer, compression=method, timeout=60).detach()


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"k": 0}, ValueError, "k is 0, wanted an integer from 1 to 4096"),
        ({"k": 4097}, ValueError, "k is 4097, wanted an integer from 1 to 4096"),
        ({"k": 6.5}, TypeError, "k is 6.5, wanted an integer from 1 to 4096"),
        ({"k": 8, "chunk": 96}, ValueError, "chunk is 96, wanted a power of two"),
        ({"k": 8, "chunk": 131072}, ValueError, "chunk is 131072, wanted an integer from 1 to 65536"),
        ({"k": 8, "chunk": "64"}, TypeError, "chunk is '64', wanted an integer from 1 to 65536"),
        ({"k": 8, "bits": 3}, ValueError, "bits is 3, wanted 2, 4 or 8"),
        ({"k": 8, "bits": 16}, ValueError, "bits is 16, wanted an integer from 2 to 8"),
        ({"k": 8, "decay": 0.0}, ValueError, "decay is 0.0, wanted 0 < decay <= 1"),
        ({"k": 8, "decay": 1.1}, ValueError, "decay is 1.1, wanted 0 < decay <= 1"),
        ({"k": 8, "decay": None}, TypeError, "decay is None, wanted a number in .0, 1."),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        pycomm.ChunkTopK(**settings)

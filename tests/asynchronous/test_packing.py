"""Messages of every method: what a server unpacks is what the worker has sent, to the bit."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm.compression import Compression
from pycomm.training.asynchronous.packing import Packer, Unpackers

METHODS: dict[str, Compression] = {
    "topk": pycomm.TopK(0.1),
    "topk, half values": pycomm.TopK(0.1, half_values=True),
    "topk, nearly all": pycomm.TopK(0.9),
    "topk, all": pycomm.TopK(1.0),
    "topk, no feedback": pycomm.TopK(0.1, error_feedback=False),
    "randomk": pycomm.RandomK(0.2),
    "randomk, no feedback": pycomm.RandomK(0.2, error_feedback=False),
    "dgc": pycomm.DGC(0.1, momentum=0.9, warmup_steps=3),
    "dgc, everything": pycomm.DGC(
        0.02, 0.9, nesterov=True, half_values=True, weight_decay=0.1, clip_norm=0.5, warmup_steps=2
    ),
    "int8": pycomm.Int8(),
    "int8, no feedback": pycomm.Int8(error_feedback=False),
    "int4": pycomm.Int4(),
    "fp8": pycomm.FP8("e5m2"),
    "chunktopk": pycomm.ChunkTopK(4, 64, 4),
    "fp16": pycomm.FP16(sum="float32"),
    "bf16": pycomm.BF16(),
    "onebit": pycomm.OneBit(),
    "qsgd, 1": pycomm.QSGD(1),
    "qsgd, 7": pycomm.QSGD(7),
    "terngrad": pycomm.TernGrad(),
    "powersgd": pycomm.PowerSGD(2),
    "powersgd, no feedback": pycomm.PowerSGD(2, error_feedback=False),
}
SHAPES = [(40, 30), (30,), (7, 5, 2, 5), (1, 2), ()]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_unpacked_is_what_was_sent(name: str, dtype: torch.dtype) -> None:
    params = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    packer, method = Packer(params, METHODS[name], worker=3), METHODS[name]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    old = Unpackers(params, method, wide)
    sizes = set()
    for number in range(1, 7):
        grads: list[torch.Tensor | None] = [*gradients(number, dtype)]
        if number == 4:
            grads[1] = grads[2] = None
        message = packer.pack(grads, number)
        assert message is not None
        packer.finish(sent=True)
        sizes.add(len(message))
        sent = torch.empty(sum(p.numel() for p in params), dtype=wide)
        begins = torch.tensor([0, *(p.numel() for p in params)]).cumsum(0).tolist()
        for part in packer._exchanges.parts:
            for i, view in zip(part.indices, part.bucket.views, strict=True):
                sent[begins[i] : begins[i + 1]] = view.reshape(-1).to(wide)
        # One that has seen nothing, as after a restart, and one that has seen other workers, too.
        fresh = Unpackers(params, method, wide)
        if "dgc" not in name:  # whose messages are longer at first
            old.unpack(1, number, message)
        for unpackers in (fresh, old):
            assert torch.equal(unpackers.unpack(3, number, message), sent)
        assert sent.any()
    assert (len(sizes) > 1) == ("dgc" in name)  # which sends more at first
    if not any(word in name for word in ("all", "no feedback")) and dtype == torch.float32:
        assert min(sizes) < sum(p.nbytes for p in params)


@pytest.mark.parametrize("name", ["topk", "randomk", "int8", "powersgd"])
def test_nothing_is_lost_in_the_long_run(name: str) -> None:
    """What was sent, and what is left over, is what there was."""
    params = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    packer = Packer(params, METHODS[name], worker=1)
    unpackers = Unpackers(params, METHODS[name], torch.float64)
    total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for number in range(1, 6):
        there = gradients(number, torch.float64)
        missing = number % 3
        there[missing].zero_()
        total += torch.cat([grad.reshape(-1) for grad in there])
        grads = [None if i == missing else grad for i, grad in enumerate(there)]
        message = packer.pack(grads, number)
        assert message is not None
        packer.finish(sent=True)
        total -= unpackers.unpack(1, number, message)
    residuals = {int(n): e["residual"] for part in packer._exchanges.parts for n, e in part.exchange.state().items()}
    left = torch.cat([residuals.get(i, torch.zeros(shape)).reshape(-1).double() for i, shape in enumerate(SHAPES)])
    torch.testing.assert_close(total, left, rtol=1e-9, atol=1e-9)
    assert left.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["topk", "int8", "powersgd", "fp16"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(name: str) -> None:
    params = [torch.zeros(shape) for shape in SHAPES]
    packers = [Packer(params, METHODS[name], worker=1) for _ in range(2)]
    bad = gradients(7, torch.float32)
    bad[2][3, 4, 0, 1] = float("inf")
    for number in (1, 2):
        if number == 2:
            assert packers[0].pack(bad, number) is None
            packers[0].finish(sent=False)
        messages = [packer.pack(gradients(number, torch.float32), number) for packer in packers]
        for packer in packers:
            packer.finish(sent=True)
        assert messages[0] is not None
        assert messages[1] is not None
        assert torch.equal(messages[0], messages[1])


def test_workers_draw_numbers_of_their_own() -> None:
    params = [torch.zeros(40, 30)]
    messages = []
    for worker in (1, 2):
        packer = Packer(params, pycomm.QSGD(), worker)
        messages.append(packer.pack(gradients(1, torch.float32)[:1], 1))
    assert messages[0] is not None
    assert messages[1] is not None
    assert not torch.equal(messages[0], messages[1])


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_message_of_another_length_is_refused(change: int) -> None:
    params = [torch.zeros(shape) for shape in SHAPES]
    packer = Packer(params, METHODS["topk"], 1)
    message = packer.pack(gradients(1, torch.float32), 1)
    assert message is not None
    wrong = message[:change] if change < 0 else torch.cat([message, torch.zeros(change, dtype=torch.uint8)])
    unpackers = Unpackers(params, METHODS["topk"], torch.float32)
    with pytest.raises(ValueError, match="a message"):
        unpackers.unpack(1, 1, wrong)
    packer.finish(sent=True)
    assert unpackers.unpack(1, 1, message).any()

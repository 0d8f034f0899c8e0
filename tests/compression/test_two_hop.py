"""Sums in two hops: whose parts they are, what is left, what is sent, and how exact they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import Communicator, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.transport.rendezvous import order_of
from pycomm.collectives.transport.tcp import TcpTransport
from pycomm.compression.base import Scaling
from pycomm.schedule.network import Link, Network
from pycomm.training.cost.planning import SimulatedLink
from pycomm.training.cost.pricing import rehearse
from pycomm.training.reducer.partition.spans import equal_shares
from tests.compression.test_methods import METHODS, conserves, leaves_no_trace, load_into, save_and_go_on
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import own_state
from tests.reducer.test_gpu_path import compare

BLOCKS = ["fp8", "fp8 e5m2", "int8", "int4", "onebit"]
LAYOUTS = ["abc", "aabb", "aab", pytest.param("ababcc", marks=pytest.mark.slow)]
Shares = Callable[[int, Sequence[int]], Sequence[slice]]
HALVES = {torch.float16: pycomm.FP16, torch.bfloat16: pycomm.BF16}


@contextmanager
def exchanging(
    method: Any, shape: tuple[int, ...], hosts: str = "", algorithm: str = "auto", share: Shares | None = None
) -> Iterator[Any]:
    """Yield a function that averages a gradient over the ranks, as a whole or each rank's ``share`` of it.

    It has the exchange as an attribute.
    """
    hosts = hosts or "abcdefghijklmnop"[: dist.get_world_size()]
    with on_hosts(hosts), Communicator(timeout=30) as communicator:
        bucket = Bucket(["p"], [torch.zeros(shape)], communicator, algorithm)
        if share is not None:
            bucket.reduce_part_only(share(bucket.num_elements, order_of(communicator.hosts)), communicator.rank)
        exchange = method.make(bucket, communicator)

        def average(grad: torch.Tensor) -> torch.Tensor:
            exchange.pack([grad.clone()], Scaling(communicator.size))
            exchange.send()
            finite = exchange.finite()
            exchange.finish(finite)
            return bucket.views[0].clone()

        vars(average)["exchange"] = exchange
        yield average


def gradients(count: int, size: int) -> list[torch.Tensor]:
    """Return every rank's gradient; magnitudes differ from block to block."""
    everyones = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        scales = 10.0 ** torch.randint(-3, 3, (count // 100 + 1,), generator=generator).repeat_interleave(100)[:count]
        everyones.append(torch.randn(count, generator=generator) * scales)
    return everyones


def same_everywhere(x: torch.Tensor) -> bool:
    both = torch.stack([x.double(), -x.double()])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return bool((both[0] == -both[1]).all())


def conserves_on(hosts: str, name: str, dtype: torch.dtype) -> None:
    with on_hosts(hosts):
        conserves(name, dtype)


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_is_lost_between_hosts(rank_pools: Pools, hosts: str, name: str) -> None:
    rank_pools(len(hosts)).run(conserves_on, hosts, name, torch.float32)


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
def test_nothing_is_lost_of_what_float32_cannot_hold(rank_pools: Pools, hosts: str) -> None:
    rank_pools(len(hosts)).run(conserves_on, hosts, "int8", torch.float64)


@pytest.mark.parametrize("name", [*BLOCKS, "qsgd", "terngrad"])
def test_an_overflow_leaves_no_trace_of_either_rounding(rank_pools: Pools, name: str) -> None:
    rank_pools(3).run(leaves_no_trace, name, [(0, 0), (2, 2), (1, 5)], None)


@pytest.mark.parametrize("name", BLOCKS)
def test_both_roundings_go_on_with_another_number_of_ranks(rank_pools: Pools, name: str, tmp_path: Any) -> None:
    path = str(tmp_path / "state")
    rank_pools(3).run(save_and_go_on, name, path)
    old = [torch.load(f"{path}{rank}", weights_only=True) for rank in range(3)]
    for size in (2, 4):
        new = rank_pools(size).run(load_into, name, path, 3)
        for param in own_state(old[0]):
            before, after = (
                torch.stack([own_state(one)[param]["residual"].double() for one in states]).sum(0)
                for states in (old, new)
            )
            assert before.abs().max() > 0
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*BLOCKS, "qsgd", "terngrad"])
@on_ranks(3)
def test_a_gpu_is_not_waited_for(name: str) -> None:
    compare(METHODS[name], torch.float32, {})


def requantized(config: kernels.Quantization, everyones: list[torch.Tensor]) -> torch.Tensor:
    """Quantize every rank's elements, then their sums, part by part."""
    count, size = len(everyones[0]), len(everyones)
    result = torch.empty(count)
    for p in range(size):
        part = slice(count * p // size, count * (p + 1) // size)
        if part.start < part.stop:
            messages = [kernels.quantize(x[part].clone(), config) for x in everyones]
            kernels.dequantize([s for s, _ in messages], [c for _, c in messages], config, result[part])
            scales, codes = kernels.quantize(result[part].clone(), config)
            kernels.dequantize([scales], [codes], config, result[part])
    return result


CONFIGS = {
    "int8": (pycomm.Int8(), kernels.Quantization()),
    "int4": (pycomm.Int4(block=64), kernels.Quantization(64, 7, 4)),
    "fp8": (pycomm.FP8("e5m2"), kernels.Quantization(128, element="e5m2")),
}


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(3, 4)
def test_each_part_is_rounded_by_its_senders_and_by_its_owner(name: str) -> None:
    """Lengths that no block divides, and fewer elements than ranks."""
    method, config = CONFIGS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 2, 301, 5000):
        everyones = gradients(count, size)
        with exchanging(method, (count, 1)) as average:
            found = average(everyones[rank]).view(-1)
            assert torch.equal(found, requantized(config, [x * (1 / size) for x in everyones]))
            assert same_everywhere(found)


@pytest.mark.parametrize(
    ("method", "unit"), [(pycomm.Int8(), 1 / 254), (pycomm.Int4(), 1 / 14), (pycomm.FP8(), 1 / 16)]
)
@on_ranks(4)
def test_two_roundings_at_most(method: Any, unit: float) -> None:
    """Half a step of the largest magnitude each, against float64."""
    everyones = [x.clamp(-1, 1) for x in gradients(4000, 4)]
    wanted = torch.stack(everyones).double().mean(0)
    with exchanging(method, (40, 100)) as average:
        error = (average(everyones[dist.get_rank()].view(40, 100)).view(-1).double() - wanted).abs().max()
    assert 0 < error <= unit * (sum(float(x.abs().max()) for x in everyones) / 4 + float(wanted.abs().max())) * 1.02


@on_ranks(3, 4)
def test_signs_of_fewer_elements_than_hosts() -> None:
    """A part has at most one element, whose sign and magnitude are all of it; some parts have none."""
    size = dist.get_world_size()
    for count in range(1, size + 1):
        everyones = gradients(count, size)
        with exchanging(pycomm.OneBit(), (count, 1)) as average:
            found = average(everyones[dist.get_rank()].view(count, 1)).view(-1)
        assert same_everywhere(found)
        torch.testing.assert_close(found, torch.stack(everyones).mean(0))


def values_of_signs(hosts: str) -> list[int]:
    """Return how many values the averages of signs have in each third."""
    grad = gradients(6000, len(hosts))[dist.get_rank()].view(60, 100)
    with exchanging(pycomm.OneBit(), (60, 100), hosts) as average:
        return [len(third.unique()) for third in average(grad).split(20)]


@pytest.mark.parametrize(("hosts", "wanted"), [("ab", 4), ("abc", 2)])
def test_two_hosts_round_once(rank_pools: Pools, hosts: str, wanted: int) -> None:
    """Then a sum is not rounded to one bit."""
    assert rank_pools(len(hosts)).run(values_of_signs, hosts) == [[wanted] * 3] * len(hosts)


def half_sums_on(hosts: str, dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), len(hosts)
    for shape in ((1,), (301,), (200, 301)):
        everyones = [x.clamp(-100, 100).view(shape) for x in gradients(torch.Size(shape).numel(), size)]
        halves = [x.to(dtype) for x in everyones]
        rounded = torch.stack(halves).double().sum(0).to(torch.float32).to(dtype).double() / size
        with exchanging(HALVES[dtype](), shape, hosts) as average:
            found = average(everyones[rank])
        assert same_everywhere(found)
        largest = max(float(x.abs().max()) for x in halves)
        torch.testing.assert_close(found.double(), rounded, rtol=0, atol=2 * torch.finfo(dtype).eps * largest)
        if dtype == torch.bfloat16 and len(set(hosts)) == size:
            assert torch.equal(found, kernel_sum(halves).float() / size)


def kernel_sum(halves: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(halves[0])
    kernels.reduce(out, halves, "sum")
    return out


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("hosts", ["ab", "abcd", "aabb"])
def test_half_types_are_added_up_in_float32(rank_pools: Pools, hosts: str, dtype: torch.dtype) -> None:
    rank_pools(len(hosts)).run(half_sums_on, hosts, dtype)


@on_ranks(3)
def test_half_sums_where_they_are_asked_for() -> None:
    """Whatever the hosts, and whatever the algorithm of dense sums."""
    everyones = [x.clamp(-100, 100) for x in gradients(1000, 3)]
    wanted = kernel_sum([x.bfloat16() for x in everyones]).float() * (1 / 3)
    for hosts in ("aaa", "abc"):
        with exchanging(pycomm.BF16(sum="float32"), (1000,), hosts, "ring") as average:
            assert torch.equal(average(everyones[dist.get_rank()]), wanted)
        with exchanging(pycomm.BF16(), (1000,), hosts, "ring") as average:
            assert not torch.equal(average(everyones[dist.get_rank()]), wanted)


FRAMES = 8_000
"""Most bytes of the frames of a step."""


class Sent:
    """Number of bytes that this process has sent over TCP since the last reset, frames included."""

    def __init__(self) -> None:
        self._before = 0
        self.reset()

    def reset(self) -> None:
        self._before = self._all()

    @property
    def num_bytes(self) -> int:
        return self._all() - self._before

    @staticmethod
    def _all() -> int:
        transports = [each for each in gc.get_objects() if type(each) is TcpTransport]
        return sum(sum(transport.group.bytes_sent()) for transport in transports)


BYTES: dict[str, tuple[Any, float]] = {
    "int8": (pycomm.Int8(), 1 + 4 / 256),
    "int8, large blocks": (pycomm.Int8(block=4096), 1 + 4 / 4096),
    "int4": (pycomm.Int4(), 0.5 + 4 / 128),
    "fp8": (pycomm.FP8(), 1 + 4 / 128),
    "onebit": (pycomm.OneBit(), 1 / 8),
    "qsgd": (pycomm.QSGD(7), 0.5 + 4 / 512),
    "terngrad": (pycomm.TernGrad(), 0.25 + 4 / 1024),
    "fp16": (pycomm.FP16(), 2.0),
    "bf16": (pycomm.BF16(), 2.0),
}


def bytes_between(name: str, size: int) -> None:
    method, per_element = BYTES[name]
    grad = gradients(1_000_000, 1)[0].view(1000, 1000)
    with exchanging(method, (1000, 1000)) as average:
        average(grad)
        sent = Sent()
        average(grad)
        assert sent.num_bytes == pytest.approx(2 * (size - 1) / size * per_element * grad.numel(), rel=0.02, abs=FRAMES)


@pytest.mark.parametrize("size", [2, 3, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_bytes_do_not_grow_with_the_ranks(rank_pools: Pools, size: int) -> None:
    for name in BYTES:
        rank_pools(size).run(bytes_between, name, size)


def bytes_between_hosts(hosts: str, name: str) -> int:
    grad = gradients(1_000_000, 1)[0].view(1000, 1000)
    with exchanging(BYTES[name][0], (1000, 1000), hosts) as average:
        sent = Sent()
        average(grad)
        return sent.num_bytes


FREE = Link(alpha=0.0, beta=0.0, gamma=0.0)
BY_BYTES = Network(
    name="a second per byte between hosts",
    within_host=FREE,
    between_hosts=Link(alpha=0.0, beta=1.0, gamma=0.0),
    per_host=2,
)


@pytest.mark.parametrize("name", ["int8", "int4", "onebit"])
@pytest.mark.parametrize("hosts", ["aabb", "aabbcc"])
def test_a_link_carries_each_part_once_and_is_priced_so(rank_pools: Pools, hosts: str, name: str) -> None:
    """A rank sends its lane alone: half of what it would among as many hosts of one rank."""
    method, per_element = BYTES[name]
    size, num_hosts = len(hosts), len(set(hosts))
    hops = 2 * (num_hosts - 1) / num_hosts
    counted = rank_pools(size).run(bytes_between_hosts, hosts, name)
    assert counted == pytest.approx([hops / 2 * per_element * 1e6] * size, rel=0.02, abs=FRAMES)
    link = SimulatedLink(size, BY_BYTES)
    costs = rehearse(method, [torch.empty(1000, 1000)], size, per_host=2)
    assert sum(map(link.seconds, costs.operations)) == pytest.approx(counted[0], rel=0.02, abs=FRAMES)
    assert costs.operations[0].kind == "reduce_on_host"
    flat = rehearse(method, [torch.empty(1000, 1000)], size)
    assert sum(map(link.seconds, flat.operations)) > 1.5 * counted[0]


# The first hop alone, where each rank requires its own share of the sums.


def whole_parameters(count: int, order: Sequence[int]) -> list[slice]:
    """Shares that no block divides; one has nothing, another one nearly all."""
    bounds = [0, 0, *(count - 1 for _ in order[2:]), count]
    shares = {rank: slice(bounds[i], bounds[i + 1]) for i, rank in enumerate(order)}
    return [shares[rank] for rank in range(len(order))]


SHARES: dict[str, Shares] = {"equal": equal_shares, "of whole parameters": whole_parameters}


def once_quantized(config: kernels.Quantization, terms: list[torch.Tensor], shares: Sequence[slice]) -> torch.Tensor:
    """Quantize every host's elements share by share, and add up."""
    result = torch.empty_like(terms[0])
    for share in shares:
        if share.start < share.stop:
            messages = [kernels.quantize(x[share].clone(), config) for x in terms]
            kernels.dequantize([s for s, _ in messages], [c for _, c in messages], config, result[share])
    return result


def own_shares_on(hosts: str, name: str, shares: str) -> None:
    method, config = CONFIGS[name]
    rank, size = dist.get_rank(), len(hosts)
    names = sorted(set(hosts))
    of_hosts = [[p for p in range(size) if hosts[p] == host] for host in names]
    order = order_of(of_hosts)
    if len(names) == 1 or len({len(ranks) for ranks in of_hosts}) > 1:
        of_hosts = [[p] for p in range(size)]
    for count in (1, 2, 301, 5000):
        everyones = [x * (1 / size) for x in gradients(count, size)]
        terms = [torch.stack([everyones[p] for p in ranks]).sum(0) for ranks in of_hosts]
        with exchanging(method, (count, 1), hosts, share=SHARES[shares]) as average:
            found = average(gradients(count, size)[rank]).view(-1)
            all_shares = SHARES[shares](count, order)
            own = torch.zeros(count, dtype=torch.bool)
            own[all_shares[rank]] = True
            assert not found[~own].any()
            left = average.exchange.state()["p"]["residual"].view(-1).double()
            dist.all_reduce(found)
            dist.all_reduce(left)
        assert torch.equal(found, once_quantized(config, terms, all_shares))
        came = torch.stack(everyones).double().sum(0)
        torch.testing.assert_close(left + found, came, rtol=1e-6, atol=1e-6 * float(came.abs().max()))


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("hosts", ["aa", "abc", "aabb", "aab"])
def test_each_rank_gets_its_own_share_rounded_once(rank_pools: Pools, hosts: str, name: str, shares: str) -> None:
    """Bit for bit what quantized parts add up to; what is left and what was received is what came."""
    rank_pools(len(hosts)).run(own_shares_on, hosts, name, shares)


def nearly_nothing(hosts: str, value: float) -> None:
    """Denormal gradients are below every scale: all of them are left, and come once they have added up."""
    for share in (None, equal_shares):
        with exchanging(pycomm.FP8(), (300, 1), hosts, share=share) as average:
            assert not average(torch.full((300, 1), value)).any()
            left = average.exchange.state()["p"]["residual"].double()
            dist.all_reduce(left)
            torch.testing.assert_close(left, torch.full_like(left, value), rtol=1e-4, atol=2.0**-147)


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb"])
def test_denormals_are_left(rank_pools: Pools, hosts: str) -> None:
    rank_pools(len(hosts)).run(nearly_nothing, hosts, 1e-40)


def bytes_of_shares(name: str, size: int) -> None:
    method, per_element = BYTES[name]
    grad = gradients(1_000_000, 1)[0].view(1000, 1000)
    with exchanging(method, (1000, 1000), share=equal_shares) as average:
        average(grad)
        sent = Sent()
        average(grad)
        assert sent.num_bytes == pytest.approx((size - 1) / size * per_element * grad.numel(), rel=0.02, abs=FRAMES)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_own_shares_take_half_of_the_bytes(rank_pools: Pools, size: int) -> None:
    for name in BYTES:
        rank_pools(size).run(bytes_of_shares, name, size)


def other_blocks() -> None:
    p = nn.Parameter(torch.zeros(30, 10))
    method = pycomm.Int8(block=256 if dist.get_rank() else 128)
    with pytest.raises(ValueError, match=r"compression=Int8\(error_feedback=True, block=(256|128)\)"):
        pycomm.attach(torch.optim.SGD([p], lr=0.1), [("p", p)], compression=method)


def test_ranks_with_other_blocks_are_refused(two_ranks: Any) -> None:
    two_ranks.run(other_blocks)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: pycomm.Int8(block=100), ValueError, "block is 100, wanted a multiple of 64"),
        (lambda: pycomm.Int4(block=0), ValueError, "block is 0, wanted an integer >= 64"),
        (lambda: pycomm.FP8("e3m4"), ValueError, "format is 'e3m4', wanted 'e4m3' or 'e5m2'"),
        (lambda: pycomm.FP8(8), TypeError, "format is 8, wanted 'e4m3' or 'e5m2'"),  # type: ignore[arg-type]
        (lambda: pycomm.FP16(sum="half"), ValueError, "sum is 'half', wanted 'native' or 'float32'"),
        (lambda: pycomm.BF16(sum=None), TypeError, "sum is None, wanted 'native' or 'float32'"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == says

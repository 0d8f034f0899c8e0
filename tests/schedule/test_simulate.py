"""Simulated times: the closed forms, the rules one by one, and a second simulator in plain Python."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import schedule
from pycomm.schedule import COPY, NETWORKS, REDUCE, Link, Network, Round, Schedule, simulate
from pycomm.schedule.algorithms.circulant import circulant_reduce_scatter
from pycomm.schedule.algorithms.halving_doubling import halving_reduce_scatter
from pycomm.schedule.algorithms.ring import ring_all_gather, ring_reduce_scatter
from pycomm.schedule.algorithms.rooted import binomial_broadcast, binomial_reduce, chain_broadcast, chain_reduce

Edge = tuple[int, int, int, int, int]  # src, dst, first chunk, count, op
SIZES = np.array([0.0, 1.0, 1e3, 1e6, 3.3e8])


def network(alpha: float, beta: float, gamma: float, per_host: int | None = None) -> Network:
    """Make a network of one class of links, or two if there are hosts: those between are five times as slow."""
    far = Link(alpha=5 * alpha, beta=5 * beta, gamma=2 * gamma)
    return Network(
        name="test", within_host=Link(alpha=alpha, beta=beta, gamma=gamma), between_hosts=far, per_host=per_host
    )


NETS = [
    network(1e-5, 1e-9, 2e-10),
    network(3e-6, 1e-11, 5e-10),
    network(0, 1e-9, 0),
    network(1, 0, 0),
    network(0, 0, 1),
]
SECONDS = network(0, 1, 0)  # a second for each byte


def table(num_ranks: int, num_chunks: int, rounds: list[list[Edge]]) -> Any:
    def generate() -> Iterator[Round]:
        for edges in rounds:
            yield Round(*np.array(edges, np.int64).reshape(-1, 5).T)

    return SimpleNamespace(num_ranks=num_ranks, num_chunks=num_chunks, rounds=generate)


class Times(defaultdict[Any, float]):
    """Seconds at which something is done; 0 for what has not begun."""

    def __init__(self) -> None:
        super().__init__(float)


def link_between(net: Network, src: int, dst: int) -> Link:
    """Return the link that a message from ``src`` to ``dst`` takes."""
    near = net.per_host is None or src // net.per_host == dst // net.per_host
    return net.within_host if near else net.between_hosts


def slow_simulate(s: Any, nbytes: float, net: Network) -> float:
    """Simulate edge by edge."""
    sending, receiving, final = Times(), Times(), Times()
    for r in s.rounds():
        written: dict[tuple[int, int], float] = {}
        for src, dst, first, count, op in r.edges():
            link = link_between(net, src, dst)
            chunks = range(first, first + count)
            start = max([sending[src], receiving[dst], *(final[src, chunk] for chunk in chunks)])
            sending[src] = start + link.alpha + link.beta * nbytes * count / s.num_chunks
            receiving[dst] = sending[src] + (link.gamma * nbytes * count / s.num_chunks if op == REDUCE else 0)
            written.update({(dst, chunk): receiving[dst] for chunk in chunks})
        final.update(written)
    return max([0.0, *sending.values(), *receiving.values()])


# Closed forms: (ranks, alpha, n beta, n gamma) -> seconds.


def ring_time(p: int, a: float, b: float, g: float) -> float:
    return 2 * (p - 1) * (a + b / p) + (p - 1) / p * g


def doubling_time(p: int, a: float, b: float, g: float) -> float:
    folds = p & (p - 1) != 0
    return (p.bit_length() - 1) * (a + b + g) + folds * (2 * a + 2 * b + g)


def halving_time(p: int, a: float, b: float, g: float) -> float:
    core = 1 << (p.bit_length() - 1)
    folding = 2 * a + 2 * b + g if core != p else 0
    return 2 * math.log2(core) * a + (core - 1) / core * (2 * b + g) + folding


def tree_time(p: int, a: float, b: float, g: float) -> float:
    return math.ceil(math.log2(p)) * (a + b + g)


CLOSED: dict[str, tuple[Callable[[int], Schedule], Callable[..., Any]]] = {
    "ring": (schedule.ring, ring_time),
    "its first half": (ring_reduce_scatter, lambda p, a, b, g: (p - 1) * (a + (b + g) / p)),
    "its second half": (ring_all_gather, lambda p, a, b, g: (p - 1) * (a + b / p)),
    "recursive doubling": (schedule.recursive_doubling, doubling_time),
    "halving and doubling": (schedule.halving_doubling, halving_time),
    "direct, its messages one by one": (schedule.direct, ring_time),
    "binomial broadcast": (binomial_broadcast, lambda p, a, b, g: tree_time(p, a, b, 0)),
    "binomial reduction": (binomial_reduce, tree_time),
    "chain broadcast": (chain_broadcast, lambda p, a, b, g: 2 * (p - 1) * (a + b / p)),
    "chain reduction": (chain_reduce, lambda p, a, b, g: 2 * (p - 1) * (a + (b + g) / p)),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name: str) -> None:
    make, seconds = CLOSED[name]
    for ranks in (1, 2, 3, 4, 5, 8, 13, 16, 32):
        for net in NETS:
            link = net.within_host
            wanted = seconds(ranks, link.alpha, link.beta * SIZES, link.gamma * SIZES)
            assert simulate(make(ranks), SIZES, net) == pytest.approx(np.broadcast_to(wanted, SIZES.shape), rel=1e-9)


@pytest.mark.parametrize(("make", "ranks"), [(halving_reduce_scatter, 16), (circulant_reduce_scatter, 8)])
def test_closed_forms_of_halving(make: Callable[[int], Schedule], ranks: int) -> None:
    link = NETS[0].within_host
    wanted = math.log2(ranks) * link.alpha + (ranks - 1) / ranks * (link.beta + link.gamma) * SIZES
    # Circulant's ranges wrap around the end in two messages.
    extra = 0 if make is halving_reduce_scatter else math.log2(ranks) * link.alpha
    got = simulate(make(ranks), SIZES, NETS[0])
    assert (got >= wanted * (1 - 1e-9)).all()
    assert (got <= (wanted + extra) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("x", "y"), [(2, 2), (4, 3), (3, 8), (1, 5), (6, 1)])
def test_closed_form_of_torus(x: int, y: int) -> None:
    net = network(1e-5, 1e-9, 2e-10, per_host=x)
    near, far, n = net.within_host, net.between_hosts, SIZES
    rows = 2 * (x - 1) * (near.alpha + near.beta * n / x) + (x - 1) / x * near.gamma * n
    columns = 2 * (y - 1) * (far.alpha + far.beta * n / (x * y)) + (y - 1) / (x * y) * far.gamma * n
    assert simulate(schedule.torus(x, y), n, net) == pytest.approx(rows + columns, rel=1e-9)


@pytest.mark.parametrize("name", schedule.names())
def test_critical_is_a_second_for_each_byte(name: str) -> None:
    for ranks in (1, 2, 7, 12, 16):
        s = schedule.by_name(name, ranks)
        assert s.stats().critical == simulate(s, 1, SECONDS) == pytest.approx(slow_simulate(s, 1, SECONDS))


def test_shapes() -> None:
    s = schedule.ring(4)
    grid = np.arange(24).reshape(2, 3, 4)
    times = simulate(s, grid, "ethernet-1g")
    assert (times.shape, times.dtype) == (grid.shape, np.float64)
    assert times[1, 2, 3] == simulate(s, 23, NETWORKS["ethernet-1g"])
    assert isinstance(simulate(s, np.int32(5)), float)
    assert simulate(s, [5.0]).tolist() == [simulate(s, 5)]
    assert simulate(s, []).shape == (0,)
    assert simulate(schedule.ring(1), [1, 2]).tolist() == [0, 0]
    assert simulate(s, 1e6) == simulate(s, 1e6, None) == simulate(s, 1e6, schedule.DEFAULT_NETWORK)


@pytest.mark.parametrize(
    ("rounds", "seconds"),
    [
        ([[(0, 1, 0, 1, COPY), (1, 0, 0, 1, COPY)]], 1),  # full duplex
        ([[(0, 1, 0, 1, COPY), (0, 2, 0, 1, COPY)]], 2),  # one port to send
        ([[(1, 0, 0, 1, REDUCE), (2, 0, 0, 1, REDUCE)]], 2),  # one to receive
        ([[(0, 1, 0, 1, COPY), (1, 2, 0, 1, COPY)]], 1),  # a round reads the state at its start
        ([[(0, 1, 0, 1, COPY)], [(1, 2, 0, 1, COPY)]], 2),  # and the next what it left
        ([[(0, 1, 0, 1, COPY)], [(2, 3, 0, 1, COPY)]], 1),  # no barrier between them
        ([[(0, 1, 0, 4, COPY)], [(1, 2, 4, 4, COPY)]], 1),  # other chunks
        ([[(0, 1, 0, 4, COPY)], [(1, 2, 3, 4, COPY)]], 2),  # one chunk of those
        ([[(0, 1, 0, 1, COPY), (0, 2, 0, 1, COPY)], [(2, 3, 0, 1, COPY)]], 3),  # in the table's order
        ([[(0, 2, 0, 1, COPY), (0, 1, 0, 1, COPY)], [(2, 3, 0, 1, COPY)]], 2),
        ([[(0, 1, 0, 1, COPY), (2, 1, 1, 1, COPY), (2, 3, 0, 1, COPY)]], 3),  # who waits, keeps others waiting
        ([[(0, 1, 0, 1, REDUCE)], [(2, 1, 0, 1, REDUCE)], [(1, 3, 0, 1, COPY)]], 3),  # the last writer
        ([[], []], 0),
    ],
)
def test_rules(rounds: list[list[Edge]], seconds: float) -> None:
    """Messages of a second each, whatever their number of chunks."""
    s = table(4, 8, rounds)
    assert simulate(s, 1e6, network(1, 0, 0)) == seconds == slow_simulate(s, 1e6, network(1, 0, 0))


def test_no_barriers_between_rounds() -> None:
    """Rank 0 takes 8 seconds for its one message; the others have done five rounds by then."""
    chain = [[(1, 2, 0, 1, COPY)], [(2, 3, 0, 1, COPY)], [(3, 1, 0, 1, COPY)], [(1, 2, 0, 1, COPY)]]
    s = table(5, 8, [[(0, 4, 0, 8, COPY), (1, 2, 0, 1, COPY)], *chain])
    assert simulate(s, 8, SECONDS) == 8
    assert simulate(table(5, 8, [[(1, 2, 0, 1, COPY)], *chain]), 8, SECONDS) == 5


def test_adding_holds_the_receiver_only() -> None:
    net = network(0, 1, 10)
    assert simulate(table(2, 1, [[(0, 1, 0, 1, COPY)]]), 1, net) == 1
    assert simulate(table(2, 1, [[(0, 1, 0, 1, REDUCE)]]), 1, net) == 11
    assert simulate(table(3, 1, [[(0, 1, 0, 1, REDUCE), (0, 2, 0, 1, REDUCE)]]), 1, net) == 12
    assert simulate(table(3, 1, [[(0, 1, 0, 1, REDUCE), (2, 1, 0, 1, REDUCE)]]), 1, net) == 22


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """Generate tables, whatever their edges compute, or do to each other."""
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    rank = st.integers(0, ranks - 1)

    def edge(src: int, dst: int, first: int, count: int, op: int) -> Edge:
        return src, (src + 1 + dst % (ranks - 1)) % ranks, first, min(count, chunks - first), op

    edges = st.builds(edge, rank, rank, st.integers(0, chunks - 1), st.integers(1, chunks), st.integers(0, 1))
    return table(ranks, chunks, draw(st.lists(st.lists(edges, max_size=6), max_size=6)))


def networks() -> st.SearchStrategy[Network]:
    cost = st.sampled_from([0.0, 1.0, 2.5])
    return st.builds(network, cost, cost, cost, st.none() | st.integers(1, 3))


@given(tables(), networks())
@settings(max_examples=150)
def test_any_table_against_the_slow_simulator(s: Any, net: Network) -> None:
    assert simulate(s, [0, 1, 7], net) == pytest.approx([slow_simulate(s, size, net) for size in (0, 1, 7)])


@pytest.mark.parametrize("name", [*schedule.names(), "circulant(4)", "double_tree(3)", "torus(3,4,direct,circulant)"])
def test_algorithms_against_the_slow_simulator(name: str) -> None:
    s = schedule.by_name(name, 12)
    for net in (NETS[0], network(1e-5, 1e-9, 2e-10, per_host=4), network(0, 1e-9, 3e-9, per_host=5)):
        assert simulate(s, SIZES, net) == pytest.approx([slow_simulate(s, size, net) for size in SIZES], rel=1e-9)


def line(ranks: int, op: int) -> Any:
    """Send the whole array from rank to rank."""
    return table(ranks, 1, [[(rank, rank + 1, 0, 1, op)] for rank in range(ranks - 1)])


@pytest.mark.pairwise
@pytest.mark.parametrize("op", [COPY, REDUCE])
@pytest.mark.parametrize("segments", [1, 2, 10, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 17])
def test_a_line_is_a_pipeline_of_segments(ranks: int, segments: int, op: int) -> None:
    for alpha, beta, gamma in ((1e-5, 1e-9, 5e-10), (0, 2e-9, 0), (1e-3, 1e-12, 0)):
        size = 1e6 / segments
        added = gamma * size if op == REDUCE else 0
        stage = alpha + beta * size
        wanted = (ranks - 2) * (stage + added) + segments * stage + added
        got = simulate(line(ranks, op), 1e6, network(alpha, beta, gamma), segment_bytes=size)
        assert got == pytest.approx(wanted)


def test_segments_make_a_long_line_fast() -> None:
    net = network(1e-6, 1e-9, 0)
    assert simulate(line(33, COPY), 1e8, net) == pytest.approx(32 * 0.1, rel=1e-3)
    assert simulate(line(33, COPY), 1e8, net, segment_bytes=1e5) < 0.14
    assert simulate(line(33, COPY), 100, net, segment_bytes=1) > simulate(line(33, COPY), 100, net)


@pytest.mark.parametrize("name", schedule.names())
@pytest.mark.parametrize("net", [NETS[0], SECONDS, network(0, 1, 0.5), network(1e-5, 1e-9, 2e-10, per_host=4)])
def test_segments_do_not_beat_physics(name: str, net: Network) -> None:
    """No port is faster than its bytes, no message begins before there is something to send."""
    for ranks in (2, 5, 12, 16):
        s = schedule.by_name(name, ranks)
        stats, whole = s.stats(), simulate(s, SIZES, net)
        fastest = net.within_host.beta * SIZES * max(stats.max_sent, stats.max_received)
        for segment in (1e3, 1e5, 1e7):
            times = simulate(s, SIZES, net, segment_bytes=segment)
            assert (times >= fastest * (1 - 1e-9)).all()
            if net.within_host.alpha == 0:
                assert (times <= whole * (1 + 1e-9)).all()
        assert simulate(s, SIZES, net, segment_bytes=4e8) == pytest.approx(whole, rel=1e-12)


def fluid(s: Any, per_chunk: int, net: Network) -> float:
    """Simulate segments of one byte, ``per_chunk`` to a chunk, each sent as soon as possible: none is faster."""
    sending, receiving, final = Times(), Times(), Times()
    for r in s.rounds():
        written: dict[tuple[int, int], float] = {}
        for src, dst, first, count, op in r.edges():
            link = link_between(net, src, dst)
            sent = added = max(sending[src], receiving[dst])
            for segment in range(first * per_chunk, (first + count) * per_chunk):
                sent = max(sent, final[src, segment]) + link.alpha + link.beta
                added = max(added, sent) + (link.gamma if op == REDUCE else 0)
                written[dst, segment] = max(written.get((dst, segment), 0.0), added)
            sending[src], receiving[dst] = sent, added
        final.update(written)
    return max([0.0, *sending.values(), *receiving.values()])


@given(st.data())
@settings(max_examples=150)
def test_segments_of_any_table_do_not_beat_physics(data: st.DataObject) -> None:
    s, net, per_chunk = data.draw(tables()), data.draw(networks()), data.draw(st.integers(1, 4))
    time = simulate(s, s.num_chunks * per_chunk, net, segment_bytes=1)
    assert time >= fluid(s, per_chunk, net) * (1 - 1e-9)


def test_what_lies_behind_a_forwarded_chunk_is_sent_after_it() -> None:
    """Chunk 0 arrives slowly, in 20 seconds; once its last segment is forwarded, chunk 1 still takes 4."""
    net = network(0, 1, 0, per_host=2)
    s = table(4, 2, [[(0, 2, 0, 1, COPY)], [(2, 3, 0, 2, COPY)]])
    assert simulate(s, 8, net, segment_bytes=1) >= 25 == fluid(s, 4, net)


def test_one_segment_of_any_size() -> None:
    for segment_bytes in (1e6, 1e300, math.inf):
        assert simulate(line(5, REDUCE), 1e6, NETS[0], segment_bytes) == simulate(line(5, REDUCE), 1e6, NETS[0])


def test_more_bytes_take_longer() -> None:
    for name in schedule.names():
        times = simulate(schedule.by_name(name, 16), np.logspace(0, 9, 50), "infiniband-100g")
        assert all(earlier < later for earlier, later in pairwise(times))


def test_2048_ranks() -> None:
    sizes = np.logspace(2, 9, 15)
    times = simulate(schedule.circulant(2048), sizes, "infiniband-100g")
    assert times.shape == sizes.shape
    assert np.isfinite(times).all()
    assert simulate(schedule.recursive_doubling(2048), 8, "infiniband-100g") < 1e-3


@pytest.mark.parametrize("nbytes", [-1, -1e-9, math.nan, math.inf, [1, -1], [1, math.nan], None, "x", [[1], [1, 2]]])
def test_sizes_that_are_none(nbytes: Any) -> None:
    with pytest.raises(ValueError, match="nbytes is|could not convert|inhomogeneous"):
        simulate(schedule.ring(3), nbytes)


@pytest.mark.parametrize("segment_bytes", [0, -1, -0.0, math.nan])
def test_segments_that_are_none(segment_bytes: float) -> None:
    with pytest.raises(ValueError, match="segment_bytes is .*, wanted a positive number"):
        simulate(schedule.ring(3), 1, segment_bytes=segment_bytes)


def test_an_unknown_network() -> None:
    with pytest.raises(ValueError, match="network is 'avian': no such file that can be read, and none of ethernet-1g"):
        simulate(schedule.ring(3), 1, "avian")


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_tables_that_turn(name: str) -> None:
    """One host stands for all: the same times as when every rank is simulated."""
    near, far = Link(alpha=3e-6, beta=1e-10, gamma=2e-10), Link(alpha=4e-5, beta=9e-10, gamma=1e-10)
    for ranks in (1, 2, 3, 8, 12, 24):
        whole = schedule.by_name(name, ranks)
        assert whole.turns
        plain = replace(whole, turns=False)
        for per_host in (None, 1, 2, 3, 4, 8, 24):
            net = Network(name="two classes", within_host=near, between_hosts=far, per_host=per_host)
            sizes = [1.0, 1e4, 1e8]
            assert simulate(whole, sizes, net) == pytest.approx(simulate(plain, sizes, net), rel=1e-12)


def test_only_tables_that_turn_say_so() -> None:
    for name in schedule.names():
        s = schedule.by_name(name, 12)
        for r in s.rounds() if s.turns else ():
            src, dst, first = ((column + 1) % 12 for column in r[:3])
            turned = Round(src, dst, first, r.count, r.op)
            assert sorted(r.edges()) == sorted(turned.edges())
            assert s.num_chunks == 12

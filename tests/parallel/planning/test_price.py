"""Prices by hand, and cuts into stages against all that there are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from pycomm.parallel.planning.candidates import Candidate, Device, Layer, Part, Task, candidates, meshes
from pycomm.parallel.planning.price import Price, Pricer, Rows, cheapest_cut, maxima, sums, sweeps
from pycomm.schedule import Link, Network

LINK = Link(alpha=1e-3, beta=1e-6, gamma=0.0)
NETWORK = Network(name="test", within_host=LINK, between_hosts=LINK)


def layer(number: int, flops: float = 100.0, **changes: Any) -> Layer:
    parts = {"count": Part(100), "parameters": Part(400), "trainable": Part(400), "activations": Part(1000)}
    work = {"forward": Part(flops), "backward": Part(2 * flops)}
    return Layer((f"layer{number}",), **{**parts, **work, "output": 200.0, **changes})


def task(**changes: Any) -> Task:
    settings = {"devices": 4, "memory": 1e9, "batch": 8, "device": Device(1e3), "network": NETWORK, **changes}
    return Task(**settings)


def priced(candidate: Candidate, layers: list[Layer], **changes: Any) -> Price:
    pricer = Pricer(task(**changes))
    found = pricer.price(candidate, Rows(layers, candidate.tp, pricer.task.device, False, pricer.links))
    assert isinstance(found, Price)
    return found


def test_one_device() -> None:
    found = priced(Candidate(1, 1, 1, microbatches=2), [layer(0), layer(1)], optimizer="adam")
    (memory,) = found.memory
    assert (memory.parameters, memory.gradients, memory.state, memory.buffers) == (800, 800, 1600, 0)
    assert memory.activations == 2000  # of one microbatch: the next begins when they are used up
    assert memory.working == 400
    assert found.times.passes == pytest.approx(2 * 2 * 300 / 1e3, rel=1e-12)
    assert found.times.averaging == found.times.update == 0


def test_replicas() -> None:
    whole = priced(Candidate(1, 1, 4), [layer(0)], device=Device(1e3, 1e6))
    assert whole.memory[0].buffers == 400
    # All-reduce of 400 bytes among 4 at 1 ms and 1 us a byte: 2 steps of recursive doubling.
    assert whole.times.averaging == pytest.approx(2 * (1e-3 + 400e-6), rel=0.02)
    assert whole.times.update == pytest.approx(7 * 400 / 1e6)
    sharded = priced(Candidate(1, 1, 4, sharded_optimizer=True), [layer(0)], device=Device(1e3, 1e6))
    assert sharded.memory[0].state == whole.memory[0].state / 4
    assert sharded.times.update == whole.times.update / 4
    half = priced(Candidate(1, 1, 4), [layer(0)], overlap=0.5)
    assert half.times.averaging == pytest.approx(whole.times.averaging / 2)


def test_split_operators() -> None:
    split = layer(
        0, parameters=Part(0, 400), trainable=Part(0, 400), forward=Part(0, 100), backward=Part(0, 200),
        activations=Part(200, 800), reduced_forward=(200.0,), reduced_backward=(100.0, 100.0),
    )  # fmt: skip
    found = priced(Candidate(1, 4, 1), [split])
    assert found.memory[0].parameters == 100
    assert found.memory[0].activations == 400
    sums_of = [2 * (1e-3 + nbytes * 1e-6) for nbytes in (200, 100, 100)]
    assert found.times.passes == pytest.approx(300 / 4 / 1e3 + sum(sums_of), rel=0.02)


def test_a_pipeline() -> None:
    found = priced(Candidate(4, 1, 1, microbatches=8), [layer(i) for i in range(4)], network=free())
    assert [[each.name for each in stage] for stage in found.stages] == [[f"layer{i}"] for i in range(4)]
    # 1F1B: (m + p - 1) (F + B), and min(p - s, m) microbatches under way.
    assert found.times.passes == pytest.approx((8 + 3) * 0.3, rel=1e-12)
    kept = [memory.activations for memory in found.memory]
    inputs, outputs = [0, 200, 200, 200], [200, 200, 200, 0]
    assert kept == [(1000 + outputs[i]) * (4 - i) for i in range(4)]
    assert [memory.buffers for memory in found.memory] == [8 * (inputs[i] + outputs[i]) for i in range(4)]
    again = priced(Candidate(4, 1, 1, microbatches=8, recompute=True), [layer(i) for i in range(4)], network=free())
    assert again.times.passes == pytest.approx((8 + 3) * 0.4, rel=1e-12)
    assert again.memory[0].activations < found.memory[0].activations


def free() -> Network:
    link = Link(alpha=0.0, beta=0.0, gamma=0.0)
    return Network(name="free", within_host=link, between_hosts=link)


def test_cores_are_shared() -> None:
    alone = priced(Candidate(1, 1, 4), [layer(0)], network=free())
    crowded = priced(Candidate(1, 1, 4), [layer(0)], network=free(), cores=2)
    assert crowded.times.passes == pytest.approx(2 * alone.times.passes)
    stages = [layer(i) for i in range(4)]
    pipeline = priced(Candidate(4, 1, 1, microbatches=16), stages, network=free(), cores=1)
    assert pipeline.times.passes == pytest.approx(16 * 4 * 0.3)  # one core does all the work, without a bubble


def test_stages_that_are_uneven() -> None:
    layers = [layer(0, 100), layer(1, 100), layer(2, 200), layer(3, 400)]
    found = priced(Candidate(2, 1, 1, microbatches=4), layers, network=free())
    assert [len(stage) for stage in found.stages] == [3, 1]
    assert found.times.passes >= 4 * 1.2


def test_memory_moves_the_cut() -> None:
    layers = [layer(0, 100), layer(1, 100), layer(2, 200, parameters=Part(4000), trainable=Part(4000))]
    roomy = priced(Candidate(2, 1, 1), layers, network=free())
    assert [len(stage) for stage in roomy.stages] == [2, 1]
    layers[1] = layer(1, 100, parameters=Part(4000), trainable=Part(4000))
    tight = priced(Candidate(2, 1, 1), layers, network=free(), memory=roomy.memory[0].total + 16000 + 1)
    assert max(memory.total for memory in tight.memory) <= roomy.memory[0].total + 16001


def test_what_does_not_fit_says_how_much_would() -> None:
    pricer = Pricer(task(memory=3000))
    layers = [layer(0), layer(1)]
    for candidate in (Candidate(1, 1, 1), Candidate(2, 1, 1)):
        rows = Rows(layers, 1, pricer.task.device, False, pricer.links)
        least = pricer.price(candidate, rows)
        assert isinstance(least, float)
        assert least > 3000
        enough = Pricer(task(memory=least))
        fitting = enough.price(candidate, rows)
        assert isinstance(fitting, Price)
        assert fitting.largest == pytest.approx(least)
    frozen = [layer(0), layer(1, trainable=Part())]
    assert math.isinf(pricer.price(Candidate(2, 1, 1), Rows(frozen, 1, pricer.task.device, False, pricer.links)))  # type: ignore[arg-type]


def test_cuts_are_the_best() -> None:
    source = np.random.default_rng(0)
    for _ in range(200):
        layers, stages = int(source.integers(1, 7)), int(source.integers(1, 4))
        costs = source.integers(1, 9, (stages, layers, layers)).astype(float)
        allowed = source.random((stages, layers, layers)) < 0.8
        best = math.inf
        for inner in itertools.combinations(range(1, layers), stages - 1):
            ends = [0, *inner, layers]
            picked = [(n, a, b - 1) for n, (a, b) in enumerate(itertools.pairwise(ends))]
            if all(allowed[each] for each in picked):
                best = min(best, max(costs[each] for each in picked))
        cuts = cheapest_cut(costs, allowed)
        assert (cuts is None) == math.isinf(best)
        if cuts is not None:
            ends = [*cuts, layers]
            assert cuts[0] == 0
            assert max(costs[n, a, b - 1] for n, (a, b) in enumerate(itertools.pairwise(ends))) == best


def test_sums_and_maxima() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    for first, last in itertools.combinations_with_replacement(range(5), 2):
        assert sums(values)[first, last] == pytest.approx(values[first : last + 1].sum())
        assert maxima(values)[first, last] == values[first : last + 1].max()


def test_gradients_come_as_activations_go() -> None:
    source = np.random.default_rng(1)
    kept, gradients = source.random(6), source.random(6)
    for first, last in itertools.combinations_with_replacement(range(6), 2):
        moments = [kept[first : at + 1].sum() + gradients[at : last + 1].sum() for at in range(first, last + 1)]
        assert sweeps(kept, gradients)[first, last] == pytest.approx(max(moments))
    (memory,) = priced(Candidate(1, 1, 1), [layer(0), layer(1)]).memory
    assert memory.activations + memory.gradients == 2400  # the second layer's gradients beside all that is kept
    assert priced(Candidate(1, 1, 1, microbatches=2), [layer(0)]).memory[0].gradients == 400


def test_candidates() -> None:
    found = list(meshes(8))
    assert len(found) == len(set(found)) == 10
    assert all(math.prod(mesh) == 8 for mesh in found)
    assert candidates(1, 1, 3, 8) == []
    many = candidates(2, 1, 2, 8)
    assert {each.microbatches for each in many} == {1, 2, 4}
    assert len(many) == len(set(many)) == 3 * 2 * 2
    assert Candidate(2, 1, 4).name == "pp=2, dp=4"
    assert Candidate(1, 1, 1).name == "one device"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"memory": 0.0}, "memory is 0.0"),
        ({"batch": 0}, "batch is 0"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"cores": 0}, "cores is 0"),
        ({"optimizer": "magic"}, "optimizer is 'magic', wanted one of sgd"),
    ],
)
def test_tasks_that_make_no_sense(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        task(**changes)
    with pytest.raises(ValueError, match="flops is 0"):
        Device(0)

"""Properties of every method: nothing is lost, nothing is biased, an overflow leaves no trace, state travels."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives.bucket import FINGERPRINT_BITS, FINGERPRINT_PLACES
from pycomm.compression import feedback
from tests.compression.machines import Gradients, gradients_of
from tests.ranks import RankPool
from tests.reducer.attaching import attached, own_state

Pools = Callable[[int], RankPool]

METHODS: dict[str, Any] = {
    "topk": pycomm.TopK(0.02),
    "topk half": pycomm.TopK(0.02, half_values=True),
    "topk dense sum": pycomm.TopK(0.9),
    "topk whole": pycomm.TopK(1.0),
    "dgc": pycomm.DGC(0.02, 0.9, warmup_steps=5),
    "dgc half": pycomm.DGC(0.02, 0.9, nesterov=True, half_values=True),
    "int8": pycomm.Int8(),
    "int4": pycomm.Int4(),
    "fp8": pycomm.FP8(),
    "fp8 e5m2": pycomm.FP8("e5m2", block=64),
    "onebit": pycomm.OneBit(),
    "chunktopk": pycomm.ChunkTopK(20, 256, decay=1.0),
    "chunktopk 4": pycomm.ChunkTopK(64, 64, 4, decay=1.0),
    "chunktopk decayed": pycomm.ChunkTopK(9, 512, 8, decay=0.9),
    "powersgd": pycomm.PowerSGD(2),
    "randomk": pycomm.RandomK(0.05),
    "qsgd": pycomm.QSGD(7),
    "terngrad": pycomm.TernGrad(),
    "randomk without feedback": pycomm.RandomK(0.05, error_feedback=False),
    "powersgd without feedback": pycomm.PowerSGD(2, error_feedback=False),
}
BLOCKS = ["fp8", "fp8 e5m2", "int8", "int4", "onebit"]
WITH_FLOAT32 = [*BLOCKS, "chunktopk", "chunktopk 4"]
FEEDING_BACK = ["topk", "topk half", "topk dense sum", "topk whole", "powersgd", "randomk", *WITH_FLOAT32]
UNBIASED = {
    "qsgd 1": pycomm.QSGD(1),
    "qsgd 7": pycomm.QSGD(7),
    "qsgd 127": pycomm.QSGD(127),
    "terngrad": pycomm.TernGrad(),
    "randomk": pycomm.RandomK(0.1, error_feedback=False),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shapes = {"w": (50, 61), "b": (61,), "conv": (12, 5, 3, 3), "tiny": (1, 2)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


class Run:
    """Run of an attached method that is fed gradients."""

    def __init__(self, method: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.params = parameters(dtype)
        self.size = dist.get_world_size()
        self._options = {"compression": method, "timeout": 30, **options}

    @contextmanager
    def attached(self) -> Iterator[Run]:
        optimizer = torch.optim.SGD(self.params.values(), lr=0.1)
        with attached(
            optimizer, self.params.items(), **{k: v for k, v in self._options.items() if k != "timeout"}
        ) as r:
            self.reducer = r
            yield self

    def feed(self, everyone: Gradients) -> dict[str, torch.Tensor]:
        mine = everyone[dist.get_rank()]
        for p in self.params.values():
            p.grad = None
        loss: Any = torch.stack([(p * mine[name]).sum() for name, p in self.params.items()]).sum()
        loss.backward()
        return {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        state: dict[str, dict[str, torch.Tensor]] = own_state(self.reducer)
        return state


def total(tensor: torch.Tensor) -> torch.Tensor:
    summed = tensor.detach().double().clone()
    dist.all_reduce(summed)
    return summed


def conserves(name: str, dtype: torch.dtype) -> None:
    with Run(METHODS[name], dtype).attached() as run:
        before = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in run.params.items()}
        for step in range(12):
            everyone = gradients_of(run.params, run.size, step)
            average = run.feed(everyone)
            state = run.state()
            for n, p in run.params.items():
                left = total(state[n]["residual"]) if n in state and "residual" in state[n] else torch.zeros_like(p)
                came = sum(each[n].double() for each in everyone) / run.size
                # .grad has been rounded to the parameter's type, what is kept has not.
                exact = dtype == torch.float64 and name not in WITH_FLOAT32  # whose values are float32
                tolerance = 1e-12 if exact else 2e-2 if dtype == torch.bfloat16 else 1e-6
                scale = float(1 + before[n].abs().max() + torch.as_tensor(came).abs().max())
                assert (left + average[n].double() - before[n] - came).abs().max() <= 2 * tolerance * scale, (n, step)
                before[n] = left.double()


@pytest.mark.parametrize("name", FEEDING_BACK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_sent_and_what_is_left_is_what_came(rank_pools: Pools, name: str, dtype: torch.dtype) -> None:
    rank_pools(3).run(conserves, name, dtype)


def is_unbiased(name: str) -> None:
    """Compare the mean of many roundings of one gradient with it, in standard errors."""
    num_steps = 200
    with Run(UNBIASED[name]).attached() as run:
        everyone = gradients_of(run.params, run.size, 0)
        sums = {n: torch.zeros_like(p) for n, p in run.params.items()}
        squares = {n: torch.zeros_like(p) for n, p in run.params.items()}
        for _ in range(num_steps):
            for n, grad in run.feed(everyone).items():
                sums[n] += grad
                squares[n] += grad**2
        for n in ("w", "conv"):
            mean, wanted = sums[n] / num_steps, sum(each[n] for each in everyone) / run.size
            variance = squares[n] / num_steps - mean**2
            # An element that never varies (a QSGD level hit exactly) has no standard error of its own.
            errors = (mean - wanted) / ((variance.mean() + variance) / 2 / num_steps).sqrt()
            assert errors.mean().abs() < 5 / math.sqrt(errors.numel())
            assert 0.5 < errors.std() < 1.5
            assert errors.abs().max() < 7


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(is_unbiased, name)


def qsgd_variance(levels: int) -> None:
    """Check the bound of Alistarh et al., lemma 3.1, for blocks of 512."""
    with Run(pycomm.QSGD(levels)).attached() as run:
        zeros = {n: torch.zeros_like(p) for n, p in run.params.items()}
        only = gradients_of(run.params, 1, 0)[0]
        everyone = [only] + [zeros] * (run.size - 1)
        error = torch.zeros(())
        for _ in range(50):
            average = run.feed(everyone)
            error += sum(((average[n] * run.size - only[n]) ** 2).sum() for n in ("w", "conv", "tiny")) / 50
        bound = min(512 / levels**2, math.sqrt(512) / levels)
        assert error <= 1.05 * bound * sum((only[n] ** 2).sum() for n in ("w", "conv", "tiny"))


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_the_variance_of_qsgd(two_ranks: RankPool, levels: int) -> None:
    two_ranks.run(qsgd_variance, levels)


def flawed(everyone: Gradients, rank: int, step: int) -> Gradients:
    flaw = (math.inf, -math.inf, math.nan)[step % 3]
    bad = [{n: g.clone() for n, g in each.items()} for each in everyone]
    bad[rank]["w" if step % 2 else "conv"].view(-1)[step] = flaw
    return bad


def leaves_no_trace(
    name: str, flaws: list[tuple[int, int]], loss_scale: float | None, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Run with and without steps that are not finite: the others and the state are the same, bit for bit."""

    class Scaler:
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * (loss_scale or 1.0)

    results = []
    for with_flaws in (False, True):
        with Run(METHODS[name], loss_scaler=Scaler() if loss_scale else None, **options).attached() as run:
            averages = []
            for step in range(7):
                everyone = gradients_of(run.params, run.size, step)
                for rank, at in flaws if with_flaws else []:
                    if at == step:
                        before = run.reducer.state_dict()
                        run.feed(flawed(everyone, rank, step))
                        after = run.reducer.state_dict()
                        assert same(before, after)
                        assert f"on rank {rank}" in run.reducer.stats()["last_nonfinite"]
                averages.append(run.feed(everyone))
            results.append((averages, run.reducer.state_dict()))
    assert same(results[0], results[1])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("name", METHODS)
def test_an_overflow_leaves_no_trace(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(leaves_no_trace, name, [(0, 0), (1, 0), (1, 2), (0, 5), (1, 6)], None)
    two_ranks.run(leaves_no_trace, name, [(1, 1), (0, 4)], 1024.0)


def the_sum_overflows(name: str) -> None:
    """Each rank's gradient is finite, their sum is not: nobody commits."""
    with Run(METHODS[name], average=False).attached() as run:
        run.feed(gradients_of(run.params, run.size, 0))
        before = run.reducer.state_dict()
        everyone = gradients_of(run.params, run.size, 1)
        for each in everyone:
            each["w"].fill_(2.5e38)
        run.feed(everyone)
        assert same(before, run.reducer.state_dict())
        assert run.reducer.stats()["nonfinite_steps"] == 1
        run.feed(gradients_of(run.params, run.size, 2))
        assert run.reducer.stats()["nonfinite_steps"] == 1


@pytest.mark.parametrize("name", METHODS)
def test_a_sum_that_overflows(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(the_sum_overflows, name)


def save_and_go_on(name: str, path: str) -> None:
    rank = dist.get_rank()
    with Run(METHODS[name]).attached() as run:
        for step in range(4):
            run.feed(gradients_of(run.params, run.size, step))
        torch.save(run.reducer.state_dict(), f"{path}{rank}")
        wanted = [run.feed(gradients_of(run.params, run.size, step)) for step in range(4, 8)]
    state = torch.load(f"{path}{rank}", weights_only=True)
    with Run(METHODS[name], bucket_mb=0.01).attached() as run:
        run.feed(gradients_of(run.params, run.size, 99))  # what was there before is forgotten
        run.reducer.load_state_dict(state)
        found = [run.feed(gradients_of(run.params, run.size, step)) for step in range(4, 8)]
    # Blocks and seeds begin with each bucket.
    sensitive_to_buckets = (
        "int8",
        "int4",
        "fp8",
        "chunktopk",
        "qsgd",
        "terngrad",
        "randomk",
        "powersgd",
    )  # blocks, seeds
    if name.startswith(sensitive_to_buckets) or (name == "onebit" and dist.get_world_size() > 2):
        assert state["steps"] == 4
    else:
        assert same(wanted, found)
    with Run(METHODS[name]).attached() as run:
        run.reducer.load_state_dict(state)
        assert same(wanted, [run.feed(gradients_of(run.params, run.size, step)) for step in range(4, 8)])


def load_into(name: str, path: str, old_size: int) -> dict[str, Any]:
    states = [torch.load(f"{path}{rank}", weights_only=True) for rank in range(old_size)]
    with Run(METHODS[name]).attached() as run:
        run.reducer.load_state_dict(states)
        loaded = run.reducer.state_dict()
        run.feed(gradients_of(run.params, run.size, 0))
        buffer = io.BytesIO()
        torch.save(loaded, buffer)
        return loaded


@pytest.mark.parametrize("name", METHODS)
def test_state_goes_on_and_into_other_world_sizes(rank_pools: Pools, name: str, tmp_path: Any) -> None:
    path = str(tmp_path / "state")
    rank_pools(2).run(save_and_go_on, name, path)
    old = [torch.load(f"{path}{rank}", weights_only=True) for rank in range(2)]
    for size in (1, 3):
        new = rank_pools(size).run(load_into, name, path, 2)
        assert all(one["steps"] == 4 for one in new)
        for param, entry in own_state(old[0]).items():
            for key in entry:
                if key == "q":
                    assert all(torch.equal(own_state(one)[param][key], entry[key]) for one in new)
                    continue
                before = sum(own_state(one)[param][key].double() for one in old)
                after = sum(own_state(one)[param][key].double() for one in new)
                torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def bytes_of(method: Any) -> float:
    """Return the bytes per step and rank for one parameter with a million elements."""
    p = nn.Parameter(torch.zeros(1000, 1000))
    with attached(torch.optim.SGD([p], lr=0.1), [("p", p)], compression=method) as reducer:
        for step in range(3):
            p.grad = None
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss: Any = (p * torch.randn(p.shape, generator=generator)).sum()
            loss.backward()
        return float(reducer.stats()["bytes_sent"]) / 3


@pytest.mark.parametrize(
    ("method", "most"),
    [
        (pycomm.TopK(0.001), 5.6 * 1000),
        (pycomm.TopK(0.001, half_values=True), 3.6 * 1000),
        (pycomm.DGC(0.001), 5.6 * 1000),
        (pycomm.TopK(0.01), 5.2 * 10_000),
        (pycomm.Int8(), 1.017e6),
        (pycomm.Int8(block=1024), 1.005e6),
        (pycomm.FP8(), 1.033e6),
        (pycomm.Int4(), 0.5325e6),
        (pycomm.QSGD(127), 1.009e6),
        (pycomm.QSGD(7), 0.509e6),
        (pycomm.QSGD(1), 0.259e6),
        (pycomm.TernGrad(), 0.2541e6),
        (pycomm.ChunkTopK(64), 84 * 244 + 4 * 17 + 8 + FINGERPRINT_BITS),
        (pycomm.OneBit(), 0.12503e6 + FINGERPRINT_BITS),
        (pycomm.RandomK(0.01), 40_020 + 4 * FINGERPRINT_PLACES),
        (pycomm.PowerSGD(2), 2 * 4 * 2000 + 40 + 2 * 4 * FINGERPRINT_PLACES),
    ],
    ids=repr,
)
def test_bytes_on_the_wire(two_ranks: RankPool, method: Any, most: float) -> None:
    for sent in two_ranks.run(bytes_of, method):
        assert 0.9 * most <= sent <= most


def loads_what_fits() -> None:
    """Load DGC's state with missing and foreign entries, and another method's."""
    with Run(pycomm.DGC(0.1)).attached() as run:
        run.feed(gradients_of(run.params, run.size, 0))
        state = run.reducer.state_dict()

        def loads(broken: Any, says: str) -> None:
            with pytest.raises(ValueError, match=says):
                run.reducer.load_state_dict(broken)
            run.reducer.load_state_dict(broken, strict=False)

        rank, entries = str(dist.get_rank()), own_state(state)
        without = {**entries, "w": {"residual": entries["w"]["residual"]}}
        loads({**state, "ranks": {rank: without}}, r"state\['w'\]\['velocity'\] is nothing, wanted shape \[50, 61\]")
        foreign = {**entries, "w": {**entries["w"], "q": torch.zeros(3)}}
        loads(
            {**state, "ranks": {rank: foreign}},
            r"state\['w'\] has 'q', which \['residual', 'velocity'\] do not include",
        )
        loads({**state, "method": "TopK"}, "state is from compression TopK, wanted DGC .strict=False loads")
        half = {name: {"residual": entry["residual"]} for name, entry in entries.items() if "residual" in entry}
        run.reducer.load_state_dict(state)
        assert same(run.reducer.state_dict(), state)
        run.reducer.load_state_dict({**state, "method": "TopK", "ranks": {rank: half}}, strict=False)
        assert same(run.reducer.state_dict(), state), "velocities stay"


def test_state_that_fits_in_part(two_ranks: RankPool) -> None:
    two_ranks.run(loads_what_fits)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: [pycomm.TopK(1), pycomm.DGC(1), pycomm.RandomK(1), pycomm.Auto(1)], 1),
        (lambda: [pycomm.TopK(1.0), pycomm.DGC(1.0), pycomm.RandomK(1.0), pycomm.ChunkTopK(64, decay=1)], 0),
    ],
)
def test_an_integer_for_a_ratio_is_all_and_is_said_once(
    make: Callable[[], Any], says: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback._log_once.cache_clear()
    monkeypatch.setenv("RANK", "1")  # only rank 0 says it
    make()
    monkeypatch.setenv("RANK", "0")
    make()
    assert caplog.messages == says * ["[pycomm rank 0] ratio=1 sends all; 0.01 is 1 %"]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: pycomm.PowerSGD(0), ValueError, "rank is 0, wanted an integer >= 1"),
        (lambda: pycomm.PowerSGD(2.0), TypeError, "rank is 2.0, wanted an integer >= 1"),  # type: ignore[arg-type]
        (lambda: pycomm.QSGD(0), ValueError, "levels is 0, wanted an integer from 1 to 127"),
        (lambda: pycomm.QSGD(128), ValueError, "levels is 128, wanted an integer from 1 to 127"),
        (lambda: pycomm.QSGD(7, seed=-1), ValueError, "seed is -1, wanted an integer >= 0"),
        (lambda: pycomm.TernGrad(seed="x"), TypeError, "seed is 'x', wanted an integer >= 0"),  # type: ignore[arg-type]
        (lambda: pycomm.RandomK(0.0), ValueError, "ratio is 0.0, wanted 0 < ratio <= 1"),
        (lambda: pycomm.RandomK(0.1, error_feedback=1), TypeError, "error_feedback is 1, wanted True or False"),  # type: ignore[arg-type]
        (lambda: pycomm.Int8(error_feedback=None), TypeError, "error_feedback is None, wanted True or False"),  # type: ignore[arg-type]
        (lambda: pycomm.TopK(0.1, half_values="yes"), TypeError, "half_values is 'yes', wanted True or False"),  # type: ignore[arg-type]
        (lambda: pycomm.Auto(2.0), ValueError, "ratio is 2.0, wanted 0 < ratio <= 1"),
        (lambda: pycomm.Auto(momentum=1.0), ValueError, "momentum is 1.0, wanted momentum >= 0 and < 1"),
    ],
)
def test_settings_out_of_range(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == says

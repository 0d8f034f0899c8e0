"""attach's path for GPUs has no race between streams, frees no memory early, and reads no value on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm import kernels
from pycomm.collectives.transport.gpu import GpuQueue, GpuWork
from pycomm.compression.methods.half import HalfExchange
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.recorded import unseen_references
from tests.reducer.test_gpu_path import METHODS, Scaler
from tests.stream_order import MAIN, Streams, simulated_gpu

BUCKET_MB = 0.002

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaler": {"scaler": True},
    "clip": {"clip": True},
    "weights": {"weight": 2.0},
    "accumulate": {"accumulate": 2},
    "unused": {"unused": True},
    "mixed dtypes": {"mixed": True, "scaler": True},
    "local norm": {"local_norm": 0.3, "mixed": True},
}


def layers(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [nn.Linear(16, 16, dtype=dtype) for _ in range(count)]


class Mixed(nn.Module):
    """Layers in float32, then in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Sequential(*layers(2)), nn.Sequential(*layers(2, torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.narrow(self.wide(x).bfloat16())
        return y


def train(rank: int, streams: Streams, method: Any, feature: dict[str, Any], steps: int = 6) -> None:
    """Steps of which one has an overflow on rank 1, and another one no gradient of a layer on rank 0."""
    torch.manual_seed(0)
    options = {"accumulate": feature.get("accumulate", 1), "bucket_mb": BUCKET_MB, "check_replicas": 2}
    model = Mixed() if feature.get("mixed") else nn.Sequential(*layers(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = Scaler() if feature.get("scaler") else None
    with attached(optimizer, model, compression=method, loss_scaler=scaler, **options) as reducer:
        for step in range(steps):
            optimizer.zero_grad()
            if scaler is not None:
                scaler.value = 2.0**step
            for _ in range(feature.get("accumulate", 1)):
                if "weight" in feature:
                    reducer.set_weight(feature["weight"] + rank)
                is_short = bool(feature.get("unused")) and step == 4 and rank == 0
                forward: Any = model[:-1] if is_short and isinstance(model, nn.Sequential) else model
                loss = forward(torch.randn(4, 16)).float().square().mean() * (torch.inf if step == 3 and rank else 1.0)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if feature.get("clip"):
                reducer.clip_grad_norm(0.5)
            optimizer.step()
    streams.assert_ordered()


ALL = {
    **METHODS,
    "fp8": pycomm.FP8(),
    "int4": pycomm.Int4(),
    "chunktopk": pycomm.ChunkTopK(8),
    "bf16, two hops": pycomm.BF16(sum="float32"),
    "dgc, half": pycomm.DGC(0.2, 0.9, half_values=True),
    "topk, nearly all": pycomm.TopK(0.9),
}


def cases() -> list[Any]:
    """Every method with every feature; those that rarely tell anything new are slow."""
    pairs = [(method, feature) for method in ALL for feature in FEATURES if method == "dgc" or feature != "local norm"]
    usual = ("none", "fp16", "dgc")
    return [
        pytest.param(*pair, marks=() if pair[0] in usual or pair[1] == "mixed dtypes" else pytest.mark.slow)
        for pair in pairs
    ]


@pytest.mark.parametrize(("method", "feature"), cases())
@on_ranks(2)
def test_no_race(method: str, feature: str) -> None:
    local_norm = "local_norm" in FEATURES[feature]
    compression: Any = pycomm.DGC(0.2, 0.9, clip_local_norm=0.3) if local_norm else ALL[method]
    with simulated_gpu() as streams:
        train(torch.distributed.get_rank(), streams, compression, FEATURES[feature])
        assert streams.launches.keys() - {MAIN}, "nothing was sent on another stream"


def normed(count: int) -> nn.Sequential:
    """Layers with buffers between them."""
    return nn.Sequential(*(part for layer in layers(count) for part in (layer, nn.BatchNorm1d(16))))


USES: dict[str, dict[str, Any]] = {
    "buffers from rank 0": {"model": normed, "options": {"buffers": "broadcast"}},
    "buffers averaged": {"model": normed, "options": {"buffers": "average"}},
    "figures": {"figures": True},
    "loaded state": {"state": True},
    "pycomm's scaler": {"loss_scaler": True},
    "fused Adam": {"fuse": True, "adam": True},
    "master weights": {"masters": True},
    "master weights, accumulated": {"masters": True, "accumulate": 2},
    "kept gradients": {"keep": lambda grads: grads[::2]},
    "tensors of gradients": {"keep": lambda grads: [grad.view(-1) for grad in grads]},
    "a veto": {"veto": True},
    "sums": {"options": {"average": False}},
    "shared step": {"adam": True, "options": {"shard": "optimizer"}, "dense": True},
}
"""What scripts do besides; ``dense``: without compression alone."""


def use(rank: int, method: Any, spec: dict[str, Any], steps: int = 7) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if spec.get("masters") else torch.float32
    model = spec["model"](3) if "model" in spec else nn.Sequential(*layers(5, dtype))
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, 1e-3) if spec.get("adam") else torch.optim.SGD(params, 0.01)
    if spec.get("fuse"):
        pycomm.fuse(optimizer)
    if spec.get("masters"):
        pycomm.master_weights(optimizer)
    wants_scaler = spec.get("loss_scaler") or method.transactional or spec.get("veto")
    scaler = pycomm.LossScaler(init_scale=8.0) if wants_scaler else None
    options = {"bucket_mb": BUCKET_MB, "check_replicas": 2, **spec.get("options", {})}
    options |= {"accumulate": spec.get("accumulate", 1), "loss_scaler": scaler, "compression": method}
    kept: list[torch.Tensor] = []
    with attached(optimizer, model, **options) as reducer:
        for step in range(steps):
            optimizer.zero_grad()
            if spec.get("veto") and step == 3 and rank == 1:
                reducer.veto_step("a test")
            for _ in range(spec.get("accumulate", 1)):
                loss = model(torch.randn(4, 16, dtype=dtype)).float().square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            if "keep" in spec:
                kept = spec["keep"]([param.grad for param in params])
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if spec.get("figures"):
                reducer.stats()
            if spec.get("state") and step == 3:
                reducer.load_state_dict(reducer.state_dict())
    assert "keep" not in spec or kept


@pytest.mark.parametrize(
    ("method", "what"),
    [("none", what) for what in USES]
    + [("topk", what) for what in USES if "dense" not in USES[what]]
    + [pytest.param("powersgd", what, marks=pytest.mark.slow) for what in USES if "dense" not in USES[what]],
)
@on_ranks(2)
def test_no_race_whatever_scripts_do(method: str, what: str) -> None:
    with simulated_gpu() as streams:
        use(torch.distributed.get_rank(), METHODS[method], USES[what])
        streams.assert_ordered()


def found_without(name: str, replacement: Any, kind: type = GpuQueue) -> str:
    """Return the races of some steps in which a method of ``kind`` is replaced."""
    with simulated_gpu() as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, replacement)
        with pytest.raises(AssertionError) as found:
            train(torch.distributed.get_rank(), streams, pycomm.FP16(), {"scaler": True})
    return str(found.value)


@on_ranks(2)
def test_what_does_not_wait_is_found() -> None:
    def call(self: GpuQueue, job: Any) -> GpuWork:
        with self.as_current():
            return GpuWork(self, self._stream.now(), (), job(), [])

    assert "written by pack_flagged on main, " in found_without("call", call)
    assert "read by aten.add_.Tensor on main" in found_without("ends_within", lambda *_: True, GpuWork)


@on_ranks(2)
def test_memory_that_is_freed_early_is_found() -> None:
    """As that of the magnitude to which the ranks agree, which is made on one stream and read on the other."""
    plain = HalfExchange.send

    def forgetful(self: HalfExchange) -> None:
        plain(self)
        self._largest = None

    found = found_without("send", forgetful, HalfExchange)
    assert "freed while used by all_reduce on communication" in found


@on_ranks(2)
def test_scratch_of_two_streams_is_found() -> None:
    with simulated_gpu() as streams, torch.no_grad():
        scratch, x = kernels.Scratch(), torch.ones(4)
        kernels.squared_norms([x], scratch=scratch)
        with streams.on(streams.new("other")):
            kernels.squared_norms([x], scratch=scratch)
        assert "scratch of squared_norms" in streams.races


@pytest.mark.parametrize("method", ["none", "fp16", "bf16", "topk", "dgc", "int8", "powersgd"])
@on_ranks(2)
def test_gradients_are_freed_as_their_bucket_is_launched(method: str) -> None:
    """Autograd gets their memory for the next ones. More than one bucket of them never exists beside the buckets."""
    size = 24 * 24 * 4
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(8)))
    optimizer, alive = torch.optim.SGD(model.parameters(), lr=0.01), list[int]()
    wait = GpuWork.ends_within
    with simulated_gpu() as streams, pytest.MonkeyPatch.context() as patch:

        def waiting(self: GpuWork, seconds: float | None) -> bool:
            alive.append(streams.count_alive(size))
            return wait(self, seconds)

        patch.setattr(GpuWork, "ends_within", waiting)
        with attached(optimizer, model, compression=METHODS[method], bucket_mb=BUCKET_MB, check_replicas=0) as reducer:
            for _ in range(4):
                optimizer.zero_grad()
                before, x = streams.count_alive(size), torch.randn(4, 24)
                alive.clear()
                model(x).square().mean().backward()
                optimizer.step()
            assert reducer.stats()["num_buckets"] > 1
        assert max(alive) <= before + 1


LAUNCHES = {
    "none": (1, 0),
    "bf16": (3, 0),
    "fp16": (5, 0),
    "topk": (3, 2),
    "dgc": (3, 2),
    "int8": (9, 4),
    "fp8": (9, 4),
    "int4": (9, 4),
    "qsgd": (10, 4),
    "terngrad": (10, 4),
    "onebit": (12, 4),
    "powersgd": (20, 6),
    "randomk": (44, 6),
    "chunktopk": (12, 6),
}
"""Launches for a bucket of one matrix, besides collectives: until it is sent, and after all have arrived. A kernel of
pycomm counts as one, though the first may take another one for its addresses."""


@pytest.mark.parametrize("method", LAUNCHES)
@on_ranks(2)
def test_launches(method: str) -> None:
    before, after = LAUNCHES[method]
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts: list[tuple[int, int]] = []  # launches of pycomm until the first wait, and all of them
    wait, options = GpuWork.ends_within, {"bucket_mb": BUCKET_MB, "check_replicas": 0}
    with simulated_gpu() as streams, unseen_references(), pytest.MonkeyPatch.context() as patch:

        def waiting(self: GpuWork, seconds: float | None) -> bool:
            if len(counts) == 0:
                counts.append((streams.own_launches, 0))
            return wait(self, seconds)

        patch.setattr(GpuWork, "ends_within", waiting)
        with attached(optimizer, model, compression=ALL[method], **options) as reducer:
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 24)).square().mean()
                counts.clear()
                streams.own_launches = 0
                loss.backward()
                total = streams.own_launches
                optimizer.step()
            buckets = reducer.stats()["num_buckets"]
        assert counts[0][0] <= before * buckets + 6, "until they are sent"
        assert total - counts[0][0] <= after * buckets + 12, "after they have arrived"

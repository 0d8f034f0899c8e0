"""The same bits, messages and checkpoints as before: what must stay when the inside of a step is built anew.

``python -m tests.reducer.test_oracle`` writes ``tests/data/oracle.json``, after a change that is meant.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from bench.harness.processor import describe_processor
from pycomm.collectives.recorder import recorders
from tests.hosts import on_hosts
from tests.ranks import RankPool
from tests.reducer.attaching import grouped, over_tcp

DATA = Path(__file__).parents[1] / "data" / "oracle.json"
NUM_STEPS = 6
SIZES = ((300,), (70,), (5,), (20, 30), (129,))

METHODS: dict[str, Any] = {
    "dense": None,
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "fp8": pycomm.FP8(),
    "int8": pycomm.Int8(),
    "int4": pycomm.Int4(),
    "onebit": pycomm.OneBit(),
    "qsgd": pycomm.QSGD(8),
    "terngrad": pycomm.TernGrad(),
    "topk": pycomm.TopK(0.25),
    "chunktopk": pycomm.ChunkTopK(4),
    "randomk": pycomm.RandomK(0.25),
    "dgc": pycomm.DGC(0.25, momentum=0.5),
}

HALF: dict[str, Any] = {"dtype": torch.float16, "masters": True, "scaler": True, "optimizer": "Adam"}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{f"{name}, {ranks} ranks": {"method": name, "ranks": ranks} for name in METHODS for ranks in (2, 3)},
    **{f"{name} over tcp": {"method": name, "tcp": True} for name in ("dense", "fp16", "topk")},
    **{f"{name}, hosts aab": {"method": name, "hosts": "aab"} for name in ("dense", "int8", "topk", "dgc")},
    **{f"{name}, accumulate": {"method": name, "accumulate": 2} for name in ("dense", "topk", "dgc", "fp16")},
    **{f"Adam, {name}": {"method": name, "optimizer": "Adam"} for name in ("dense", "topk", "int8")},
    "Adam, shard": {"optimizer": "Adam", "shard": "optimizer"},
    "Adam, shard, full averages": {"optimizer": "Adam", "shard": "optimizer", "grads": "full"},
    "Adam, shard, fp16": {"optimizer": "Adam", "shard": "optimizer", "method": "fp16", "ranks": 3},
    "Adam, shard, hosts abb": {"optimizer": "Adam", "shard": "optimizer", "hosts": "abb"},
    "momentum, shard, accumulate": {"optimizer": "momentum", "shard": "optimizer", "accumulate": 2},
    "LARS": {"optimizer": "LARS"},
    **{f"{name}, survive": {"method": name, "on_failure": "shrink", "ranks": 3} for name in ("dense", "topk")},
    "survive, accumulate, hosts aab": {"on_failure": "shrink", "accumulate": 2, "hosts": "aab"},
    **{f"bfloat16, {name}": {"method": name, "dtype": torch.bfloat16} for name in ("dense", "topk")},
    "float16, masters, scaler": {**HALF, "optimizer": "momentum"},
    "float16, masters, scaler, accumulate": {
        **HALF,
        "accumulate": 2,
    },
    "bfloat16, masters, shard": {
        **HALF,
        "dtype": torch.bfloat16,
        "shard": "optimizer",
    },
    "scaler, topk": {"method": "topk", "scaler": True},
    "scaler, an overflow": {"method": "topk", "scaler": True, "overflow": 3},
    "weights": {"weights": True, "ranks": 3},
    "weights, a rank without a batch": {"weights": True, "skips": 2, "ranks": 3},
    "a rank without a batch": {"skips": 2, "ranks": 3},
    "a rank without a batch, topk": {"method": "topk", "skips": 2},
    "a veto": {"vetoes": 3},
    "a veto, dgc": {"method": "dgc", "vetoes": 3},
    "sums": {"average": False},
    "reduce()": {"by_hand": True},
    "buffers": {"buffers": "average", "ranks": 3},
    "one rank": {"ranks": 1},
    **{f"ddp, {name}": {"way": "ddp", "method": name} for name in ("dense", "fp16", "topk", "dgc")},
    "local_sgd": {"way": "local_sgd"},
    "local_sgd, topk, delay": {"way": "local_sgd", "method": "topk", "local": {"delay": 1, "fragments": 2}},
    "gossip": {"way": "gossip", "ranks": 3},
}

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.125),
    "momentum": lambda params: torch.optim.SGD(params, 0.125, momentum=0.5, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, 0.03125),
    "LARS": lambda params: pycomm.LARS(params, 4.0),
}


def numbers(count: int, seed: int) -> torch.Tensor:
    """Return numbers between -0.5 and 0.5. They are the same on all processors; torch's random ones may not be."""
    return ((torch.arange(count, dtype=torch.float64) * 7919 + 104729 * seed) % 1013) / 1013 - 0.5


class Squares(nn.Module):
    """Sum of weighted squares: its gradients are made by operations on elements, which round alike everywhere."""

    def __init__(self, dtype: torch.dtype, *, sees_rank: bool) -> None:
        super().__init__()
        self._most_seen = 1000 if sees_rank else 10
        values = (numbers(torch.Size(size).numel(), seed).view(size) for seed, size in enumerate(SIZES))
        self.params = nn.ParameterList([nn.Parameter(value.to(dtype)) for value in values])
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, seed: int) -> torch.Tensor:
        self.seen = self.seen + seed // 10 % self._most_seen
        terms = [p * p * numbers(p.numel(), seed + i).view(p.shape).to(p.dtype) for i, p in enumerate(self.params)]
        return torch.stack([term.float().sum() for term in terms]).sum()


def digest(value: Any) -> str:
    """Return a hash of numbers, texts and tensors, in containers or not."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            found.update(f"{each.dtype}{list(each.shape)}".encode())
            found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(each, dict):
            for key in sorted(each, key=str):
                add(str(key))
                add(each[key])
        elif isinstance(each, (list, tuple)):
            for item in each:
                add(item)
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()[:12]


def files_in(folder: Path) -> dict[str, int]:
    """Return the sizes of a checkpoint's files, but for the manifest's, which has times and nonces."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    return {re.sub(r"\d{6,}", "N", path.relative_to(folder).as_posix()): path.stat().st_size for path in files}


def observed(configuration: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train by ``configuration`` on this rank; return what there is in the end."""
    given: dict[str, Any] = {
        "method": "dense",
        "optimizer": "SGD",
        "dtype": torch.float32,
        "hosts": "",
        "way": "attach",
    }
    given |= configuration
    take = given.pop
    rank, way, accumulate = dist.get_rank(), take("way"), given.get("accumulate", 1)
    vetoes, skips, overflow = (take(name, -1) for name in ("vetoes", "skips", "overflow"))
    weights, by_hand, local = take("weights", False), take("by_hand", False), take("local", {})
    hosts, method = take("hosts"), METHODS[take("method")]
    model = Squares(take("dtype"), sees_rank="buffers" in given)
    optimizer = OPTIMIZERS[take("optimizer")](model.parameters())
    if take("masters", False):
        pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(16.0, growth_interval=2) if take("scaler", False) else None
    given.pop("ranks", None)
    called: Any = model
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_hosts(hosts) if hosts else contextlib.nullcontext())
        stack.enter_context(over_tcp(take("tcp", False)))
        if way == "ddp":
            called = DistributedDataParallel(model, bucket_cap_mb=0.001)
            handle: Any = pycomm.ddp.register(called, compression=method, loss_scaler=scaler, timeout=30)
            stack.callback(handle.remove)
        elif way == "local_sgd":
            handle = pycomm.local_sgd(optimizer, model, every=2, compression=method, timeout=30, **local)
            stack.callback(handle.detach)
        elif way == "gossip":
            handle = pycomm.gossip(optimizer, model, topology="ring", timeout=30)
            stack.callback(handle.detach)
        else:
            options = grouped(timeout=30, bucket_mb=0.001, compression=method, loss_scaler=scaler, **given)
            handle = pycomm.attach(optimizer, model, **options)
            stack.callback(handle.detach)
        own = recorders()
        before = sum(recorder.count for recorder in own)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            if step == vetoes and rank == 0:
                handle.veto_step()
            if step == skips and rank == 1:
                handle.skip_batch()
            for part in range(0 if step == skips and rank == 1 else accumulate):
                if weights:
                    handle.set_weight(2 + rank + step)
                loss = called(100 * rank + 10 * step + part) * (2.0 if by_hand else 1.0)
                if by_hand:
                    params = list(model.parameters())
                    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                        param.grad = grad
                    handle.reduce()
                    continue
                scaled = loss if scaler is None else scaler.scale(loss)
                (scaled * (float("inf") if step == overflow and rank == 0 else 1.0)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        if way == "local_sgd":
            handle.meet()
        found: dict[str, Any] = {
            "weights": digest(list(model.state_dict().values())),
            "optimizer": digest(optimizer.state_dict()["state"]),
            "operations": sum(recorder.count for recorder in own) - before,
        }
        if way in ("attach", "ddp"):
            found["bytes"] = handle.stats()["bytes_sent"]
            found["state"] = digest(handle.state_dict())
        if way == "attach":
            saved = pycomm.save(folder, handle, keep=1).wait()
            dist.barrier()  # until then another rank may not have removed the file that would tell of its errors
            found |= {"files": files_in(Path(saved))} if rank == 0 else {}
        return found


def found_by(pools: Callable[[int], RankPool], name: str, folder: str) -> list[dict[str, Any]]:
    configuration = CONFIGURATIONS[name]
    size = configuration.get("ranks") or len(configuration.get("hosts", "")) or 2
    return pools(size).run(observed, configuration, folder, timeout=60)


def processor() -> str:
    """Return what decides which square roots torch's Adam takes: MKL has others for each vendor."""
    return f"{_capability()} {describe_processor().get('vendor_id')}"


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_as_before(rank_pools: Callable[[int], RankPool], name: str, tmp_path: Path) -> None:
    told = json.loads(DATA.read_text())
    wanted, found = told[name], json.loads(json.dumps(found_by(rank_pools, name, str(tmp_path))))
    is_like = torch.__version__.partition("+")[0] == told["torch"] and _capability() != "DEFAULT"
    if not is_like or (name.startswith("Adam") and processor() != told["processor"]):
        for of in (*wanted, *found):  # torch's own steps may round in another way
            for key in ("weights", "optimizer", "state", "bytes", "files"):
                of.pop(key, None)
    assert found == wanted


def main() -> None:
    import tempfile

    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    told: dict[str, Any] = {"torch": torch.__version__.partition("+")[0], "processor": processor()}
    for name in CONFIGURATIONS:
        with tempfile.TemporaryDirectory() as folder:
            told[name] = found_by(pool_of, name, folder)
        print(name, told[name][0], file=sys.stderr)
    DATA.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(told[key])}" for key in told) + "\n}\n")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()

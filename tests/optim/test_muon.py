"""Muon: beside torch's own, the formula in float64, AdamW for the other parameters, and which parameter is which."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pycomm
from pycomm.optim import orthogonal
from pycomm.optim.orthogonal import COEFFICIENTS, orthogonalized
from tests.models import perceptron
from tests.on_ranks import on_ranks
from tests.optim.stepping import Params, assert_equal, assert_near, saved, snapshot

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPES: list[tuple[int, ...]] = [(8, 8), (12, 5), (5, 12), (8, 8), (1, 7), (7, 1), (0, 3), (3, 0), (5, 12), (40, 24)]
torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


def matrices(dtype: torch.dtype = F32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Params:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(params: Sequence[torch.Tensor], step: int) -> None:
    """Leave gradients; now and then one has none."""
    for i, p in enumerate(params):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        p.grad = None if (step + i) % 5 == 3 else noise.to(p.dtype)


def take(optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> Params:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        give(params, step)
        optimizer.step()
    return params


def newton_schulz(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The same polynomial, of singular values."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(steps):
        s = sum(c * s ** (2 * k + 1) for k, c in enumerate(COEFFICIENTS))
    return u @ torch.diag(s) @ v


FACTORS = {
    "original": lambda m, n: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "spectral_norm": lambda m, n: (m / n) ** 0.5,
    "none": lambda m, n: 1.0,
}


def formula(w: torch.Tensor, g: torch.Tensor, state: dict[str, Any], o: dict[str, Any]) -> torch.Tensor:
    """The docstring's, on the matrix of the first dimension by the rest, with blocks of rows."""
    mu = o.get("momentum", 0.95)
    state["B"] = buffer = mu * state.get("B", 0.0) + (1 - mu) * g
    update = (mu * buffer + (1 - mu) * g if o.get("nesterov", True) else buffer).flatten(1)
    blocks = update.tensor_split(o.get("split", 1))
    direction = torch.cat([newton_schulz(block, o.get("ns_steps", 5)) for block in blocks]).reshape(w.shape)
    m, n = blocks[0].shape
    scale = FACTORS[o.get("adjust") or "original"](m, n)
    return w * (1 - o["lr"] * o.get("weight_decay", 0.1)) - o["lr"] * scale * direction


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust": "match_rms_adamw", "weight_decay": 0.0},
        {"adjust": "spectral_norm", "nesterov": False},
        {"adjust": "none", "momentum": 0.0, "ns_steps": 3},
        {"adjust": None, "split": 4, "momentum": 0.5},
    ],
    ids=str,
)
def test_formula(options: dict[str, Any]) -> None:
    options = {"lr": 0.05, **options}
    shapes = [(8, 4), (4, 8), (4, 2, 3, 3), (8, 4), (12, 12)]
    params, wanted = matrices(F64, shapes), [p.detach().clone() for p in matrices(F64, shapes)]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    optimizer, states = pycomm.Muon(params, **options), [dict[str, Any]() for _ in params]
    for step in range(12):
        give(params, step)
        for i, p in enumerate(params):
            if p.grad is not None:
                wanted[i] = formula(wanted[i], p.grad, states[i], options)
        optimizer.step()
    assert_near(params, wanted, 1e-9)
    assert params[2].is_contiguous(memory_format=torch.channels_last)


@torch_muon
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"adjust": "match_rms_adamw", "momentum": 0.8, "nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}),
        ({"weight_decay": 0.0, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}, {}),
    ],
)
def test_equals_torch(dtype: torch.dtype, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    shapes = [shape for shape in SHAPES if shape != (3, 0)]  # torch divides by the number of columns
    if dtype == BF16 and not options.get("nesterov", True):
        pytest.skip("torch normalises the buffer itself then, as its .bfloat16() makes no copy")
    params, same = matrices(dtype, shapes), matrices(dtype, shapes)
    mine = pycomm.Muon(params, lr=0.02, ns_dtype=BF16, **options)
    options = {key: value for key, value in options.items() if key != "adjust"} | theirs
    other = torch.optim.Muon(same, lr=0.02, **options)
    for _ in range(2):
        take(mine, 1)
        take(other, 1)
        tolerance = 1e-3 if dtype == F32 else 2e-2
        assert_near(params, same, tolerance)
        for p, q in zip(params, same, strict=True):
            assert_equal([mine.state[p]["momentum_buffer"]] if p in mine.state else [], snapshot(buffers(other, q)))


def buffers(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    return [optimizer.state[param]["momentum_buffer"]] if param in optimizer.state else []


@torch_muon
def test_state_of_torch_loads_and_loads_there() -> None:
    theirs = torch.optim.Muon(matrices(), lr=0.3, momentum=0.7, adjust_lr_fn="match_rms_adamw")
    trained = take(theirs, 4)
    params = [nn.Parameter(p.detach().clone()) for p in trained]
    mine = pycomm.Muon(params, lr=0.1, ns_dtype=BF16)
    mine.load_state_dict(saved(theirs.state_dict()))
    assert mine.param_groups[0]["lr"] == 0.3
    assert mine.param_groups[0]["split"] == 1
    take(mine, 1, start=4)
    take(theirs, 1, start=4)
    assert_near(params, trained, 1e-2)
    again = torch.optim.Muon(matrices(), lr=0.1)
    again.load_state_dict(saved(mine.state_dict()))
    assert again.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    take(again, 1)


def test_state_that_other_scripts_saved() -> None:
    """Keller Jordan's: each rank has that of its own matrices only, and groups without most options."""

    def made() -> pycomm.Muon:
        groups: list[dict[str, Any]] = [
            {"params": matrices(shapes=((6, 4), (3, 5), (8, 8))), "split": 1},
            {"params": matrices(shapes=((6, 4), (9, 2))), "split": 3, "adjust": "none"},
            {"params": matrices(shapes=((5,), (7,))), "use_muon": False, "lr": 0.01},
        ]
        return pycomm.Muon(groups, lr=0.02, ns_dtype=F64)

    whole, other = made(), made()
    take(whole, 3)
    files = []
    for rank in range(2):
        file = saved(whole.state_dict())
        file["state"] = {i: entry for i, entry in file["state"].items() if i % 2 == rank or "exp_avg" in entry}
        kept = ("params", "use_muon", "lr", "momentum", "weight_decay", "betas", "eps")
        file["param_groups"] = [{key: group[key] for key in kept} for group in file["param_groups"]]
        files.append(file)
    merged = {**files[0], "state": {i: entry for file in files for i, entry in file["state"].items()}}
    for one, same in zip(all_of(other), all_of(whole), strict=True):
        one.data.copy_(same)
    other.load_state_dict(merged)
    assert [group["split"] for group in other.param_groups] == [1, 3, 1]
    assert [group["adjust_lr_fn"] for group in other.param_groups] == ["original", "none", "original"]
    take(whole, 2, start=3)
    take(other, 2, start=3)
    assert_near(all_of(other), all_of(whole), 1e-12)


def all_of(optimizer: torch.optim.Optimizer) -> Params:
    return [p for group in optimizer.param_groups for p in group["params"]]


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    others=st.lists(st.booleans(), max_size=6),
    at=st.integers(0, 6),
    dtype=st.sampled_from([F32, BF16, F64]),
    seed=st.integers(0, 1000),
)
def test_a_matrix_has_the_same_result_in_every_batch(
    shape: tuple[int, int], others: list[bool], at: int, dtype: torch.dtype, seed: int
) -> None:
    """Others of its shape, transposed ones and ones full of NaN change nothing but rounding."""
    torch.manual_seed(seed)
    matrix = torch.randn(shape)
    among = [torch.randn(shape if same else shape[::-1]) for same in others]
    among = [torch.full_like(x, torch.nan) if i == 1 else x for i, x in enumerate(among)]
    among.insert(at, matrix)
    alone = orthogonalized([matrix], 5, dtype=dtype)[0]
    together = orthogonalized(among, 5, dtype=dtype)
    tolerance = {F32: 1e-3, BF16: 0.2, F64: 1e-9}[dtype]
    assert float((together[min(at, len(among) - 1)] - alone).norm() / alone.norm()) < tolerance
    assert torch.allclose(alone.double(), newton_schulz(matrix), atol={F32: 1e-2, BF16: 0.3, F64: 1e-6}[dtype])


def test_large_matrices_are_stacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [torch.randn(6, 4, dtype=F64) for _ in range(7)]
    wanted = orthogonalized(some, 5)
    for size in (1, 24, 50):
        monkeypatch.setitem(orthogonal._LARGEST_BATCH, "cpu", size)
        assert_near(orthogonalized(some, 5), wanted, 1e-12)


def test_the_processor_decides_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, dtype in ((True, BF16), (False, F32)):
        monkeypatch.setattr(orthogonal, "multiplies_bfloat16", lambda device, fast=fast: fast)
        assert orthogonalized([torch.randn(3, 4)], 5)[0].dtype == dtype
        assert orthogonalized([torch.randn(3, 4, dtype=F64)], 5)[0].dtype == F64


def test_other_parameters_by_adamw() -> None:
    """To the bit, also with an lr and weight decay that change; state of an int step, as some save it."""
    shapes = [(6, 4), (6,), (), (3, 5)]
    params, same = matrices(F32, shapes), matrices(F32, shapes)
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False, "lr": 0.01, "weight_decay": 0.2}]
    mine = pycomm.Muon(groups, lr=0.02)
    theirs = torch.optim.AdamW(same[1:], lr=0.01, weight_decay=0.2, betas=(0.9, 0.95))
    for step in range(6):
        give(params, step)
        give(same, step)
        mine.param_groups[1]["lr"] = theirs.param_groups[0]["lr"] = 0.01 * (step + 1)
        mine.step()
        theirs.step()
    assert_equal(params[1:], same[1:])
    assert mine.state[params[1]].keys() == {"exp_avg", "exp_avg_sq", "step"}
    mine.state[params[1]]["step"] = int(mine.state[params[1]]["step"])
    give(params, 6)
    give(same, 6)
    mine.step()
    theirs.step()
    assert_equal(params[1:], same[1:])


class Small(nn.Module):
    """A byte-level model whose head shares the embedding, if it is ``tied``."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.positions = nn.Parameter(torch.zeros(1, 4, 8))
        self.stem = nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
        self.block["out"].weight.requires_grad_(False)
        self.gate = nn.Linear(8, 1)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_groups_of_a_model(tied: bool) -> None:
    model = Small(tied)
    names = {id(p): name for name, p in model.named_parameters()}

    def named(**options: Any) -> list[tuple[Any, ...]]:
        groups = pycomm.muon_groups(model, adamw={"lr": 0.1}, **options)
        pycomm.Muon(groups, lr=0.02)
        return [(g["use_muon"], g.get("split", 1), *(names[id(p)] for p in g["params"])) for g in groups]

    vectors = ["stem.bias", "block.qkv.bias", "block.out.bias", "block.norm.weight", "block.norm.bias"]
    gate, head = ["gate.weight", "gate.bias"], ["head.weight"] * (not tied)
    others = [False, 1, "positions", "tokens.weight", *vectors, *gate, *head]
    assert named() == [(True, 1, "stem.weight", "block.qkv.weight"), tuple(others)]
    split = [(True, 1, "stem.weight"), (True, 3, "block.qkv.weight"), tuple(others)]
    assert named(split={"qkv": 3}) == named(split={"block.qkv.weight": 3}) == split
    assert named(by_adamw=["block", "stem.weight"])[0][0] is False
    assert named(head="")[0] == (True, 1, "stem.weight", "block.qkv.weight", *head)
    assert named(head="block.qkv")[0] == (True, 1, "stem.weight", *head)
    with pytest.raises(ValueError, match="the model has no parameter or module 'hed', wanted names of its parts"):
        named(head="hed")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lr": -1.0}, "lr is -1.0, wanted a number that is not negative"),
        ({"momentum": 1.0}, "momentum is 1.0, wanted 0 <= momentum < 1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0, wanted 0 <= beta < 1"),
        ({"ns_steps": 0}, "ns_steps is 0, wanted an integer from 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\), wanted three numbers"),
        ({"adjust": "moon"}, "adjust is 'moon', wanted one of original, match_rms_adamw, spectral_norm, none"),
        ({"ns_dtype": torch.float16}, "ns_dtype is torch.float16, wanted torch.float32"),
        ({"split": 4}, "split is 4, wanted a divisor of the 6 rows of each matrix"),
        ({"split": 0}, "split is 0, wanted an integer >= 1"),
    ],
)
def test_bad_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pycomm.Muon(matrices(F32, [(6, 4)]), **options)


def test_bad_parameters_and_gradients() -> None:
    with pytest.raises(ValueError, match=r"a parameter has shape \[4\], wanted a matrix"):
        pycomm.Muon(matrices(F32, [(6, 4), (4,)]))
    with pytest.raises(TypeError, match="has dtype torch.complex64, wanted real numbers"):
        pycomm.Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="lr of a group with use_muon=False is missing"):
        pycomm.Muon([{"params": matrices(), "use_muon": False}], lr=0.02)
    pycomm.Muon([{"params": matrices(), "use_muon": False}], lr=0.02, adjust="match_rms_adamw")
    with pytest.raises(TypeError, match="use_muon is 1"):
        pycomm.Muon([{"params": matrices(), "use_muon": 1}])
    params = matrices(F32, [(6, 4)])
    optimizer = pycomm.Muon(params)
    params[0].grad = torch.zeros(6, 4).to_sparse()
    with pytest.raises(TypeError, match="a gradient is sparse, wanted dense gradients"):
        optimizer.step()


def test_nan_stays_in_its_matrix_and_none_leaves_no_state() -> None:
    params = matrices(F32, [(4, 4), (4, 4), (4, 4)])
    optimizer = pycomm.Muon(params, lr=torch.tensor(0.02))
    params[0].grad = torch.full((4, 4), torch.nan)
    params[1].grad = torch.ones(4, 1).expand(4, 4)
    optimizer.step()
    assert params[0].isnan().all()
    assert params[1].isfinite().all()
    assert list(optimizer.state) == params[:2]


def test_parts_of_larger_tensors() -> None:
    """Parameters with gaps in memory, and transposed ones."""
    whole, same = torch.randn(10, 12), matrices(F32, [(5, 6), (6, 10)])
    params = [nn.Parameter(whole[::2, ::2]), nn.Parameter(torch.randn(10, 6).t())]
    for p, q in zip(params, same, strict=True):
        q.data.copy_(p.data)
    take(pycomm.Muon(params, lr=0.1), 4)
    take(pycomm.Muon(same, lr=0.1), 4)
    assert_near(params, same, 1e-6)


def test_copies_pickles_closures_schedules_and_scalers() -> None:
    model = perceptron(6, 8, 8, 4, dtype=F32)
    x, y = torch.randn(5, 6), torch.randn(5, 4)
    optimizer = pycomm.Muon(pycomm.muon_groups(model, adamw={"lr": 0.01}), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = nn.functional.mse_loss(model(x), y)
        found.backward()
        return found.detach()

    first = float(optimizer.step(loss))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.005]
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    before = snapshot(model.parameters())
    scaler.step(optimizer)
    assert float(loss()) < first
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    after = snapshot(model.parameters())
    scaler.update()
    scaler.step(optimizer)
    assert_equal(list(model.parameters()), after)
    assert not torch.equal(before[0], after[0])
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert str(other.state_dict()["state"]) == str(optimizer.state_dict()["state"])
        assert other.param_groups[1]["lr"] == 0.005
        take(other, 1)


def test_masters_of_half_precision() -> None:
    params = matrices(BF16, [(6, 4), (4, 6)])
    same = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = pycomm.Muon(params, lr=0.01, ns_dtype=F32)
    masters = pycomm.master_weights(optimizer)
    other = pycomm.Muon(same, lr=0.01, ns_dtype=F32)
    for step in range(5):
        give(params, step)
        for p, q in zip(params, same, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        other.step()
    assert_near(list(masters.parameters()), same, 1e-6)
    assert_equal(params, [q.detach().bfloat16() for q in same])
    masters.detach()


def model_and_muon(**options: Any) -> tuple[nn.Sequential, pycomm.Muon]:
    torch.manual_seed(3)
    model = perceptron(6, 8, 8, 4, dtype=F64)
    return model, pycomm.Muon(pycomm.muon_groups(model, adamw={"lr": 0.01}), lr=0.05, **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 6, generator=generator, dtype=F64), torch.randn(3, 4, generator=generator, dtype=F64)


def alone(steps: int, ranks: int) -> nn.Sequential:
    model, optimizer = model_and_muon()
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / ranks).backward()
        optimizer.step()
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(torch.distributed.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@on_ranks(2)
def test_attached_and_resumed(tmp_path: Path) -> None:
    model, optimizer = model_and_muon()
    reducer = pycomm.attach(optimizer, model)
    train(model, optimizer, range(4))
    pycomm.save(tmp_path, reducer).wait()
    reducer.detach()
    model, optimizer = model_and_muon()
    reducer = pycomm.attach(optimizer, model)
    pycomm.load(tmp_path, reducer)
    train(model, optimizer, range(4, 8))
    assert_near(list(model.parameters()), list(alone(8, 2).parameters()), 1e-9)
    optimizer.param_groups[0]["momentum"] = 0.9 + 0.05 * torch.distributed.get_rank()
    with pytest.raises(ValueError, match="'momentum' of parameter group 0 is 0.9 on rank 0, 0.95"):
        train(model, optimizer, range(8, 10))
    reducer.detach()


@on_ranks(2)
def test_under_ddp() -> None:
    model, optimizer = model_and_muon()
    wrapped = nn.parallel.DistributedDataParallel(model)
    pycomm.ddp.register(wrapped, optimizer=optimizer)
    train(wrapped, optimizer, range(8))
    assert_near(list(model.parameters()), list(alone(8, 2).parameters()), 1e-9)


@on_ranks(2)
def test_inside_local_sgd() -> None:
    """MuLoCo: Muon between the averages, Nesterov at them."""
    model, optimizer = model_and_muon()
    averager = pycomm.local_sgd(optimizer, model, every=4, outer=pycomm.Nesterov(0.7, 0.9))
    train(model, optimizer, range(8))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(everywhere, flat)
    assert torch.equal(*everywhere)
    assert not torch.equal(flat, torch.cat([p.detach().flatten() for p in model_and_muon()[0].parameters()]))
    averager.detach()

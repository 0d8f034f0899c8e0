"""LARS and LAMB, with kernels and without, against a reference written from the papers' formulas."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.optim import plans
from tests.optim.stepping import (
    Params,
    assert_equal,
    assert_near,
    give_gradients,
    look_of,
    parameters,
    saved,
    take_steps,
)

Formula = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]], torch.Tensor]
Build = Callable[..., Any]


def lars_formula(w: torch.Tensor, g: torch.Tensor, o: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    """lambda = eta |w| / (|g| + wd |w|); v = m v + lr lambda (g + wd w); w - v."""
    eta, m, wd = o.get("trust_coefficient", 0.001), o.get("momentum", 0.9), o.get("weight_decay", 0.0)
    local = 1.0
    if adapted(w, o):
        if w.norm() > 0 and g.norm() > 0:
            local = eta * w.norm() / (g.norm() + wd * w.norm())
        g = g + wd * w
    state["v"] = m * state.get("v", 0.0) + o["lr"] * local * g
    return w - (m * state["v"] + o["lr"] * local * g if o.get("nesterov") else state["v"])


def lamb_formula(w: torch.Tensor, g: torch.Tensor, o: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    """r = m^ / (sqrt(v^) + eps) + wd w; w - lr |w| / |r| r."""
    (b1, b2), t = o.get("betas", (0.9, 0.999)), state.get("t", 0) + 1
    m = b1 * state.get("m", 0.0) + (1 - b1) * g
    v = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    state.update(t=t, m=m, v=v)
    if o.get("bias_correction", True):
        m, v = m / (1 - b1**t), v / (1 - b2**t)
    r = m / (v**0.5 + o.get("eps", 1e-6))
    if not adapted(w, o):
        return w - o["lr"] * r
    r = r + o.get("weight_decay", 0.0) * w
    ratio = w.norm() / r.norm() if w.norm() > 0 and r.norm() > 0 else 1.0
    return w - o["lr"] * ratio * r


def adapted(w: torch.Tensor, options: dict[str, Any]) -> bool:
    return {"one_dimensional": w.dim() > 1, "all": False, "none": True}[options.get("exclude", "one_dimensional")]


KINDS: list[tuple[Build, Formula, float]] = [(pycomm.LARS, lars_formula, 0.02), (pycomm.LAMB, lamb_formula, 0.01)]
CASES: list[tuple[Build, Formula, dict[str, Any]]] = [
    (cls, formula, {"lr": lr, **options})
    for cls, formula, lr in KINDS
    for options in (
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "exclude": "none"},
        {"weight_decay": 0.1, "exclude": "all"},
        {"maximize": True, "weight_decay": 0.01},
    )
]
CASES += [
    (pycomm.LARS, lars_formula, {"lr": 0.02, "nesterov": True, "trust_coefficient": 0.05, "weight_decay": 0.1}),
    (pycomm.LARS, lars_formula, {"lr": 0.05, "momentum": 0.0, "trust_coefficient": 0.2, "weight_decay": 0.1}),
    (pycomm.LAMB, lamb_formula, {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1}),
    (pycomm.LAMB, lamb_formula, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}),
    (pycomm.LAMB, lamb_formula, {"lr": 0.01, "betas": (0.0, 0.99)}),
]
NAMES = [f"{cls.__name__} {options}" for cls, _, options in CASES]


def two_groups(cls: Build, options: dict[str, Any], params: Params, **more: Any) -> Any:
    """The second has another rate, and excludes nothing or everything."""
    return cls([{"params": params[:2]}, {"params": params[2:], **second_group(options)}], **options, **more)


def second_group(options: dict[str, Any]) -> dict[str, Any]:
    exclude = {"none": "all", "all": "none"}.get(options.get("exclude", ""), "none")
    return {"lr": 3 * options["lr"], "exclude": exclude, "weight_decay": 0.02}


def reference(formula: Formula, options: dict[str, Any], steps: int, params: Params | None = None) -> Params:
    params = params or parameters()
    states: list[dict[str, Any]] = [{} for _ in params]
    sign = -1.0 if options.get("maximize") else 1.0
    for step in range(steps):
        give_gradients(params, step)
        for i, p in enumerate(params):
            if p.grad is not None:
                mine = options if i < 2 else {**options, **second_group(options)}
                p.data = formula(p.detach(), sign * p.grad, mine, states[i])
    return params


@pytest.mark.parametrize(("cls", "formula", "options"), CASES, ids=NAMES)
def test_formulas(cls: Build, formula: Formula, options: dict[str, Any]) -> None:
    wanted = reference(formula, options, 200)
    for fused in (True, False):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            params = parameters(dtype)
            take_steps(two_groups(cls, options, params, fused=fused), range(200))
            assert_near(params, wanted, tolerance)


@pytest.mark.parametrize("cls", [pycomm.LARS, pycomm.LAMB])
def test_who_steps(cls: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, unless told otherwise or one parameter is in half precision."""
    calls: list[Any] = []
    monkeypatch.setattr(plans, "step_by_rule", lambda *arguments: calls.append(arguments))
    for fused, dtype, by_kernel in (
        (None, torch.float32, True),
        (None, torch.float64, True),
        (None, torch.bfloat16, False),
        (True, torch.float32, True),
        (False, torch.float32, False),
    ):
        calls.clear()
        params = [*parameters(torch.float32), *parameters(dtype)]
        before = [p.detach().clone() for p in params]
        take_steps(cls(params, 0.1, fused=fused), range(1))
        assert len(calls) == by_kernel
        assert torch.equal(params[0], before[0]) == by_kernel


def test_golden_lars() -> None:
    """||w|| = 5, ||g|| = 10: 0.1 * 5 / (10 + 0.5 * 5) = 0.04; times lr 2 and g + 0.5 w = (7.5, 10)."""
    for fused in (True, False):
        w, b = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = pycomm.LARS([w, b], 2.0, 0.5, 0.5, 0.1, fused=fused)
        w.grad, b.grad = torch.tensor([[6.0, 8.0]]), torch.tensor([6.0, 8.0])
        optimizer.step()
        torch.testing.assert_close(w.detach(), torch.tensor([[2.4, 3.2]]))
        assert b.tolist() == [-9.0, -12.0]
        torch.testing.assert_close(optimizer.state[w]["momentum_buffer"], torch.tensor([[0.6, 0.8]]))


def test_golden_lamb() -> None:
    """m^ = g, v^ = g^2: r = (1, -1) + 0.5 (3, 4) = (2.5, 1), of norm 2.6926; times 0.1 * 5."""
    for fused in (True, False):
        w = nn.Parameter(torch.tensor([[3.0, 4.0]]))
        optimizer = pycomm.LAMB([w], 0.1, eps=0.0, weight_decay=0.5, fused=fused)
        w.grad = torch.tensor([[7.0, -2.0]])
        optimizer.step()
        move = 0.5 / 7.25**0.5
        torch.testing.assert_close(w.detach(), torch.tensor([[3 - 2.5 * move, 4 - move]]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("cls", "lr"), [(pycomm.LARS, 2.0), (pycomm.LAMB, 2.0)])
def test_norms_of_zero(cls: Build, lr: float, fused: bool) -> None:
    """The ratio is 1, and nothing is divided by zero."""
    zero, still, both = (nn.Parameter(torch.full((2, 2), value)) for value in (0.0, 3.0, 0.0))
    more = {"momentum": 0.0} if cls is pycomm.LARS else {"eps": 1e-6}
    optimizer = cls([zero, still, both], lr, weight_decay=0.25, fused=fused, **more)
    zero.grad, still.grad, both.grad = torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((2, 2), -2.0))
    # LARS: 3 - lr * decay * 3. LAMB: the direction is the weight times decay, scaled to the weight's norm.
    assert still.tolist() == torch.full((2, 2), 1.5 if cls is pycomm.LARS else -3.0).tolist()
    assert both.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("fused", [True, False])
def test_the_rate_is_inside_the_momentum(fused: bool) -> None:
    """Momentum gathered at one learning rate keeps it: no correction is due."""
    b = nn.Parameter(torch.zeros(1))
    optimizer = pycomm.LARS([b], 1.0, momentum=0.5, fused=fused)
    b.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert b.item() == -1.5
    assert optimizer.state[b]["momentum_buffer"].item() == 0.5
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    optimizer.step()
    assert b.item() == -1.5 - (0.25 + 0.125)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("cls", "formula", "options"), [CASES[1], CASES[6]], ids=[NAMES[1], NAMES[6]])
def test_checkpoint(cls: Build, formula: Formula, options: dict[str, Any], fused: bool) -> None:
    params, other = parameters(torch.float32), parameters(torch.float32, seed=3)
    first, second = two_groups(cls, options, params, fused=fused), two_groups(cls, options, other, fused=not fused)
    take_steps(first, range(7))
    with torch.no_grad():
        for p, q in zip(other, params, strict=True):
            p.copy_(q)
    second.load_state_dict(saved(first.state_dict()))
    assert look_of(second.state_dict()) == look_of(first.state_dict())
    second._fused = fused
    for optimizer in (first, second):
        take_steps(optimizer, range(7, 14))
    assert_equal(other, params)


@pytest.mark.parametrize("cls", [pycomm.LARS, pycomm.LAMB])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("fused", [True, False])
def test_copies(cls: Build, duplicate: Callable[[Any], Any], fused: bool) -> None:
    params = parameters(torch.float32)
    optimizer = cls(params, 0.1, weight_decay=0.1, fused=fused)
    take_steps(optimizer, range(3))
    other = duplicate(optimizer)
    for each in (optimizer, other):
        take_steps(each, range(3, 6))
    assert type(other) is cls
    assert_equal(other.param_groups[0]["params"], params)  # to the bit: by the same path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [pycomm.LARS, pycomm.LAMB])
def test_half_precision(cls: Build, dtype: torch.dtype) -> None:
    """Computed in float32, also with state that a checkpoint gave in half precision."""
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = cls(parameters(dtype), **options, fused=True)
    with pytest.raises(TypeError, match="fused=True requires float32 or float64 parameters.*see master_weights"):
        optimizer.step()
    half, wide = parameters(dtype), parameters(torch.float32)
    optimizer, wanted = cls(half, **options), cls(wide, **options, fused=False)
    for step in range(6):
        if step == 3:
            optimizer.load_state_dict(saved(optimizer.state_dict()))
            wanted.load_state_dict({**saved(wanted.state_dict()), "state": saved(optimizer.state_dict())["state"]})
        take_steps(optimizer, [step], dtype)
        take_steps(wanted, [step], dtype)
        with torch.no_grad():
            for p, q in zip(half, wide, strict=True):
                assert torch.equal(p, q.to(dtype))
                q.copy_(p)
        states = [v for entry in optimizer.state.values() for v in entry.values()]
        assert all(v.dtype == torch.float32 for p in half if p.grad is not None for v in optimizer.state[p].values())
        assert states


def test_lamb_counts_in_float32() -> None:
    """A bfloat16 cannot count beyond 256."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        for fused in (True, False):
            param = nn.Parameter(torch.ones(2, 2, dtype=torch.float32))
            optimizer = pycomm.LAMB([param], 0.1, fused=fused)
            param.grad = torch.ones(2, 2, dtype=torch.float32)
            optimizer.step()
            assert optimizer.state[param]["step"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cls", [pycomm.LARS, pycomm.LAMB])
def test_closures_and_autograd(cls: Build, fused: bool) -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = cls([param], 0.1, fused=fused)
    old = (param * param).sum()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    before = param.detach().clone()
    assert optimizer.step(closure=closure).item() < 4.0
    assert not torch.equal(param, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


NAN = float("nan")


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (pycomm.LARS, "lr", [-0.1, NAN]),
        (pycomm.LARS, "momentum", [-0.1, NAN]),
        (pycomm.LARS, "weight_decay", [-0.1, NAN]),
        (pycomm.LARS, "trust_coefficient", [-0.1, NAN]),
        (pycomm.LARS, "exclude", ["one", None, True]),
        (pycomm.LAMB, "lr", [-0.1, NAN]),
        (pycomm.LAMB, "eps", [-0.1, NAN]),
        (pycomm.LAMB, "weight_decay", [-0.1, NAN]),
        (pycomm.LAMB, "betas", [(-0.1, 0.9), (0.9, 1.0), (NAN, 0.9), (0.9, NAN), (1.5, 0.9)]),
        (pycomm.LAMB, "exclude", ["one", None, True]),
    ],
)
def test_bad_options(cls: Build, name: str, values: list[Any]) -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for value in values:
        options = {"lr": 0.1, name: value}
        with pytest.raises(ValueError, match=name):
            cls([param], **options)
        with pytest.raises(ValueError, match=name):
            cls([{"params": [param], **options}], 0.1)
        optimizer = cls([param], 0.1)
        with pytest.raises(ValueError, match=name):
            optimizer.add_param_group({"params": [other], **options})
        assert len(optimizer.param_groups) == 1


def test_nesterov_wants_momentum() -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="momentum is 0(.0)?, wanted a positive number, which nesterov requires"):
        pycomm.LARS([param], 0.1, momentum=0.0, nesterov=True)
    with pytest.raises(ValueError, match="momentum is 0(.0)?, wanted a positive number, which nesterov requires"):
        pycomm.LARS([{"params": [param], "momentum": 0}], 0.1, nesterov=True)
    pycomm.LARS([{"params": [param], "momentum": 0.5}], 0.1, momentum=0.0, nesterov=True)

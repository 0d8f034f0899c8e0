"""Master weights: steps are those of float32 parameters, and half-precision ones follow."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.optim.masters import ALL, HALF, KERNELS, OTHERS, MySGD, make, mixed_model, parameters_for, step_on
from tests.optim.stepping import assert_equal, assert_near, give_gradients, parameters, snapshot


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ALL)
def test_as_in_float32(name: str, dtype: torch.dtype) -> None:
    params, optimizer, handle = make(name, dtype)
    wide = parameters_for(name, torch.float32)
    reference = ALL[name](wide)

    def check() -> None:
        assert all(p.dtype == dtype for p in params)
        assert_equal(params, [m.to(dtype) for m in handle.parameters()])

    step_on(optimizer, params, range(20), dtype, check)
    step_on(reference, wide, range(20), dtype)
    if name in OTHERS:
        assert_equal(handle.parameters(), snapshot(wide))
    else:
        assert_near(handle.parameters(), wide, 1e-6)
    if name in ("SGD", "Adam", "AdamW", "RMSprop", "LARS", "LAMB"):
        fused = parameters_for(name, torch.float32)
        optimizer = ALL[name](fused)
        pycomm.fuse(optimizer)
        step_on(optimizer, fused, range(20), dtype)
        assert_equal(handle.parameters(), snapshot(fused))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("cls", [torch.optim.SGD, MySGD])
def test_small_updates_add_up(cls: Any, dtype: torch.dtype) -> None:
    plain, mastered = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizers = [cls([plain], lr=2.0**-13), cls([mastered], lr=2.0**-13)]
    pycomm.master_weights(optimizers[1])
    for _ in range(512):
        for param, optimizer in zip((plain, mastered), optimizers, strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert plain.tolist() == [1.0] * 3
    assert mastered.tolist() == [1 - 2.0**-4] * 3


@pytest.mark.parametrize("name", ["Adam", "LARS", "NAdam"])
def test_mixed_dtypes(name: str) -> None:
    """float32 parameters are their own masters."""

    def both_halves(dtypes: list[torch.dtype]) -> list[nn.Parameter]:
        return [p for seed, dtype in enumerate(dtypes) for p in parameters(dtype, seed)]

    params = both_halves([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    wide = both_halves([torch.float32, torch.float32, torch.float32, torch.float64])
    optimizer, reference = ALL[name](params), ALL[name](wide)
    handle = pycomm.master_weights(optimizer)
    step_on(optimizer, params, range(12), torch.bfloat16)  # which are exact in float16
    step_on(reference, wide, range(12), torch.bfloat16)
    masters = handle.parameters()
    assert_near(masters, wide, 1e-6)
    for param, master in zip(params, masters, strict=True):
        assert (master is param) == (param.dtype not in HALF)
        assert torch.equal(param, master.to(param.dtype))
    assert [p.dtype for p in params[::6]] == [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("name", ["SGD", "Adadelta"])
def test_writes_are_taken_over(name: str) -> None:
    model = mixed_model(torch.bfloat16)
    optimizer = ALL[name](model.parameters())
    handle = pycomm.master_weights(optimizer)
    step_on(optimizer, list(model.parameters()), range(3), torch.bfloat16)
    precise = snapshot(handle.masters())
    # What equals the master in half precision is no news.
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    assert_equal(handle.masters(), precise)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in precise)
    weight, bias = model[0].weight, model[0].bias
    with torch.no_grad():
        weight[0] = 7.0
    bias.data = torch.full_like(bias, 3.0)  # as vector_to_parameters does
    optimizer.zero_grad()
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    optimizer.param_groups[0].update(weight_decay=0.0, momentum=0.0)
    optimizer.step()
    assert weight[0].tolist() == [7.0] * 6
    assert bias.tolist() == [3.0] * 5
    assert_equal(handle.masters()[2:], precise[2:])


def test_writes_in_a_closure() -> None:
    for name in ("SGD plain", "LBFGS"):
        params, optimizer, handle = make(name, torch.bfloat16)

        def closure(params: Any = params, name: str = name) -> torch.Tensor:
            with torch.no_grad():
                params[0].fill_(2.0)
            for p in params[:2]:
                assert p.dtype == torch.bfloat16
                p.grad = torch.zeros_like(p)
            return torch.ones(())

        optimizer.step(closure)  # type: ignore[arg-type]  # by torch's stubs a float
        assert (params[0] == 2.0).all(), name
        assert (handle.parameters()[0] == 2.0).all(), name


@pytest.mark.parametrize("name", ["Adam", "Adadelta"])
def test_another_memory_order(name: str) -> None:
    def train(reorder: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).bfloat16()
        optimizer = ALL[name](conv.parameters())
        handle = pycomm.master_weights(optimizer)
        params = list(conv.parameters())
        step_on(optimizer, params, range(3), torch.bfloat16)
        precise = snapshot(handle.masters())
        if reorder:
            conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            assert_equal(handle.masters(), precise)
        step_on(optimizer, params, range(3, 9), torch.bfloat16)
        assert_equal(params, [m.bfloat16() for m in handle.masters()])
        return snapshot(handle.masters())

    assert_equal(train(True), train(False))


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adadelta"])
def test_param_group_added_later(name: str) -> None:
    def grow(dtype: torch.dtype) -> list[torch.Tensor]:
        params, later = parameters(dtype), parameters(dtype, seed=1)
        optimizer = ALL[name](params)
        handle = pycomm.master_weights(optimizer)
        step_on(optimizer, params, range(3), torch.float16)
        optimizer.add_param_group({"params": later, "lr": 0.05})
        step_on(optimizer, [*params, *later], range(3, 8), torch.float16)
        assert_equal([*params, *later], [m.to(dtype) for m in handle.parameters()])
        assert all(v.dtype == torch.float32 for entry in optimizer.state.values() for v in entry.values())
        return snapshot(handle.parameters())

    assert_equal(grow(torch.float16), grow(torch.float32))


class Eager(torch.optim.SGD):
    """Makes its state at once."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "LBFGS"])
def test_state_from_before(name: str) -> None:
    """State of an optimizer that has stepped in half precision becomes float32."""
    params = parameters_for(name, torch.bfloat16)
    optimizer = ALL[name](params)
    step_on(optimizer, params, range(3), torch.bfloat16)
    pycomm.master_weights(optimizer)
    for p in params:
        assert torch.bfloat16 not in {v.dtype for v in _tensors(optimizer.state.get(p, {}))}
    step_on(optimizer, params, range(3, 6), torch.bfloat16)
    optimizer = Eager([nn.Parameter(torch.ones(2).half())], lr=0.1, momentum=0.9)
    pycomm.master_weights(optimizer)
    added = nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(2).half()
    optimizer.step()
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in optimizer.state.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (dict, list)):
        return [t for one in (value.values() if isinstance(value, dict) else value) for t in _tensors(one)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["SGD plain", "Adagrad"])
def test_gradients_stay_the_models(name: str, set_to_none: bool) -> None:
    model = mixed_model(torch.float16)
    optimizer = ALL[name](model.parameters())
    pycomm.master_weights(optimizer)
    calls: list[torch.dtype] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))
    for step in range(3):
        optimizer.zero_grad(set_to_none)
        model[2](model[0](torch.ones(2, 6).half())).sum().backward()
        grads = [p.grad for p in model.parameters()]
        before = [None if g is None else g.clone() for g in grads]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        assert all(g is None or torch.equal(g, b) for g, b in zip(grads, before, strict=True))  # type: ignore[arg-type]
        assert calls == [torch.float16] * 4 * (step + 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(g is None or not g.any() for g in grads)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
            assert self.param_groups[0]["params"][0].dtype == torch.float32
        raise KeyError("mine")


def test_a_step_that_fails() -> None:
    params = parameters(torch.bfloat16)
    optimizer = Failing(params, lr=0.1)
    handle = pycomm.master_weights(optimizer)
    give_gradients(params, 0)
    grads, before, where = [p.grad for p in params], snapshot(params), [p.data_ptr() for p in params]
    with pytest.raises(KeyError, match="mine"):
        optimizer.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert [p.data_ptr() for p in params] == where
    assert_equal(params[1:], before[1:])
    assert_equal(params, [m.bfloat16() for m in handle.parameters()])


def test_a_closure_that_fails() -> None:
    for name in ("SGD", "LBFGS", "Adadelta"):
        params, optimizer, handle = make(name, torch.float16)
        before = snapshot(params)

        def closure() -> torch.Tensor:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            optimizer.step(closure)  # type: ignore[arg-type]
        assert_equal(params, before)
        assert_equal(params, [m.half() for m in handle.parameters()])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_with_others_steps() -> None:
    table = nn.Embedding(5, 3, sparse=True).bfloat16()
    wanted = nn.Parameter(table.weight.detach().float())
    optimizer, reference = torch.optim.Adagrad(table.parameters(), lr=0.1), torch.optim.Adagrad([wanted], lr=0.1)
    handle = pycomm.master_weights(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).sum().backward()
        wanted.grad = table.weight.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        reference.step()
    assert_equal(handle.masters(), [wanted.detach()])


@pytest.mark.parametrize("name", ["Adagrad", "MySGD"])
def test_autograd_notices(name: str) -> None:
    param = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = ALL[name]([param])
    pycomm.master_weights(optimizer)
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ALL)
def test_detach(name: str) -> None:
    """The optimizer's own step goes on, with state as it wants it."""
    params, optimizer, handle = make(name, torch.bfloat16)
    step_on(optimizer, params, range(3), torch.bfloat16)
    before = snapshot(params)
    handle.detach()
    handle.detach()
    assert not {"step", "load_state_dict", "_step_supports_amp_scaling"} & set(vars(optimizer))
    assert_equal(params, before)
    assert all("master_weight" not in entry for entry in optimizer.state_dict()["state"].values())
    step_on(optimizer, params, range(3, 6), torch.bfloat16)
    assert not torch.equal(params[0], before[0])
    again = pycomm.master_weights(optimizer)
    assert_equal(again.masters(), [p.detach().float() for p in params])
    step_on(optimizer, params, range(6, 9), torch.bfloat16)


def test_detach_keeps_torchs_mark() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], fused=True)
    pycomm.master_weights(optimizer).detach()
    assert vars(optimizer)["_step_supports_amp_scaling"] is True


@pytest.mark.parametrize("name", [*KERNELS, "NAdam"])
def test_nothing_keeps_the_optimizer_alive(name: str) -> None:
    params, optimizer, handle = make(name, torch.bfloat16)
    step_on(optimizer, params, range(1), torch.bfloat16)
    gone = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert gone() is None


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer is a Linear, wanted a torch.optim.Optimizer"):
        pycomm.master_weights(nn.Linear(2, 2))  # type: ignore[arg-type]
    param = nn.Parameter(torch.ones(4, 6).half()[:, ::2])
    optimizer = torch.optim.SGD([param], lr=1.0)
    before = set(vars(optimizer))
    with pytest.raises(ValueError, match=r"a parameter of shape \[4, 3\] has gaps"):
        pycomm.master_weights(optimizer)
    assert set(vars(optimizer)) == before
    with pytest.raises(ValueError, match="differentiable=True"):
        pycomm.master_weights(torch.optim.Adam([nn.Parameter(torch.ones(2).half())], differentiable=True))


class Replacing(torch.optim.Optimizer):
    """Replaces ``param.data`` in place of writing to it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data = p.detach() - 2.0**-12 * p.grad


def test_an_optimizer_that_replaces_data() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    address = param.data_ptr()
    optimizer = Replacing([param], {})
    handle = pycomm.master_weights(optimizer)
    for _ in range(32):  # each step is below a rounding of bfloat16
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert_equal(handle.parameters(), [torch.full((4,), 1.0 - 2.0**-7)])
    assert_equal([param.detach()], [torch.full((4,), 1.0 - 2.0**-7, dtype=torch.bfloat16)])
    assert param.data_ptr() == address

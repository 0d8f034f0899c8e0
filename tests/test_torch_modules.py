"""Private names of torch about modules, their tensors and scalers: each does what pycomm needs of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pycomm import torch_internals


def test_what_a_module_holds_itself() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    own = torch_internals.own_parameters(module[0])
    assert own["weight"] is module[0].weight
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert own["weight"] is module[0].weight, "it is the very dict"
    assert torch_internals.own_parameters(nn.Module.__new__(nn.Module)) == {}
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert list(map(list, torch_internals.hooks_of(module))) == [[handle.id], [], []]
    handle.remove()
    found = torch_internals.hooks_of(module)
    assert list(map(id, found)) == [
        id(module._forward_pre_hooks),
        id(module._forward_hooks),
        id(module._load_state_dict_post_hooks),
    ]
    assert [vars(hooks) for hooks in found] == [{}] * 3, "they take attributes"
    assert torch_internals.hooks_of(nn.Module.__new__(nn.Module)) == []


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


class Named(nn.Module):
    """Modules that their author has called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self._orig_mod = linear(), nn.Sequential(linear())


@pytest.mark.usefixtures("one_rank_group")
def test_names_without_wrappers() -> None:
    compiled: Any = torch.compile(linear())
    inner = nn.Sequential(compiled, checkpoint_wrapper(nn.Sequential(linear())), Named())
    names = ["0.bias", "1.0.bias", "2.module.bias", "2._orig_mod.0.bias"]
    for wrap in (lambda each: each, torch.compile, nn.DataParallel, DistributedDataParallel):
        module: Any = wrap(inner)
        named = {name: param for name, param in module.named_parameters() if name.endswith("bias")}
        assert module is inner or not set(names) & named.keys()
        found = torch_internals.by_plain_names(module, named)
        assert list(found) == names
        assert list(found.values()) == list(named.values())
        assert torch_internals.by_plain_names(None, named) == named
    assert torch_internals.by_plain_names(module, {"module.x": 1, "x": 2}) == {"module.x": 1, "x": 2}, "not unique"
    whole = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # of which no more is looked at
    assert list(torch_internals.by_plain_names(whole, {"_fsdp_wrapped_module.bias": 1})) == ["bias"]


def test_saved_names_that_other_wrappers_have_made() -> None:
    renamed = torch_internals.renamed
    assert renamed({"_orig_mod.a": 1, "b": 2}, ["a", "b"]) == {"a": 1, "b": 2}
    assert renamed({"a": 1, "b": 2}, ["module._orig_mod.a", "b"]) == {"module._orig_mod.a": 1, "b": 2}
    assert renamed({"module.a": 1, "a": 2}, ["a", "module.a"]) == {"module.a": 1, "a": 2}, "exact names"
    assert renamed({"module.a": 1, "a": 2}, ["a", "c"]) == {"module.a": 1, "a": 2}
    assert renamed({"module.a": 1, "_orig_mod.a": 2}, ["a"]) == {"module.a": 1, "_orig_mod.a": 2}, "not unique"
    assert renamed({"a": 1}, ["module.a", "_orig_mod.a"]) == {"a": 1}, "not unique"
    assert renamed({"a": 1}, ["b"]) == {"a": 1}


def test_statistics_that_backward_does_not_use() -> None:
    norm = nn.BatchNorm1d(3)
    assert torch_internals.keeps_statistics_aside(norm)
    assert not torch_internals.keeps_statistics_aside(norm.eval())
    assert not torch_internals.keeps_statistics_aside(nn.BatchNorm1d(3, track_running_stats=False))
    assert not torch_internals.keeps_statistics_aside(nn.Linear(2, 2))


def test_memory_behind_lazy_conjugation() -> None:
    plain = torch.tensor([1.0 + 2.0j])
    lazy = plain.conj()
    assert lazy.is_conj()
    found = torch_internals.without_conjugation(lazy)
    assert not found.is_conj()
    assert torch.equal(found, plain)
    assert found.data_ptr() == plain.data_ptr()
    negated = torch_internals.without_conjugation(lazy.imag)
    assert not negated.is_neg()
    assert torch.equal(negated, plain.imag)


def test_places_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    places = torch_internals.Places(map(torch_internals.own_parameters, model.modules()))
    assert places.are_unchanged()
    model[1].bias = nn.Parameter(torch.zeros(2))
    assert not places.are_unchanged()
    places = torch_internals.Places(map(torch_internals.own_parameters, model.modules()))
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(2)))
    assert not places.are_unchanged()


def test_steps_that_grad_scalers_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.amp.GradScaler.step
    monkeypatch.setattr(torch.amp.GradScaler, "step", getattr(step, "__wrapped__", step))  # as it was at first
    told: list[torch.optim.Optimizer] = []
    p = nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([p], 0.1), torch.amp.GradScaler("cpu", 4.0)
    for _ in range(2):  # once is enough
        torch_internals.watch_grad_scalers(lambda each: each is optimizer, told.append, lambda _: False)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(told) == (factor > 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_calls_of_compiled_modules_are_noted_until_the_handles_go(in_place: bool) -> None:
    module = nn.Linear(2, 2)
    call: Any = module if in_place else torch.compile(module, backend="eager")
    if in_place:
        module.compile(backend="eager")
    assert torch_internals.compiled_calls(nn.Linear(2, 2), lambda: None, lambda _: None) == []
    noted: list[Any] = []
    handles = torch_internals.compiled_calls(module, lambda: noted.append("begin"), noted.append)
    out = call(torch.ones(1, 2))
    assert noted == ["begin", out]
    for handle in handles:
        handle.remove()
    call(torch.ones(1, 2))
    assert len(noted) == 2


def test_parts_that_are_called() -> None:
    module, first, second, third = nn.Module(), nn.ReLU(), nn.Tanh(), nn.ELU()
    module.scripted = torch.jit.script(nn.ReLU())
    module.a, module.b = first, nn.ModuleList([second, nn.ModuleDict({"c": third})])
    assert torch_internals.called_parts(module) == [("a", first), ("b.0", second), ("b.1.c", third)]

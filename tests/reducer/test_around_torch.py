"""torch.compile, compiled autograd, default dtypes, meshes, trainers' optimizers, odd hyperparameters, float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.optim.hyperparameters import Hyperparameters
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import average_gradients, close, explode, loss_of, losses_at, make_model, sgd

# torch.compile


def compiled(order: str, compression: Any) -> None:
    """The whole model is one graph, and gradients are averages; also for what is unfrozen later."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    optimizer = sgd(model)
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if order == "before" else None
    with attached(optimizer, fast if order == "before" else model, compression=compression, bucket_mb=0.001) as reducer:
        if fast is None:
            fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(False)
            if step == 3:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())
            loss_of(fast, rank, step).backward()
            wanted = average_gradients(plain, losses_at(step))
            for name, p in model.named_parameters():
                if p.requires_grad:
                    close(p.grad, wanted[name], 1e-9)
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(2, timeout=110)
def test_compile_has_no_graph_break(order: str) -> None:
    compiled(order, None)


@on_ranks(2, timeout=110)
def test_compile_with_error_feedback() -> None:
    compiled("after", pycomm.TopK(1.0))


@on_ranks(2)
def test_an_exception_that_no_forward_notices() -> None:
    """No forward hook sees that the last backward ended with an exception."""
    rank = dist.get_rank()
    model = make_model()
    with attached(sgd(model), model.named_parameters()):
        for step in range(3):
            explode(model)
            model.zero_grad()
            loss_of(model, rank, step).backward()
            wanted = average_gradients(make_model(), losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            model.zero_grad()


@pytest.mark.behavior(
    "Wrappers, copies and parameters", "use compiled autograd", "Error. `torch.compile` of the model works."
)
@pytest.mark.parametrize("fullgraph", [False, True])
@on_ranks(2, timeout=110, fresh=True)
def test_compiled_autograd_is_refused(fullgraph: bool) -> None:
    """Dynamo itself refuses to trace the hook, which it names, if it may not leave the graph for it."""
    from torch._dynamo import compiled_autograd as ca

    model = make_model()
    reducer = pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=30))
    with ca._enable(torch.compile(backend="eager", fullgraph=fullgraph)):
        says = r"compiled autograd does not call pycomm's hooks during backward\(\): turn it off"
        with pytest.raises(RuntimeError, match="pycomm_gradient_hook" if fullgraph else says):
            loss_of(model, dist.get_rank(), 0).backward()
    reducer.detach()


# Default dtypes

METHODS: list[Any] = [
    None,
    pycomm.FP16(),
    pycomm.TopK(0.2),
    pycomm.TopK(0.2, half_values=True),
    pycomm.DGC(0.2, 0.9, warmup_steps=2, clip_norm=1.0, clip_local_norm=5.0),
    pycomm.PowerSGD(1),
    pycomm.Int8(),
    pycomm.OneBit(),
    pycomm.RandomK(0.2),
    pycomm.QSGD(7),
    pycomm.TernGrad(),
    "auto",
]


def run_under(default: torch.dtype, compression: Any) -> tuple[list[torch.Tensor], Any]:
    rank = dist.get_rank()
    model = make_model(dtype=torch.float32)
    torch.set_default_dtype(default)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(optimizer, model, compression=compression) as reducer:
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                reducer.clip_grad_norm(1.0)
                optimizer.step()
            assert_replicas_equal(model)
            state = None if compression in (None, "auto") else own_state(reducer)
        return [p.detach().clone() for p in model.parameters()], state
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("compression", METHODS, ids=repr)
@on_ranks(2)
def test_default_dtypes_change_nothing(compression: Any) -> None:
    wanted, state = run_under(torch.float32, compression)
    for default in (torch.float64, torch.bfloat16):
        got, other = run_under(default, compression)
        for a, b in zip(wanted, got, strict=True):
            if compression == "auto":  # what it chooses goes by the clock
                assert torch.isfinite(b).all()
            else:
                assert torch.equal(a, b)
        for name, entry in (state or {}).items():
            for key, tensor in entry.items():
                assert torch.equal(tensor, other[name][key])


# Meshes


@on_ranks(2)
def test_a_device_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = make_model()
    with attached(sgd(model), model, process_group=mesh["dp"]):
        loss_of(model, rank, 0).backward()
        close(model[0].weight.grad, average_gradients(make_model(), losses_at(0))["0.weight"])
    with attached(sgd(model), model, process_group=mesh["tp"]) as reducer:
        assert reducer.stats()["num_buckets"] == 0  # alone
    with pytest.raises(ValueError, match=r"process_group is a DeviceMesh of 2 dimensions \('dp', 'tp'\), wanted one"):
        pycomm.attach(sgd(model), model, process_group=mesh)


# Proxies of optimizers


def proxy_of(optimizer: torch.optim.Optimizer, how: str) -> Any:
    if how == "accelerate":

        class Accelerated(torch.optim.Optimizer):
            """Proxy like AcceleratedOptimizer: everything is the inner one's."""

            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.optimizer = inner

            state = property(lambda self: self.optimizer.state)
            param_groups = property(lambda self: self.optimizer.param_groups)
            defaults = property(lambda self: self.optimizer.defaults)

            def zero_grad(self, set_to_none: bool = True) -> None:
                self.optimizer.zero_grad(set_to_none)

            def step(self, closure: Any = None) -> Any:
                return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

        return Accelerated(optimizer)

    class Proxy:
        """Proxy like Fabric's and Lightning's: a class made for each optimizer, with a copy of its attributes."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.__dict__.update({k: v for k, v in vars(inner).items() if k not in ("step", "__del__")})
            self.__class__ = type("Proxy" + type(inner).__name__, (self.__class__, type(inner)), {})
            self._inner = inner

        @property
        def optimizer(self) -> torch.optim.Optimizer:
            return self._inner

        def step(self, closure: Any = None) -> Any:
            return self._inner.step(closure) if closure is not None else self._inner.step()

    return Proxy(optimizer)


@pytest.mark.parametrize("how", ["accelerate", "fabric"])
@on_ranks(2)
def test_trainers_optimizers_are_unwrapped(how: str) -> None:
    rank = dist.get_rank()
    model = make_model()
    inner = sgd(model)
    outer = proxy_of(inner, how)
    scaler = pycomm.LossScaler(4.0)
    with attached(outer, model, accumulate=2, loss_scaler=scaler) as reducer:
        assert reducer.optimizer is inner
        for step in range(2):
            outer.zero_grad()
            for i in range(2):
                (scaler.scale(loss_of(model, rank, 2 * step + i)) / 2).backward()
                if i == 0:
                    with pytest.raises(RuntimeError, match=r"step\(\) after 1 of 2 backward passes"):
                        outer.step()
            scaler.step(outer)
            scaler.update()
        assert_replicas_equal(model)
        with pytest.raises(ValueError, match="parameter '0.weight' is already attached"):
            pycomm.attach(inner, model)


@on_ranks(2)
def test_optimizers_around_optimizers_are_not() -> None:
    """An optimizer with one inside, and state of its own, is the optimizer."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.optimizer = inner
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    model = make_model(seed=dist.get_rank())
    outer = Lookahead(sgd(model))
    with attached(outer, model) as reducer:
        assert reducer.optimizer is outer
        assert torch.equal(outer.state[model[0].weight]["slow"], make_model(seed=0)[0].weight)


# What optimizers keep


class Odd:
    """An object that cannot be sent."""


CHANGED: dict[str, Callable[[int], dict[str, Any]]] = {
    "tensor": lambda step: {"lr": torch.tensor(0.1 / step)},
    "tuple of tensors": lambda step: {"betas": (torch.tensor(0.9), torch.tensor(1 - 0.1 / step))},
    "None": lambda step: {"own": None},
    "NaN": lambda step: {"own": float("nan")},
}


@pytest.mark.parametrize("what", CHANGED)
@on_ranks(2)
def test_numbers_that_become_something_else_alike(what: str) -> None:
    """Ranks compare hashes: those of tensors, None and NaN would be those of their addresses."""
    rank, model = dist.get_rank(), make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, foreach=False)
    group = optimizer.param_groups[0]
    group["own"] = 1.0
    readers = [Hyperparameters(optimizer) for _ in range(2)]
    with attached(optimizer, model):
        for step in range(1, 4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            group.update(CHANGED[what](step))
            optimizer.step()
            for reader in readers:
                group.update(CHANGED[what](step))
                reader.refresh()
            assert len({reader.digest for reader in readers}) == 1
        assert_replicas_equal(model)


@on_ranks(2)
def test_functions_among_hyperparameters() -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    optimizer.param_groups[0]["rule"] = lambda step: step * (rank + 1)
    optimizer.param_groups[0]["nested"] = {"a": [1, (2.5, None)], "t": torch.tensor(float(rank))}
    if rank == 0:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    with attached(optimizer, model):
        group = optimizer.param_groups[0]
        assert group["lr"] == 0.1
        assert group["rule"](1) == rank + 1  # its own
        assert group["nested"]["a"] == [1, (2.5, None)]
        assert float(group["nested"]["t"]) == 0.0
        assert all(float(optimizer.state[p]["step"]) == 1.0 for p in model.parameters())
        loss_of(model, rank, 1).backward()
        optimizer.step()
        assert_replicas_equal(model)
    for p in model.parameters():
        if rank == 0:
            optimizer.state[p]["odd"] = [Odd()]
    with pytest.raises(ValueError, match=r"rank 0 does not fit rank 1: \['odd'\]\[0\] is a .*Odd, which cannot be"):
        pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))


@on_ranks(2)
def test_lists_of_tensors_travel() -> None:
    """Lists of tensors travel; only rank 0 has any."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    if rank == 0:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    with attached(optimizer, model):
        state = optimizer.state[model[0].weight]
        mine = [state["n_iter"], [t.tolist() for t in state["old_dirs"]], state["d"].tolist(), state["prev_loss"]]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine)
        assert everyone[0] == everyone[1]


# float64


@on_ranks(2)
def test_clipping_keeps_float64() -> None:
    rank = dist.get_rank()
    model = make_model()
    with attached(sgd(model), model) as reducer:
        loss_of(model, rank, 0).backward()
        wanted = average_gradients(make_model(), losses_at(0))
        norm = torch.stack([g.norm() for g in wanted.values()]).norm()
        reducer.clip_grad_norm(0.001)
        for name, p in model.named_parameters():
            close(p.grad, wanted[name] * (0.001 / (norm + 1e-6)), 1e-14)

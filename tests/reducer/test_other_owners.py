"""Parameters that something else averages, or owns: found out in whatever order, and never a wrong gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.optim.wrappers import wrapper_of
from pycomm.torch_internals import is_flattened
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

SAYS = "belongs to a DistributedDataParallel.*which averages gradients itself.*[Tt]rain the module without"


class Outer(nn.Module):
    """Wrapper like those of trainers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


GIVEN: dict[str, Callable[[Any, DistributedDataParallel], Any]] = {
    "the wrapper": lambda model, ddp: ddp,
    "a wrapper around it": lambda model, ddp: Outer(ddp),
    "what it wraps": lambda model, ddp: model,
    "the names": lambda model, ddp: model.named_parameters(),
    "a part": lambda model, ddp: model[0],
    "torch.compile of it": lambda model, ddp: torch.compile(ddp, backend="eager"),
}


@pytest.mark.parametrize("given", GIVEN)
@on_ranks(2)
def test_ddp_before_attach(given: str) -> None:
    model = make_model()
    ddp = DistributedDataParallel(model)
    kept = Outer(ddp)  # somebody holds it
    optimizer = sgd(model[0] if given == "a part" else model)
    with pytest.raises(ValueError, match=SAYS):
        pycomm.attach(optimizer, GIVEN[given](model, ddp))
    loss_of(kept, dist.get_rank(), 0).backward()  # DistributedDataParallel goes on as if nothing had been
    wanted = average_gradients(make_model(), losses_at(0))
    for name, p in model.named_parameters():
        close(p.grad, wanted[name])
    del kept, ddp
    with attached(optimizer, model[0] if given == "a part" else model):  # nobody has it any more
        pass


@on_ranks(2)
def test_objects_are_searched_only_if_torch_has_a_parameter_elsewhere() -> None:
    """The search takes longer than the rest of ``attach``, and nearly always finds nothing."""
    model = make_model()
    search = Mock(return_value=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_referrers", search)
        with attached(sgd(model), model):
            search.assert_not_called()
        graph = loss_of(model, dist.get_rank(), 0)
        with attached(sgd(model), model):
            search.assert_called_once()
        del graph


@pytest.mark.parametrize("how", ["module", "names", "a part", "replicate"])
@on_ranks(2)
def test_ddp_after_attach(how: str) -> None:
    model = make_model()

    def wrap() -> None:
        if how == "replicate":
            from torch.distributed._composable.replicate import replicate

            replicate(model)
            loss_of(model, dist.get_rank(), 0).backward()
        else:
            DistributedDataParallel(model[0] if how == "a part" else Outer(model))

    with attached(sgd(model), model.named_parameters() if how == "names" else model):
        with pytest.raises(ValueError, match=SAYS):
            wrap()
        if how != "replicate":
            gc.collect()
            loss_of(model, dist.get_rank(), 0).backward()
            wanted = average_gradients(make_model(), losses_at(0))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
    DistributedDataParallel(make_model())  # other parameters are nobody's business
    DistributedDataParallel(model) if how != "replicate" else None


@on_ranks(2)
def test_ddp_that_nothing_noticed() -> None:
    """Made where nothing could notice: its forward is noticed, and without that its gradients are right."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycomm.optim.wrappers.wrapper_of", lambda _: None)
        model = make_model()
        reducer = pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=30))
        ddp = DistributedDataParallel(model)
        with pytest.MonkeyPatch.context() as restored:
            restored.setattr("pycomm.optim.wrappers.wrapper_of", wrapper_of)
            with pytest.raises(ValueError, match=SAYS):
                loss_of(ddp, rank, 0)
        reducer.detach()
        named = make_model()
        reducer = pycomm.attach(sgd(named), named.named_parameters(), tuning=pycomm.Tuning(timeout=30, bucket_mb=0.001))
        ddp = DistributedDataParallel(named, gradient_as_bucket_view=False)
        for step in range(4):
            for p in named.parameters():
                p.grad = None
            loss_of(ddp, rank, step).backward()
            wanted = average_gradients(make_model(), losses_at(step))
            for name, p in named.named_parameters():
                close(p.grad, wanted[name])
        reducer.detach()


@on_ranks(2)
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    for original in (False, True):
        model = make_model(dtype=torch.float32)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        assert all(map(is_flattened, wrapped.parameters()))
        says = "belongs to a FullyShardedDataParallel" if original else "flat parameter of FullyShardedDataParallel"
        for given in (wrapped, list(wrapped.named_parameters())):
            with pytest.raises((TypeError, ValueError), match=says):
                pycomm.attach(sgd(wrapped), given)
    model = make_model(dtype=torch.float32)
    fully_shard(model)
    with pytest.raises(
        TypeError, match=r"parameter '0.weight' is a DTensor, sharded .* FSDP2 averages gradients itself"
    ):
        pycomm.attach(sgd(model), model)
    model = make_model(dtype=torch.float32)
    with attached(sgd(model), model), pytest.raises(ValueError, match="belongs to a FullyShardedDataParallel"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@on_ranks(2)
def test_parameters_without_memory_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = make_model()
    freed[0].weight.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = nn.Linear(3, 3)
    for model, name in ((freed, "0.weight"), (nn.Linear(2, 2, device="meta"), "weight"), (fake, "weight")):
        with pytest.raises(
            TypeError, match=f"parameter '{name}', a .* has no memory: wanted parameters that are mater"
        ):
            pycomm.attach(sgd(model), model)
    stepped = make_model()
    for p in stepped.parameters():
        p._in_backward_optimizers = []
    with pytest.raises(ValueError, match="parameter '0.weight' is stepped in backward"):
        pycomm.attach(sgd(stepped), stepped)


@on_ranks(2)
def test_hooks_of_others_come_first() -> None:
    """Hooks that were registered after attach see, and may change, this rank's gradient before it is averaged."""
    rank = dist.get_rank()
    model = make_model()
    seen: dict[str, torch.Tensor] = {}
    with attached(sgd(model), model, bucket_mb=0.001):
        for name, p in model.named_parameters():

            def hook(p: torch.Tensor, name: str = name) -> None:
                assert p.grad is not None
                seen[name] = p.grad.clone()
                p.grad.mul_(0.5)

            p.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            for p in model.parameters():
                p.grad = None
            loss_of(model, rank, step).backward()
            own = average_gradients(make_model(), [partial(loss_of, rank=rank, step=step)])
            wanted = average_gradients(make_model(), losses_at(step))
            for name, p in model.named_parameters():
                close(seen[name], own[name])
                close(p.grad, wanted[name] / 2)


@on_ranks(2)
def test_a_gradient_that_another_hook_takes_is_an_error() -> None:
    """An optimizer in a hook of its own that comes first: it moves the replica by its own gradient."""
    model = make_model()
    model[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with attached(sgd(model), model):
        with pytest.raises(RuntimeError, match="the gradient of '0.bias' has been removed by another hook"):
            loss_of(model, 0, 0).backward()


class Refuses(nn.Module):
    """Answers for its parts itself, and cannot yet."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_modules"]:
            return vars(self)["_modules"][name]
        raise KeyError(name)

    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("not yet")

    named_parameters = modules = named_modules = children = parameters  # type: ignore[assignment]


class AnswersForItsPart(nn.Module):
    """Like torch's OptimizedModule, while it is being made: any look at an attribute is a KeyError."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return vars(self)["_modules"]["_orig_mod"]
        return getattr(self._orig_mod, name)


def made_in_a_compiled_forward(x: torch.Tensor) -> Any:
    return Outer(nn.ReLU())(x)


def half_built() -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module._modules["0"] = nn.Linear.__new__(nn.Linear)  # whose __init__ has not run
    return module


CONSTRUCTIONS: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2)),
    "compiled twice": lambda: torch.compile(torch.compile(nn.ReLU(), backend="eager"), backend="eager")(torch.ones(1)),
    "compiled and lazy": lambda: torch.compile(nn.LazyLinear(2), backend="eager")(torch.ones(1, 2)),
    "in a graph": lambda: torch.compile(made_in_a_compiled_forward, backend="eager", fullgraph=True)(torch.ones(1)),
    "scripted": lambda: torch.jit.script(Outer(torch.jit.script(nn.Linear(2, 2)))),
    "lazy": lambda: Outer(nn.LazyBatchNorm1d()),
    "one that raises": lambda: Outer(Refuses(nn.Linear(2, 2))),
    "one that answers for another": lambda: Outer(AnswersForItsPart(nn.Linear(2, 2))),
    "half built": lambda: Outer(half_built()),
    "without memory": lambda: Outer(nn.Linear(2, 2, device="meta")),
    "replaced by nothing": lambda: setattr(Outer(nn.Linear(2, 2)), "inner", None),
    "a wrapper": lambda: DistributedDataParallel(nn.Linear(2, 2)),
    "a wrapper of compiled code": lambda: DistributedDataParallel(torch.compile(nn.Linear(2, 2), backend="eager")),
    "a compiled wrapper": lambda: torch.compile(DistributedDataParallel(nn.Linear(2, 2)), backend="eager"),
}


def give_to_a_wrapper(child: nn.Module) -> None:
    """Do what the constructor of DistributedDataParallel begins with."""
    wrapper: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    nn.Module.__setattr__(wrapper, "module", child)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Lazy modules:UserWarning")
@on_ranks(2, timeout=110)
def test_no_construction_fails_because_of_an_attach() -> None:
    """Of models that have nothing to do with it, and of modules that cannot be looked into."""
    model = make_model()
    with attached(sgd(model), model):
        for construct in CONSTRUCTIONS.values():
            construct()
        for child in (Refuses(nn.Linear(2, 2)), AnswersForItsPart(nn.Linear(2, 2)), half_built()):
            give_to_a_wrapper(child)
        for child in (Refuses(model), AnswersForItsPart(model), Outer(Refuses(model[0]))):
            with pytest.raises(ValueError, match=SAYS):
                give_to_a_wrapper(child)
        loss_of(model, dist.get_rank(), 0).backward()
    other = make_model()
    wrapper: Any = DistributedDataParallel.__new__(DistributedDataParallel)  # lives, and cannot be looked into
    with attached(sgd(other), other):
        nn.Module.__init__(wrapper)
        wrapper.module = Refuses(nn.Linear(2, 2))
        last = make_model()
        with attached(sgd(last), last):
            pass

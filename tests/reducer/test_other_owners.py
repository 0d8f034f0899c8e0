"""Parameters that something else averages, or owns: found out in whatever order, and never a wrong gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
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
    "torch.compile of it": lambda model, ddp: torch.compile(ddp, backend="eager"),
    "what it wraps": lambda model, ddp: model,
    "a part": lambda model, ddp: model[0],
}


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "attach a model in DistributedDataParallel, also through Fabric or Accelerate",
    "`ValueError`. Train without the wrapper, or use `pycomm.ddp`.",
)
@pytest.mark.parametrize("given", GIVEN)
@on_ranks(2)
def test_ddp_before_attach(given: str) -> None:
    """It is refused at once if it is inside of what attach is given, else in its first forward."""
    rank, model = dist.get_rank(), make_model()
    ddp = DistributedDataParallel(model)
    outer = Outer(ddp)
    optimizer, around = sgd(model[0] if given == "a part" else model), contextlib.ExitStack()
    with around, pytest.raises(ValueError, match=SAYS):  # noqa: PT012
        around.enter_context(attached(optimizer, GIVEN[given](model, ddp)))
        assert given in ("what it wraps", "a part")
        loss_of(outer, rank, 0)
    loss_of(outer, rank, 0).backward()  # DistributedDataParallel goes on as if nothing had been
    require_averages(model, 0)
    del outer, ddp
    with attached(optimizer, model[0] if given == "a part" else model):  # nobody has it any more
        pass


def require_averages(model: nn.Module, step: int) -> None:
    wanted = average_gradients(make_model(), losses_at(step))
    for name, p in model.named_parameters():
        close(p.grad, wanted[name])


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "wrap an attached model in DistributedDataParallel",
    "`ValueError` in the wrapper's forward. With `replicate()`, or forwards of parts only: averaged twice.",
)
@pytest.mark.parametrize("how", ["module", "a part", "replicate"])
@on_ranks(2)
def test_ddp_after_attach(how: str) -> None:
    rank, model = dist.get_rank(), make_model()
    with attached(sgd(model), model):
        if how == "replicate":
            from torch.distributed._composable.replicate import replicate

            wrapped: nn.Module = replicate(model)
        elif how == "a part":
            wrapped = nn.Sequential(DistributedDataParallel(model[0]), *model[1:])
        else:
            wrapped = DistributedDataParallel(Outer(model))
        if how == "module":
            with pytest.raises(ValueError, match=SAYS):
                loss_of(wrapped, rank, 0)
        else:  # averaged twice, which is right
            loss_of(wrapped, rank, 0).backward()
            require_averages(model, 0)


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "wrap parameters that `attach` got by name only",
    "Gradients are right, but averaged twice.",
)
@on_ranks(2)
def test_ddp_around_what_was_given_by_name_averages_again() -> None:
    rank, model = dist.get_rank(), make_model()
    with attached(sgd(model), model.named_parameters(), bucket_mb=0.001):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=False)
        for step in range(4):
            for p in model.parameters():
                p.grad = None
            loss_of(ddp, rank, step).backward()
            require_averages(model, step)


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "attach FSDP's parameters, or call `fully_shard` later",
    "`TypeError` or `ValueError`; later, an error in backward.",
)
@on_ranks(2, fresh=True)  # where no group of an earlier test is left in torch's registry
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
    with attached(sgd(model), model):
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"of the module is another object than the one that was attached"):
            loss_of(model, dist.get_rank(), 0).backward()


@on_ranks(2)
def test_parameters_without_memory_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = make_model()
    freed[0].weight.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = nn.Linear(3, 3)
    for model, name in ((freed, "0.weight"), (nn.Linear(2, 2, device="meta"), "weight"), (fake, "weight")):
        with pytest.raises(TypeError, match=f"parameter '{name}', a .* has no memory: wanted parameters that are"):
            pycomm.attach(sgd(model), model)
    stepped = make_model()
    for p in stepped.parameters():
        p._in_backward_optimizers = []
    with pytest.raises(ValueError, match="parameter '0.weight' is stepped in backward"):
        pycomm.attach(sgd(stepped), stepped)


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "register hooks on parameters",
    "They see this rank's gradient before it is averaged, and may change it.",
)
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


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "`the gradient of ... has been removed by another hook on this parameter`",
    "A hook steps and frees gradients during backward. Step after backward.",
)
@on_ranks(2)
def test_a_gradient_that_another_hook_takes_is_an_error() -> None:
    """An optimizer in a hook of its own that comes first: it moves the replica by its own gradient."""
    model = make_model()
    model[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with attached(sgd(model), model):
        with pytest.raises(RuntimeError, match="the gradient of '0.bias' has been removed by another hook"):
            loss_of(model, 0, 0).backward()

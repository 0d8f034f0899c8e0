"""Users may do to ``.grad`` between passes what they like: it stays theirs, and the next average is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

METHODS = {"dense": None, "topk": pycomm.TopK(1.0), "fp16": pycomm.FP16()}


def repoint(model: nn.Module, how: str) -> None:
    for p in model.parameters():
        if p.grad is None:
            continue
        if how == "data":
            p.grad.data = p.grad.data.clone()
        elif how == "set_":
            p.grad.set_(p.grad.clone())  # type: ignore[call-overload]
        else:
            p.grad = p.grad.clone()
    if how == "memory_format":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if how == "apply":
        model._apply(lambda t: t.clone())  # as m.cpu(), m.float(), ... where they have something to do


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(1, 4, (2, 2), dtype=torch.float64)
        self.head = nn.Linear(4 * 2 * 3, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.body(x.view(-1, 1, 3, 4))).flatten(1))


@pytest.mark.behavior(
    "Gradients",
    "replace `.grad`'s memory: `.data =`, `set_()`, `model._apply`",
    "It stays as you left it; the next averages are right.",
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["data", "set_", "clone", "apply", "memory_format"])
@on_ranks(2)
def test_exchanged_memory(how: str, set_to_none: bool) -> None:
    rank = dist.get_rank()
    model, plain = Images(), Images()
    optimizer = sgd(model)
    with attached(optimizer, model, bucket_mb=0.0001) as reducer:
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            plain.load_state_dict(model.state_dict())
            loss_of(model, rank, step).backward()
            wanted = average_gradients(plain, losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            if step in (1, 3):
                repoint(model, how)
                for name, p in model.named_parameters():
                    close(p.grad, wanted[name])
                norm = reducer.clip_grad_norm(1e9)
                close(norm, torch.stack([g.norm() for g in wanted.values()]).norm(), 1e-9)
            optimizer.step()
        assert_replicas_equal(model)


@on_ranks(2)
def test_norms_of_exchanged_memory() -> None:
    """A gradient whose memory was exchanged is measured as it is, not as it was received."""
    model = make_model()
    with attached(sgd(model), model) as reducer:
        for step in range(3):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            reducer.clip_grad_norm(1e9)  # norms are taken as buckets arrive from here on
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data = torch.full_like(p, 2.0)
        total = 4.0 * sum(p.numel() for p in model.parameters())
        assert float(reducer.clip_grad_norm(1e9)) == pytest.approx(total**0.5)


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda grad: grad,
    "a view": lambda grad: grad.view(-1),
    "detached": lambda grad: grad.detach(),
    "numpy": lambda grad: torch.from_numpy(grad.numpy()),
    "a slice": lambda grad: grad[:1],
    "dlpack": torch.utils.dlpack.from_dlpack,
}


def keep(kept_as: str, method: str, which: int, passes: int) -> None:
    rank = dist.get_rank()
    dtype = torch.float32 if method == "fp16" else torch.float64
    model = make_model(dtype=dtype)
    optimizer = sgd(model)
    history: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    with attached(optimizer, model, compression=METHODS[method], accumulate=passes) as reducer:
        for step in range(5):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(passes):
                loss_of(model, rank, step).backward()
            params = [p for i, p in enumerate(model.parameters()) if which < 0 or i == which]
            kept = [KEPT[kept_as](p.grad) for p in params if p.grad is not None]
            history.append((kept, [k.clone() for k in kept]))
            optimizer.step()
        for kept, copies in history:
            for k, c in zip(kept, copies, strict=True):
                assert torch.equal(k, c), "a gradient that was kept has been overwritten"
        assert_replicas_equal(model)
        reference = make_model(dtype=dtype)
        other = sgd(reference)
        for step in range(5):
            for name, grad in average_gradients(reference, losses_at(step)).items():
                reference.get_parameter(name).grad = grad * passes
            other.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            close(p.detach(), q.detach(), 1e-2 if method == "fp16" else 1e-9)
        assert reducer.stats()["steps"] == 5


@pytest.mark.behavior(
    "Gradients", "keep a gradient across steps without a clone", "It keeps its values, at the cost of a copy."
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kept_as", KEPT)
@on_ranks(2)
def test_a_gradient_that_is_kept_stays(kept_as: str, method: str) -> None:
    keep(kept_as, method, -1, 1)


@pytest.mark.parametrize("kept_as", ["itself", "a view"])
@on_ranks(2)
def test_one_that_is_kept_among_others_and_in_windows(kept_as: str) -> None:
    keep(kept_as, "dense", 2, 1)
    keep(kept_as, "topk", 0, 1)
    keep(kept_as, "dense", -1, 3)


@on_ranks(2)
def test_nothing_is_copied_for_nobody() -> None:
    """Gradients come back to the same memory step after step if nobody keeps any."""
    model = make_model()
    optimizer = sgd(model)
    for method in (None, pycomm.TopK(0.5)):
        with attached(optimizer, model, compression=method):
            places = set()
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                places.add(tuple(g.data_ptr() for g in grads))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                total = torch.stack([g.norm() for g in grads]).sum()
                assert total > 0
                del grads
                optimizer.step()
            # Error feedback has two memories that change places.
            assert len(places) <= (1 if method is None else 3)


STATEFUL = [
    *(pycomm.TopK(0.5), pycomm.DGC(0.5, momentum=0.5), pycomm.RandomK(0.5), pycomm.Int8(), pycomm.Int4()),
    *(pycomm.FP8(), pycomm.OneBit(), pycomm.PowerSGD(1), pycomm.ChunkTopK(8, 64)),
]


@pytest.mark.parametrize("method", STATEFUL, ids=lambda method: type(method).__name__)
@on_ranks(2)
def test_the_two_memories_of_error_feedback_change_places(method: Any) -> None:
    """In every step in which nobody keeps a gradient: if they stay, the state of the bucket was copied three times."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 96))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with attached(optimizer, [("weight", weight)], compression=method):
        places = []
        for step in range(6):
            optimizer.zero_grad()
            (weight * torch.full_like(weight, step + 1.0)).sum().backward()
            assert weight.grad is not None
            places.append(weight.grad.data_ptr())
            optimizer.step()
        assert places == [*places[:2]] * 3
        assert places[0] != places[1]


@pytest.mark.parametrize("method", ["dense", "topk"])
@on_ranks(2)
def test_in_place_is_as_in_torch(method: str) -> None:
    """zero_grad(set_to_none=False) keeps one tensor, with and without pycomm: what is kept of it follows."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=METHODS[method]) as reducer:
        loss_of(model, rank, 0).backward()
        kept = [p.grad for p in model.parameters()]
        optimizer.step()
        for step in range(1, 5):
            plain.load_state_dict(model.state_dict())
            torch._foreach_zero_(kept)  # as whoever caches the list of gradients zeroes them
            loss_of(model, rank, step).backward()
            wanted = average_gradients(plain, losses_at(step))
            for k, (name, p) in zip(kept, model.named_parameters(), strict=True):
                assert p.grad is k
                close(k, wanted[name])
            if method == "topk":
                assert all(float(e["residual"].abs().max()) < 1e-12 for e in own_state(reducer).values())
            optimizer.step()


@on_ranks(2)
def test_residuals_are_nobodys() -> None:
    """Changes of a gradient that was kept reach no residual of error feedback."""
    rank = dist.get_rank()
    states = []
    for spoils in (False, True):
        model = make_model()
        optimizer = sgd(model)
        cached: list[torch.Tensor] = []
        with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
            for step in range(6):
                optimizer.zero_grad(set_to_none=False)
                if spoils:
                    for grad in cached:
                        if all(grad is not p.grad for p in model.parameters()):
                            grad.fill_(77.0)
                    optimizer.zero_grad(set_to_none=False)
                loss_of(model, rank, step).backward()
                cached = [p.grad for p in model.parameters() if p.grad is not None]
                optimizer.step()
            states.append(own_state(reducer))
    for name, entry in states[0].items():
        assert torch.equal(entry["residual"], states[1][name]["residual"])


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "call `model.double()` or `model.cuda()` while attached",
    "Error at the next backward. Call `detach()` first.",
)
@pytest.mark.behavior(
    "Passes and steps",
    "`this Reducer no longer takes part after an earlier error: ...`",
    "The end of the text is the error to look at. Attach again, or restart.",
)
@on_ranks(2)
def test_a_converted_model_is_an_error() -> None:
    model = make_model(dtype=torch.float32)
    optimizer = sgd(model)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
    loss_of(model, dist.get_rank(), 0).backward()
    model.double()
    with pytest.raises(
        RuntimeError, match="was torch.float32 on cpu when it was attached, and is torch.float64 on cpu"
    ):
        loss_of(model, dist.get_rank(), 1).backward()
    with pytest.raises(
        RuntimeError, match="no longer takes part after an earlier error: parameter '2.weight' was|'0.weight'"
    ):
        loss_of(model, dist.get_rank(), 1).backward()
    reducer.detach()
    optimizer.zero_grad()
    with attached(optimizer, model):
        loss_of(model, dist.get_rank(), 1).backward()
        reference = make_model(dtype=torch.float32).double()
        wanted = average_gradients(reference, [partial(loss_of, rank=r, step=1) for r in range(2)])
        close(model[0].weight.grad, wanted["0.weight"])

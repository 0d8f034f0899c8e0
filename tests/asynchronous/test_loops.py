"""``local_sgd``: ranks that do not do the same, other parameters and ends are told; what is allowed stays."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune

import pycomm
from pycomm import CommError
from tests.asynchronous.averaged import flat
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import Pools, on_ranks

TIMEOUT = 60.0


def begin(**options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the handle of local SGD."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, pycomm.local_sgd(optimizer, model, timeout=20, **{"every": 4, **options})


def step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), number).backward()
    optimizer.step()


def steps(model: Any, optimizer: Any, count: int) -> None:
    for number in range(count):
        step(model, optimizer, number)


def are_equal(model: Any) -> bool:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, flat(model))
    return all(torch.equal(other, everyones[0]) for other in everyones)


def scaler_of(kind: str) -> Any:
    return pycomm.LossScaler(2.0**8) if kind == "own" else torch.amp.GradScaler("cpu", 2.0**8)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "let a scaler skip a step on one rank",
    "The skipped step counts: all ranks average after equally many batches.",
)
@pytest.mark.parametrize("kind", ["own", "torch"])
@pytest.mark.parametrize("bad", [3, 7], ids=["between meetings", "the step of a meeting"])
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_step_that_a_scaler_leaves_out_on_one_rank_counts(kind: str, bad: int) -> None:
    model, optimizer, handle = begin()
    scaler = scaler_of(kind)
    for number in range(8):
        optimizer.zero_grad()
        overflow = dist.get_rank() == 1 and number == bad
        scaler.scale(loss_of(model, dist.get_rank(), number) * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number % 4 == 3:
            assert are_equal(model), number
    stats = handle.stats()
    assert (stats["steps"], stats["skipped"], stats["meetings"]) == (8, dist.get_rank(), 2)
    handle.detach()


def leave_out_after_forward(model: Any, optimizer: Any) -> None:
    loss_of(model, dist.get_rank(), 99)


def leave_out_after_zero_grad(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def leave_out_the_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), 99).backward()


LEFT_OUT: list[Callable[[Any, Any], None]] = [leave_out_after_forward, leave_out_after_zero_grad, leave_out_the_step]


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "skip a batch on one rank",
    "Error when it next averages with others; `skip_step()` declares it.",
)
@pytest.mark.parametrize("leave_out", LEFT_OUT)
@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_batch_that_one_rank_leaves_out_is_an_error_at_the_next_meeting(leave_out: Any, delay: int) -> None:
    model, optimizer, handle = begin(delay=delay)
    last = 3 + delay + dist.get_rank()
    for number in range(last):
        if dist.get_rank() == 1 and number == 2:
            leave_out(model, optimizer)
        else:
            step(model, optimizer, number)
    with pytest.raises(RuntimeError, match="rank 1 left out a batch.*Steps made: rank 0 4, rank 1 4"):
        step(model, optimizer, last)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_batch_that_is_left_out_on_purpose_counts() -> None:
    for leave_out in LEFT_OUT:
        model, optimizer, handle = begin()
        for number in range(8):
            if dist.get_rank() == 1 and number == 2:
                leave_out(model, optimizer)
                handle.skip_step()
                continue
            step(model, optimizer, number)
        assert are_equal(model)
        assert handle.stats()["meetings"] == 2
        handle.detach()


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers", "take different numbers of steps", "Error at the next averaging."
)
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_meetings_after_different_numbers_of_steps_are_an_error() -> None:
    model, optimizer, handle = begin()
    for number in range(7 - dist.get_rank()):
        step(model, optimizer, number)
    with pytest.raises(RuntimeError, match="rank 1 is behind. Steps made: rank 0 7, rank 1 6"):
        handle.meet()
    handle.detach()


@pytest.mark.behavior(
    "Ranks that differ",
    "`the ranks' optimizers differ: ... of parameter group ... is ...`",
    'Causes: a schedule by the local loss, a checkpoint on one rank, a skipped step. If intended: `per_rank=("lr",)`.',
)
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_other_learning_rates_are_an_error_unless_declared() -> None:
    for options in ({}, {"per_rank": ("lr",)}):
        model, optimizer, handle = begin(**options)
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.01
        for number in range(3):
            step(model, optimizer, number)
        if options:
            step(model, optimizer, 3)
            assert are_equal(model)
        else:
            says = "'lr' of parameter group 0 is 0.05 on rank 0, 0.01 on rank 1"
            with pytest.raises(ValueError, match=says):
                step(model, optimizer, 3)
        handle.detach()
    for wrong in ("lr", ("learning_rate",), 3):
        with pytest.raises((TypeError, ValueError), match="per_rank"):
            begin(per_rank=wrong)


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_learning_rates_set_in_hooks_of_a_step_are_no_numbers_of_the_optimizer(when: str, order: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rank, counts = dist.get_rank(), [0]

    def warm_up(*_: Any) -> None:
        counts[0] += 1
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + counts[0] % 3) * (1 + rank)

    register = getattr(optimizer, f"register_step_{when}_hook")
    if order == "before":
        register(warm_up)
    handle = pycomm.local_sgd(optimizer, model, every=2, timeout=20)
    if order == "after":
        register(warm_up)
    step(model, optimizer, 0)
    with pytest.raises(ValueError, match="'lr' of parameter group 0 is"):
        step(model, optimizer, 1)
    handle.detach()


class OwnNumbers(torch.optim.SGD):
    """SGD that notes a number of its gradients in its group, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["d"] = group.get("d", 0.0) + float(sum(p.grad.abs().sum() for p in group["params"]))
        return super().step(closure)


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_what_is_a_ranks_own_is_no_error() -> None:
    """Evaluations of one rank, more passes in a step, numbers that an optimizer changes itself."""
    model = model_of()
    optimizer = OwnNumbers([{"params": list(model.parameters()), "d": 0.0}], 0.05)
    handle = pycomm.local_sgd(optimizer, model, every=2, timeout=20)
    rank = dist.get_rank()
    for number in range(6):
        optimizer.zero_grad()
        for part in range(1 + rank * (number % 3)):  # windows, sequences of other lengths
            loss_of(model, rank, 7 * number + part).backward()
        if rank == 0:
            with torch.no_grad():
                loss_of(model, rank, 0)
            model.eval()
            loss_of(model, rank, 0)
            model.train()
        (loss_of(model, rank, number) + (loss_of(model, rank, 50) if rank else 0.0)).backward()
        optimizer.step()
    assert are_equal(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_closures_may_be_evaluated_as_often_as_a_rank_likes() -> None:
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2 + 3 * dist.get_rank())
    handle = pycomm.local_sgd(optimizer, model, every=2, timeout=20, per_rank=("max_iter", "max_eval"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), 0)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert are_equal(model)
    handle.detach()


def replace(model: Any, optimizer: Any) -> Any:
    for part in (model[0], model[2]):
        part.weight, part.bias = (torch.nn.Parameter(p.detach().clone()) for p in (part.weight, part.bias))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, optimizer


def replace_in_the_module(model: Any, optimizer: Any) -> Any:
    replace(model, torch.optim.SGD(model.parameters(), 0.1))
    return model, optimizer


def exchange(model: Any, optimizer: Any) -> Any:
    model[0].weight, model[2].weight = model[2].weight, model[0].weight
    return model, optimizer


def assign(model: Any, optimizer: Any) -> Any:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model, torch.optim.SGD(model.parameters(), 0.05)


def add(model: Any, optimizer: Any) -> Any:
    model.append(torch.nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": list(model[3].parameters())})
    return model, optimizer


def unfreeze(model: Any, optimizer: Any) -> Any:
    model.append(torch.nn.Linear(3, 3).double())
    return model, optimizer


def copies(model: Any, optimizer: Any) -> Any:
    model, optimizer = copy.deepcopy((model, optimizer))
    return model, optimizer


def another_optimizer(model: Any, optimizer: Any) -> Any:
    return model, torch.optim.SGD(model.parameters(), 0.05)


class ByHand:
    """Steps without an optimizer."""

    def __init__(self, model: Any) -> None:
        self.model, self.zero_grad = model, model.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        for p in self.model.parameters():
            p -= 0.05 * p.grad


def by_hand(model: Any, optimizer: Any) -> Any:
    return model, ByHand(model)


CHANGES = {
    "replaced": (replace, "'0.weight' of the module is not the parameter.*call [a-z]*_sgd", 1),
    "replaced in the module": (replace_in_the_module, "'0.weight' of the module is not the parameter", 1),
    "exchanged": (exchange, "'0.weight' of the module is not the parameter", 1),
    "assigned, new optimizer": (assign, "'0.weight' of the module is not the parameter.*call [a-z]*_sgd", 1),
    "added": (add, "not averaged.*call [a-z]*_sgd", 1),
    "added to the module": (unfreeze, "'3.weight' of the module is trained, and not averaged", 4),
    "a copy": (copies, "copy", 1),
    "another optimizer": (another_optimizer, r"a SGD other than the SGD passed to local_sgd\(\).*detach\(\)", 1),
    "by hand": (by_hand, "something else has changed the parameters 8 times", 9),
}


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "replace parameters, or use another optimizer",
    "Error. Call `local_sgd` or `gossip` again.",
)
@pytest.mark.parametrize("how", CHANGES)
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_other_parameters_are_an_error_that_names_them(how: str) -> None:
    model, optimizer, _ = begin()
    change, says, within = CHANGES[how]
    step(model, optimizer, 0)
    model, optimizer = change(model, optimizer)
    with pytest.raises((ValueError, RuntimeError), match=says):
        steps(model, optimizer, within)


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_an_averager_that_nobody_holds_refuses_nothing() -> None:
    model, optimizer, handle = begin()
    step(model, optimizer, 0)
    del optimizer, handle
    gc.collect()
    steps(model, torch.optim.SGD(model.parameters(), 0.05), 3)


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_wrappers_around_the_optimizer_and_optimizers_inside_its_step_are_no_others() -> None:
    class Outer(torch.optim.Optimizer):
        """Steps an optimizer inside of it, as Lookahead does."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(list(inner.param_groups[0]["params"]), {})

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    for is_given in (True, False):
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), 0.05)
        outer = Outer(inner)
        handle = pycomm.local_sgd(outer if is_given else inner, model, every=2, timeout=20)
        steps(model, outer, 4)
        assert are_equal(model)
        handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_an_optimizer_with_parameters_of_nobody_is_refused() -> None:
    model, other = model_of(), torch.nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="not in the model"):
        pycomm.local_sgd(torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1), model, every=2, timeout=20)


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_pruning_and_parametrizations_keep_the_parameters() -> None:
    model, optimizer, handle = begin()
    step(model, optimizer, 0)
    torch.nn.utils.prune.random_unstructured(model[0], "weight", 0.5)
    torch.nn.utils.parametrizations.orthogonal(model[2])
    for number in range(1, 8):
        step(model, optimizer, number)
    assert are_equal(model)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_what_happens_on_one_rank_is_told_to_the_other() -> None:
    model, optimizer, _ = begin(every=2)
    step(model, optimizer, 0)
    if dist.get_rank() == 1:
        replace(model, optimizer)
    with pytest.raises((ValueError, CommError), match="'0.weight' of the module is not the parameter"):
        step(model, optimizer, 1)


def end_early(how: str) -> str:
    """Return the error of the rank that goes on."""
    model, optimizer, handle = begin(every=2)
    steps(model, optimizer, 3)
    if dist.get_rank() == 1:
        if how == "detach":
            handle.detach()
        del model, optimizer, handle
        gc.collect()
        return ""
    with pytest.raises(CommError) as caught:
        step(model, optimizer, 3)
    assert caught.value.elapsed < 10
    return str(caught.value)


@pytest.mark.behavior(
    "Ranks that differ", "end the training, or detach, on one rank", "`CommError` at once on ranks that wait for it."
)
@pytest.mark.parametrize("how", ["detach", "dropped"])
def test_an_end_is_told_by_name(new_ranks: Pools, how: str) -> None:
    outcome = new_ranks(2).outcomes(end_early, how, timeout=TIMEOUT)[0]
    assert outcome.error is None, outcome.trace
    assert "rank 1" in outcome.result
    assert "waits in the meeting after step 4" in outcome.result
    assert f"it has ended its training{' (detach)' if how == 'detach' else ''} after step 3" in outcome.result


@pytest.mark.parametrize("way", ["local_sgd", "gossip"])
@on_ranks(2)
def test_a_rank_that_never_clears_its_gradients_is_named(way: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(pycomm, way)(optimizer, model, every=1, timeout=30)
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    loss_of(model, dist.get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match=r"rank 0 left out a batch: calls of optimizer.zero_grad\(\)") as caught:
        optimizer.step()
    assert "Steps made: rank 0 1, rank 1 1. " in str(caught.value)

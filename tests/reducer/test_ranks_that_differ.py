"""Ranks that do not do the same: found in the same reduction, by what travels with it, and named on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, over_tcp, warnings_noted
from tests.reducer.models import batch_of, loss_of, make_model, sgd

METHODS = [None, pycomm.FP16(), pycomm.TopK(0.5)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, before: Callable[[int], Any]) -> None:
    """Train for ``steps``; ``before(step)`` is what a rank does at the beginning of each."""
    rank = dist.get_rank()
    for step in steps:
        optimizer.zero_grad()
        before(step)
        loss_of(model, rank, step).backward()
        optimizer.step()


# Hyperparameters


def change(optimizer: torch.optim.Optimizer, key: str, value: Any, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    if dist.get_rank() in ranks:
        optimizer.param_groups[-1][key] = value


CHANGES = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01, "nesterov": True, "own": 3}


@pytest.mark.behavior(
    "Ranks that differ",
    "`the ranks' optimizers differ: ... of parameter group ... is ...`",
    'Causes: a schedule by the local loss, a checkpoint on one rank, a skipped step. If intended: `per_rank=("lr",)`.',
)
@pytest.mark.pairwise
@pytest.mark.parametrize("compression", METHODS, ids=repr)
@pytest.mark.parametrize("key", CHANGES)
@on_ranks(2, 3)
def test_a_number_of_a_group_that_differs_is_named(key: str, compression: Any) -> None:
    model = make_model()
    parts = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters())}]
    optimizer = torch.optim.SGD(parts, 0.1, momentum=0.9)
    with attached(optimizer, model, compression=compression):
        train(model, optimizer, range(2), lambda _: None)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=f"optimizers differ: '{key}' of parameter group 1 is .* on rank 1"):
            train(model, optimizer, range(2, 3), lambda _: change(optimizer, key, CHANGES[key], (1,)))
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
        assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_over_torch_too() -> None:
    model = make_model()
    optimizer = sgd(model)
    with over_tcp(), attached(optimizer, model):
        with pytest.raises(ValueError, match="'lr' of parameter group 0 is 0.1 on rank 0, 0.2 on rank 1"):
            train(model, optimizer, range(3), lambda step: change(optimizer, "lr", 0.1 * (1 + dist.get_rank() * step)))


@on_ranks(2)
def test_what_all_change_alike_is_right() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    with attached(optimizer, model) as reducer:
        for step in range(12):
            train(model, optimizer, range(step, step + 1), lambda _: None)
            schedule.step()
        assert reducer.stats()["steps"] == 12
        assert_replicas_equal(model)


@on_ranks(2)
def test_a_rate_that_is_a_tensor_is_compared() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
    with attached(optimizer, model):
        train(model, optimizer, range(2), lambda _: None)
        with pytest.raises(ValueError, match="'lr' of parameter group 0"):
            train(model, optimizer, range(2, 3), lambda _: optimizer.param_groups[0]["lr"].mul_(1 + dist.get_rank()))


@on_ranks(2)
def test_a_rate_that_becomes_a_tensor_is_compared() -> None:
    model, rank = make_model(), dist.get_rank()
    optimizer = sgd(model)
    rate = torch.tensor(0.05)
    with attached(optimizer, model, check_replicas=0) as reducer:
        train(model, optimizer, range(4), lambda step: change(optimizer, "lr", rate) if step == 2 else None)
        assert reducer.stats()["steps"] == 4
        rate.add_(rank)
        with pytest.raises(ValueError, match=r"'lr' of parameter group 0 is 0.05\d* on rank 0, 1.0\d* on rank 1"):
            train(model, optimizer, range(4, 6), lambda _: None)


@on_ranks(2)
def test_what_is_declared_per_rank_may_differ() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, per_rank=("lr",), check_replicas=0):
        train(model, optimizer, range(3), lambda _: change(optimizer, "lr", 0.1 + 0.01 * dist.get_rank()))
        with pytest.raises(ValueError, match="'weight_decay'"):
            train(model, optimizer, range(3, 4), lambda _: change(optimizer, "weight_decay", 0.1 * dist.get_rank()))


@pytest.mark.parametrize("wrong", ["lr", 3, [1]])
@on_ranks(2)
def test_per_rank_takes_names(wrong: Any) -> None:
    model = make_model()
    with pytest.raises(TypeError, match="per_rank is .*, wanted names of hyperparameters"):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(per_rank=wrong))


@on_ranks(2)
def test_momentum_that_a_schedule_gives_is_checked_against_compression() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=pycomm.DGC(0.5, momentum=0.9)):
        train(model, optimizer, range(2), lambda _: None)
        with pytest.raises(ValueError, match="would apply momentum twice"):
            train(model, optimizer, range(2, 3), lambda _: change(optimizer, "momentum", 0.9))


@pytest.mark.parametrize("way", ["by hand", "hook"])
@on_ranks(2)
def test_momentum_that_is_only_there_in_the_step(way: str) -> None:
    """One rank sets it; both get the error."""
    model, rank = make_model(), dist.get_rank()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=pycomm.DGC(0.5, momentum=0.9)):
        train(model, optimizer, range(1), lambda _: None)
        if way == "hook" and rank == 1:
            optimizer.register_step_pre_hook(lambda *_: change(optimizer, "momentum", 0.9))
            optimizer.register_step_post_hook(lambda *_: change(optimizer, "momentum", 0.0))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if rank == 1:
            if way == "by hand":
                change(optimizer, "momentum", 0.9)
            with pytest.raises(ValueError, match="would apply momentum twice"):
                optimizer.step()
            assert way == "hook" or all(map(torch.equal, before, model.parameters()))
        else:
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="would apply momentum twice"):
                loss_of(model, rank, 2).backward()


@pytest.mark.parametrize("odd", [(1,), (0, 1)], ids=["one rank", "both"])
@on_ranks(2)
def test_a_rate_that_is_only_there_in_the_step(odd: tuple[int, ...]) -> None:
    """A hook sets it for the step, and another one takes it back."""
    model, rank = make_model(), dist.get_rank()
    optimizer = sgd(model)
    with attached(optimizer, model, check_replicas=0):
        train(model, optimizer, range(1), lambda _: None)
        optimizer.register_step_pre_hook(lambda *_: change(optimizer, "lr", 0.2 + rank, odd))
        optimizer.register_step_post_hook(lambda *_: change(optimizer, "lr", 0.1, odd))
        with pytest.raises(
            ValueError, match=r"'lr' of parameter group 0 in the last optimizer.step\(\), .* is .*1.2 on rank 1"
        ):
            train(model, optimizer, range(1, 3), lambda _: None)


@on_ranks(2)
def test_a_rate_that_all_set_for_the_step_is_right() -> None:
    model = make_model()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: change(optimizer, "lr", 0.05))
    optimizer.register_step_post_hook(lambda *_: change(optimizer, "lr", 0.1))
    with attached(optimizer, model) as reducer:
        train(model, optimizer, range(4), lambda _: None)
        assert reducer.stats()["steps"] == 4


@pytest.mark.behavior(
    "Ranks that differ",
    "another loss scale on one rank",
    "`ValueError` everywhere. Load and `update()` the scaler on all ranks.",
)
@pytest.mark.parametrize("kind", [pycomm.LossScaler, torch.amp.GradScaler])
@on_ranks(2)
def test_loss_scales_that_differ(kind: Any) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    scaler = kind(init_scale=2.0**10) if kind is pycomm.LossScaler else kind("cpu", init_scale=2.0**10)
    with attached(optimizer, model, loss_scaler=scaler):
        for step in range(3):
            optimizer.zero_grad()
            if step == 2 and rank == 1:
                scaler.update(2.0**12) if kind is not pycomm.LossScaler else scaler.load_state_dict(
                    {**scaler.state_dict(), "scale": 2.0**12}
                )
            loss = scaler.scale(loss_of(model, rank, step))
            if step < 2:
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                with pytest.raises(
                    ValueError, match="loss scalers differ: the scale is 1024.0 on rank 0, 4096.0 on rank 1"
                ):
                    loss.backward()


@pytest.mark.behavior("Ranks that differ", "call `set_weight` on some ranks", "Error everywhere.")
@on_ranks(2)
def test_weights_on_one_rank_only() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:

        def weigh(step: int) -> None:
            if rank == 1 and step == 1:
                reducer.set_weight(4)

        with pytest.raises(RuntimeError, match=r"set_weight\(\) was called on rank 1, and not on the others"):
            train(model, optimizer, range(3), weigh)


# The loop index


def skip(where: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, left_out: dict[int, int]) -> None:
    """Train in a loop that a rank leaves by ``continue`` in the step ``left_out[rank]``, at the place ``where``."""
    rank = dist.get_rank()
    for step in range(steps):
        is_left_out = left_out.get(rank) == step
        if where != "bottom":
            optimizer.zero_grad()
        if is_left_out and where == "before forward":
            continue
        loss = loss_of(model, rank, step)
        if is_left_out:
            continue
        loss.backward()
        optimizer.step()
        if where == "bottom":
            optimizer.zero_grad()


@pytest.mark.behavior(
    "Ranks that differ",
    "`... left out a batch: ...`",
    "That rank ran `continue` after forward or `zero_grad()`. Use `skip_batch()` or `veto_step()`; under "
    "`pycomm.ddp`, skip it everywhere.",
)
@pytest.mark.parametrize("compression", METHODS, ids=repr)
@pytest.mark.parametrize("where", ["top", "bottom", "before forward"])
@on_ranks(2)
def test_a_batch_left_out_on_one_rank(where: str, compression: Any) -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=compression) as reducer:
        with pytest.raises(RuntimeError, match="rank 1 left out a batch.*skip_batch"):
            skip(where, model, optimizer, 8, {1: 3})
        assert reducer.stats()["steps"] == 3


@pytest.mark.parametrize("where", ["top", "bottom", "before forward"])
@on_ranks(2)
def test_each_rank_leaves_out_another_batch(where: str) -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        with pytest.raises(RuntimeError, match="rank 0 left out a batch"):
            skip(where, model, optimizer, 8, {0: 2, 1: 4})
        assert reducer.stats()["steps"] == 2


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": compiled_in_place,
    "evaluation mode": lambda model: model.eval(),
    "by parts": lambda model: nn.Sequential(*model.children()),
}


@pytest.mark.parametrize("how", CALLS)
@on_ranks(2)
def test_a_batch_left_out_however_the_model_is_called(how: str) -> None:
    model = make_model()
    call, optimizer = CALLS[how](model), sgd(model)
    with attached(optimizer, model) as reducer:
        with pytest.raises(RuntimeError, match="rank 0 left out a batch"):
            skip("bottom", call, optimizer, 8, {0: 3, 1: 5})
        assert reducer.stats()["steps"] == 3


@on_ranks(2)
def test_a_part_that_one_rank_does_not_use_is_right() -> None:
    """Parts are called without the model; one rank's loss depends on some of them only."""
    rank, model = dist.get_rank(), make_model()
    optimizer, (first, *middle, last) = sgd(model), model.children()
    with attached(optimizer, model) as reducer:
        for step in range(5):
            x, y = batch_of(rank, step)
            optimizer.zero_grad()
            hidden = first(x)
            loss = (last(nn.Sequential(*middle)(hidden)) - y).square().mean()
            if rank == 1 and step % 2:
                loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
        assert reducer.stats()["steps"] == 5
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Ranks that differ",
    "`... is in evaluation mode (eval()) on ..., and in training mode on ...`",
    '`model.train()` was forgotten. If intended: `Tuning(per_rank=("training",))`.',
)
@pytest.mark.parametrize("part", ["the model", "'0'"])
@on_ranks(2, 3)
def test_a_mode_that_differs(part: str) -> None:
    """Rank 1 forgets ``train()`` after an evaluation, or for one layer."""
    model = make_model()
    optimizer = sgd(model)
    evaluated = model if part == "the model" else model[0]
    with attached(optimizer, model):
        train(model, optimizer, range(2), lambda _: None)
        with pytest.raises(
            RuntimeError, match=f"{part} is in evaluation mode .* on rank 1, and in training mode on rank"
        ):
            train(model, optimizer, range(2, 5), lambda _: evaluated.train(dist.get_rank() != 1))
        evaluated.train()


@on_ranks(2)
def test_modes_that_may_differ() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, per_rank=("training",)) as reducer:
        train(model, optimizer, range(5), lambda _: model.train(dist.get_rank() != 1))
        assert reducer.stats()["steps"] == 5


@pytest.mark.behavior(
    "Ranks that differ",
    "`accumulate's function has ended this window after a number of backward passes that is ...`",
    "Ranks ran out of batches at different times. Call `set_weight(num_samples)`; a second such window is an error.",
)
@on_ranks(2)
def test_windows_of_different_lengths_by_a_function_are_named() -> None:
    """Once they are a warning, as the last window of an epoch may be short; twice in a row an error."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    ends, step = {0: (1, 3, 5, 7), 1: (2, 3, 5, 6)}[rank], 0
    said: list[str] = []

    def run(steps: range) -> None:
        nonlocal step
        for step in steps:
            loss_of(model, rank, step).backward()
            if step in ends:
                optimizer.step()
                optimizer.zero_grad()

    with attached(optimizer, model, accumulate=lambda: step in ends):
        with warnings_noted(said):
            run(range(2 + rank))
        assert [text for text in said if "passes that is 2 on rank 0, 3 on rank 1" in text] == said
        assert len(said) == (rank == 0)
        with pytest.raises(RuntimeError, match="a number of backward passes that is 2 on rank 0, 1 on rank 1"):
            run(range(2 + rank, 4))


@on_ranks(2)
def test_a_pass_left_out_of_a_window() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(3):
            for part in range(4 + (rank == 1 and step == 1)):
                loss = loss_of(model, rank, 5 * step + part)
                if not (rank == 1 and step == 1 and part == 2):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with attached(optimizer, model, accumulate=4):
        with pytest.raises(RuntimeError, match="rank 1 left out a batch"):
            run()


@pytest.mark.behavior("Ranks that differ", "evaluate, or inspect gradients of inputs, on one rank", "No error.")
@pytest.mark.parametrize(
    "how", ["eval", "eval, trained so before", "no_grad", "paused", "used", "submodule", "zero_grad in paused"]
)
@on_ranks(2)
def test_what_one_rank_may_do_besides(how: str) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:

        def besides(step: int) -> None:
            if rank == 0 or step % 2 == 0:
                return
            x = batch_of(rank, step)[0]
            if how.startswith("eval"):
                model.eval()(x)
                model.train()
            elif how == "no_grad":
                with torch.no_grad():
                    model(x)
            elif how == "paused":
                with reducer.paused():
                    model(x)
            elif how == "used":
                x.requires_grad_()
                torch.autograd.grad(model(x).sum(), x)
            elif how == "submodule":
                model[0](x)
            else:
                with reducer.paused():
                    optimizer.zero_grad()

        model.train(how != "eval, trained so before")
        train(model, optimizer, range(2), lambda _: None)
        model.train()
        train(model, optimizer, range(6), besides)
        assert reducer.stats()["steps"] == 8
        assert_replicas_equal(model)


@on_ranks(2)
def test_episodes_of_different_lengths_are_right() -> None:
    """As many forwards as an episode, or a sequence, is long, and one backward."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            losses = [loss_of(model, rank, 10 * step + i) for i in range(1 + (rank + step) % 3)]
            torch.stack(losses).mean().backward()
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoints_on_one_rank_are_right(use_reentrant: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        for step in range(4):
            x, y = batch_of(rank, step)
            x.requires_grad_()  # as reentrant checkpoints want
            optimizer.zero_grad()
            if rank == 1:
                out: Any = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
            else:
                out = model(x)
            (out - y).square().mean().backward()
            optimizer.step()
        assert_replicas_equal(model)


@on_ranks(2)
def test_two_losses_in_a_step_are_right() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            first, second = loss_of(model, rank, 2 * step), loss_of(model, rank, 2 * step + 1)
            first.backward()
            second.backward()
            optimizer.step()
        assert reducer.stats()["steps"] == 8
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Ranks that differ",
    "forget `zero_grad()` on one rank",
    "Error everywhere. On all ranks: as in torch; with `shard`, an error.",
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", [False, True])
@on_ranks(2)
def test_zero_grad_forgotten_on_one_rank(clip: bool, set_to_none: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(5):
            if rank == 0 or step != 3:
                model.zero_grad(set_to_none)
            loss_of(model, rank, step).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    with attached(optimizer, model) as reducer:
        with pytest.raises(RuntimeError, match=r"rank 1 added this backward\(\) to gradients"):
            run()
        assert reducer.stats()["steps"] == 3


@on_ranks(2)
def test_zero_grad_forgotten_on_all_ranks_is_as_in_torch() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


# Frozen and new parameters, parameters that drift


@pytest.mark.behavior("Ranks that differ", "freeze, remove, add or replace parameters on one rank", "Error everywhere.")
@on_ranks(2, 3)
def test_a_layer_frozen_on_one_rank() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        train(model, optimizer, range(2), lambda _: None)
        with pytest.raises(RuntimeError, match="parameter '2.weight' is frozen .* on rank 1, and trained on rank"):
            train(model, optimizer, range(2, 8), lambda _: dist.get_rank() == 1 and model[2].requires_grad_(False))


@on_ranks(2)
def test_a_layer_frozen_on_all_ranks_is_right() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        train(model, optimizer, range(6), lambda step: model[2].requires_grad_(step % 3 != 1))
        assert_replicas_equal(model)


@pytest.mark.behavior("Ranks that differ", "freeze, remove, add or replace parameters on one rank", "Error everywhere.")
@pytest.mark.parametrize("what", ["a parameter", "a group"])
@on_ranks(2, 3)
def test_parameters_removed_on_one_rank(what: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], 0.1)

    def remove(_: int) -> None:
        if dist.get_rank() != 1:
            return
        if what == "a group":
            del optimizer.param_groups[1]
        else:
            optimizer.param_groups[1]["params"].pop(0)

    with attached(optimizer, model):
        train(model, optimizer, range(2), lambda _: None)
        with pytest.raises(RuntimeError, match="parameter '2.weight' is no longer in the optimizer on rank 1"):
            train(model, optimizer, range(2, 3), remove)


def added(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(5, 5).double())
    optimizer.add_param_group({"params": list(model[-1].parameters())})


@pytest.mark.behavior("Ranks that differ", "freeze, remove, add or replace parameters on one rank", "Error everywhere.")
@pytest.mark.parametrize("over_hosts", [False, True])
@pytest.mark.parametrize("hooked", [True, False], ids=["forward", "no forward"])
@on_ranks(2)
def test_a_group_added_on_one_rank(hooked: bool, over_hosts: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    run = model if hooked else lambda x: nn.functional.linear(model[:-1](x), model[-1].weight, model[-1].bias)

    def steps() -> None:
        for step in range(4):
            optimizer.zero_grad()
            if rank == 1 and step == 2:
                added(model, optimizer)
            x, y = batch_of(rank, step)
            (run(x) - y).square().mean().backward()
            optimizer.step()

    with over_tcp(over_hosts), attached(optimizer, model):
        with pytest.raises(RuntimeError, match="new parameter, '5.weight', on rank 1"):
            steps()


@pytest.mark.behavior(
    "Ranks that differ",
    "write to a parameter, or load a model, on one rank",
    "Error in the next reduction if the model is small or all parameters changed; otherwise within 64.",
)
@on_ranks(2)
def test_a_parameter_written_on_one_rank_is_found_soon() -> None:
    """Before the next step, as the model is small; and a rate is not taken for a flipped bit."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), nn.Linear(4, 2).double()
    optimizer, step = sgd(model), 0

    def run() -> None:
        nonlocal step
        for step in range(40):
            optimizer.zero_grad()
            if rank == 1 and step == 9:
                model.weight.data.mul_(0.9)
            model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()

    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match=r"replicas differ after 9 reductions.*Something updates them"):
            run()
        assert step == 9

"""Bits that flip in parameters, averaged gradients and the state of compression: found, named, left behind."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.training.reducer.buckets import state_of
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, grouped, make_equal
from tests.reducer.models import loss_of, make_model, sgd

STATEFUL = [pycomm.TopK(0.1), pycomm.DGC(0.1, momentum=0.9), pycomm.PowerSGD(2), pycomm.OneBit()]
METHODS = [
    *(
        None,
        pycomm.FP16(),
        pycomm.BF16(),
        pycomm.RandomK(0.1),
        pycomm.Int8(),
        pycomm.QSGD(4),
        pycomm.TernGrad(),
        "auto",
    ),
    *STATEFUL,
]
VICTIM = 1


def flip(tensor: torch.Tensor, element: int = 3, bit: int = 12) -> None:
    """Flip one bit of a float32 tensor, as a fault would: no version counter changes."""
    tensor.detach().view(-1).view(torch.int32).numpy()[element] ^= 1 << bit


class Training:
    """Training of a small model on this rank."""

    def __init__(self, compression: Any, **options: Any) -> None:
        self.rank = dist.get_rank()
        self.model = make_model(dtype=torch.float32)
        self.optimizer = sgd(self.model)
        self.scaler = options.get("loss_scaler")
        self.reducer = pycomm.attach(
            self.optimizer, self.model, compression=compression, **grouped(timeout=30, **options)
        )
        self.steps = 0

    def step(self, between: Callable[[], None] = lambda: None, overflow: bool = False) -> None:
        """Make a step; ``between`` is called after backward."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.rank, self.steps)
        if overflow and self.rank == VICTIM:
            loss = loss * float("inf")
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        between()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.steps += 1

    def until_found(self, most: int = 20) -> pycomm.CommError:
        """Train on until an error is raised, and return it."""
        try:
            while self.steps < most:
                self.step()
        except pycomm.CommError as error:
            return error
        raise AssertionError("nothing was found")

    def state(self, key: str) -> tuple[str, torch.Tensor]:
        """Return the name of a parameter and its state, once that has been looked at."""
        self.reducer._communicator.channel.submit(lambda: None).wait()
        return next((n, entry[key]) for n, entry in state_of(self.reducer._table.buckets).items() if key in entry)

    def bits(self) -> bytes:
        return pickle.dumps([p.detach().numpy().tobytes() for p in self.model.parameters()])


@on_ranks(2, 3, 4)
def test_a_bit_of_a_parameter() -> None:
    training = Training(None, check_replicas=4)
    for _ in range(5):
        training.step()
    if training.rank == VICTIM:
        flip(training.model[2].weight)
    check_found(training, training.until_found(), "2.weight")


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "let a bit flip in a parameter or average",
    "`CommError` that names the outvoted rank; with `survive`, the others continue.",
)
@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.1), pycomm.PowerSGD(2)], ids=repr)
@on_ranks(2, 3, 4)
def test_a_bit_of_an_averaged_gradient(compression: Any) -> None:
    training = Training(compression, check_replicas=4)
    for _ in range(4):
        training.step()
    training.step(lambda: flip(training.model[2].weight.grad, bit=28) if training.rank == VICTIM else None)
    check_found(training, training.until_found(), "2.weight")


def check_found(training: Training, error: pycomm.CommError, name: str) -> None:
    """It was found in the next reduction; and the victim named by three and more."""
    says = str(error)
    assert training.steps == 5
    assert f"the replicas differ after 5 reductions: parameter '{name}' " in says
    assert "Only 1 of their elements differs, as after a flipped bit" in says
    assert error.operation == "backward"
    if dist.get_world_size() == 2:
        assert error.peer is None
        assert "differs between rank 0 and rank 1" in says
        assert "One of ranks 0, 1 is wrong" in says
    else:
        assert error.peer == VICTIM
        assert f"on rank {VICTIM} differs from the other ranks" in says
    make_equal(training.model)  # nothing else is amiss
    training.step()
    assert_replicas_equal(training.model)
    training.reducer.detach()


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`... is not what the last step left there`",
    "Bits of a residual flipped, or other code wrote them. Replace the machine; load a checkpoint.",
)
@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("compression", "key"),
    [
        *((STATEFUL[0], "residual"), (STATEFUL[1], "velocity"), (STATEFUL[1], "residual")),
        *((STATEFUL[2], "residual"), (STATEFUL[2], "q"), (STATEFUL[3], "residual")),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
@pytest.mark.parametrize("interval", [1, 4])
@on_ranks(2, 3)
def test_a_bit_of_the_state_of_compression(compression: Any, key: str, interval: int) -> None:
    training = Training(compression, check_replicas=interval)
    for _ in range(8):
        training.step()
    name, tensor = training.state(key)
    if training.rank == VICTIM:
        flip(tensor, element=0)
    error = training.until_found()
    assert training.steps == 8
    assert error.peer == VICTIM
    assert f"the {key} of parameter {name!r} on rank {VICTIM} is not what the last step left there" in str(error)
    for _ in range(3):  # it was said once; who knows better may go on
        training.step()
    training.reducer.detach()


@pytest.mark.parametrize("interval", [1, 4])
@on_ranks(2)
def test_a_bit_of_all_ranks_state(interval: int) -> None:
    """No rank's bit differs from the others' then."""
    training = Training(pycomm.TopK(0.1), check_replicas=interval)
    for _ in range(4):
        training.step()
    name, residual = training.state("residual")
    flip(residual)
    says = str(training.until_found())
    assert f"the residual of parameter {name!r} on rank 0, the residual of parameter {name!r} on rank 1 is not" in says
    assert training.steps == 4
    training.reducer.detach()


def left_behind(compression: Any, what: str) -> tuple[str, int, tuple[int, ...], bytes]:
    training = Training(compression, check_replicas=4, on_failure="shrink")
    for _ in range(8):
        training.step()
    tensor = training.model[2].weight if what == "parameter" else training.state(what)[1]
    if training.rank == VICTIM:
        flip(tensor)
    says = ""
    try:
        while training.steps < 20:
            training.step()
    except pycomm.CommError as error:
        says = str(error)
        if error.peer is None:
            make_equal(training.model)
            training.step()
        else:
            with pytest.raises(RuntimeError, match="no longer takes part after an earlier error: .* on rank 1 "):
                training.step()
    world, bits = training.reducer.world, training.bits()
    fates = [recovery["left"] for recovery in training.reducer.stats()["recoveries"]]
    assert fates == ([] if says else [{VICTIM: "is damaged"}]), fates
    training.reducer.detach()
    return says, training.steps, world, bits


@pytest.mark.parametrize(
    ("compression", "what", "size"),
    [
        *((None, "parameter", 2), (None, "parameter", 3), (pycomm.TopK(0.1), "parameter", 4)),
        *((pycomm.TopK(0.1), "residual", 2), (pycomm.TopK(0.1), "residual", 3)),
        *((pycomm.DGC(0.1, momentum=0.9), "velocity", 3), (pycomm.PowerSGD(2), "residual", 4)),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_the_damaged_rank_is_left_behind(new_ranks: Pools, compression: Any, what: str, size: int) -> None:
    found = new_ranks(size).run(left_behind, compression, what)
    if (what, size) == ("parameter", 2):
        assert all("One of ranks 0, 1 is wrong" in says and steps == 9 for says, steps, *_ in found)
        return
    says, steps, _, spoiled = found.pop(VICTIM)
    assert f"on rank {VICTIM} " in says
    assert steps == 8
    for says, steps, world, bits in found:
        assert (says, steps) == ("", 20)
        assert world == tuple(rank for rank in range(size) if rank != VICTIM)
        assert bits == found[0][3] != spoiled


@pytest.mark.parametrize("compression", METHODS, ids=repr)
@on_ranks(2)
def test_no_false_alarm(compression: Any) -> None:
    """Nothing is found in 50 steps, nor after state was loaded, nor after steps that overflow."""
    scaler = pycomm.LossScaler(2.0**8)
    training = Training(compression, check_replicas=1, loss_scaler=scaler)
    for step in range(50):
        training.step(overflow=step % 7 == 3)
        if step % 9 == 4:
            saved = training.reducer.state_dict()
        if step % 9 == 6:
            training.reducer.load_state_dict(saved)
    assert scaler.skipped_steps == 7
    assert_replicas_equal(training.model)
    training.reducer.detach()


def go_on_without(compression: Any, leaver: int) -> tuple[str, int]:
    training = Training(compression, check_replicas=1, on_failure="shrink")
    for _ in range(50):
        if training.rank == leaver and training.steps == 20:
            training.reducer.detach()
            return "left", 20
        training.step()
    assert training.reducer.world == tuple(rank for rank in range(3) if rank != leaver)
    training.reducer.detach()
    return training.bits().hex(), training.steps


@pytest.mark.parametrize("compression", [None, *STATEFUL], ids=repr)
def test_no_false_alarm_among_those_that_are_left(new_ranks: Pools, compression: Any) -> None:
    first, (says, _), last = new_ranks(3).run(go_on_without, compression, 1)
    assert says == "left"
    assert first == last
    assert first[1] == 50

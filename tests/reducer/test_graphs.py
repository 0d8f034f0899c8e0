"""Steps in a CUDA graph, without a GPU: each launch repeats one step's operations on the same memory.

The ranks pretend that CPU memory is a GPU's, as in test_gpu_path.py, which has the methods.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm.training.reductions.replicas import Hashes
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, own_state
from tests.reducer.models import batch_of, make_model
from tests.reducer.recorded import RecordedStep, RecordedTraining, unseen_references
from tests.reducer.test_gpu_path import METHODS, pretended_gpu

WARM_UP, LAUNCHES, LATER = 4, 5, 3


def train(compression: Any, dtype: torch.dtype, step: RecordedStep | None) -> dict[str, torch.Tensor]:
    """Train, with the steps after the warm-up in a graph if there is a ``step`` to record; return what is left."""
    model = make_model(dtype=dtype)
    training = RecordedTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch_of(0, 0, dtype))
    left: dict[str, torch.Tensor] = {}
    with (
        pretended_gpu(),
        unseen_references(),
        attached(training.optimizer, model, compression=compression, bucket_mb=0.002) as reducer,
    ):
        for index in range(WARM_UP + LAUNCHES + LATER):
            training.load(batch_of(dist.get_rank(), index, dtype))
            if step is None or index < WARM_UP or index >= WARM_UP + LAUNCHES:
                training.step()
            elif index == WARM_UP:
                with step.recording():
                    training.step()
            else:
                step.launch()
            left |= {f"{name} after step {index}": p.detach().clone() for name, p in model.named_parameters()}
        training.load(batch_of(dist.get_rank(), 0, dtype))
        (training.step if step is None else step.launch)()  # ordinary steps have moved nothing that a graph reads
        state = own_state(reducer)
        left |= {f"{key} of {name}": value for name, entry in state.items() for key, value in entry.items()}
        left |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return left


def require_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=f"{name} differs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_a_graph_does_what_its_step_did(method: str, dtype: torch.dtype) -> None:
    """To the bit, with what earlier launches left; ordinary steps and launches may take turns."""
    require_same(train(METHODS[method], dtype, RecordedStep()), train(METHODS[method], dtype, None))


@on_ranks(2)
def test_ordinary_steps_do_not_move_gradients_that_a_graph_writes() -> None:
    model = make_model()
    training = RecordedTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch_of(0, 0))
    parameter = next(model.parameters())
    with pretended_gpu(), attached(training.optimizer, model, bucket_mb=0.002):
        for _ in range(WARM_UP):
            training.step()
        with unseen_references(), RecordedStep().recording():
            training.step()
        assert parameter.grad is not None
        address, kept, derived = parameter.grad.data_ptr(), parameter.grad, parameter.grad.flatten()
        before = kept.clone()
        training.load(batch_of(dist.get_rank(), 1))
        training.step()
        assert parameter.grad.data_ptr() == address
        torch.testing.assert_close(kept, before, rtol=0, atol=0)
        torch.testing.assert_close(derived, parameter.grad.flatten(), rtol=0, atol=0)  # follows, as under launches


@on_ranks(2)
def test_bits_made_while_capturing_are_forgotten() -> None:
    """A graph's tensors have values only while it runs: nothing that is launched later may read them."""
    x = [("a", torch.ones(4)), ("b", torch.zeros(3))]
    hashes, wanted = (Hashes(torch.device("cpu"), 22) for _ in range(2))
    model = make_model()
    with attached(torch.optim.SGD(model.parameters(), lr=0.1), model) as reducer:
        fingerprint = reducer._engine.comparison.fingerprint
        before = fingerprint._read().clone()
        with pytest.MonkeyPatch.context() as context:
            context.setattr(torch.cuda, "is_initialized", lambda: True)
            context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            hashes.bits(x)
            fingerprint._read().zero_()
        hashes._weights.zero_()
        assert torch.equal(hashes.bits(x), wanted.bits(x))
        assert torch.equal(fingerprint._read(), before)

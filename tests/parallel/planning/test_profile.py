"""Profiles: bytes and FLOPs of layers against formulas, and against what a run with memory really keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pycomm.parallel.auto import styles_of
from pycomm.parallel.planning.candidates import Part, measure_device, with_seconds
from pycomm.parallel.planning.profile import make_without_memory, profile, shared_parameter, units
from pycomm.tools.cli.demo.model import ByteGPT, loss_of


def make_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 5))


def make_gpt() -> ByteGPT:
    return ByteGPT(64, 2, 32, 4)


def text_of(samples: int) -> torch.Tensor:
    return torch.zeros(samples, 32, dtype=torch.long)


def loss(output: torch.Tensor) -> torch.Tensor:
    return loss_of(output, torch.zeros(output.shape[:2], dtype=torch.long))


def test_a_perceptron_by_hand() -> None:
    samples = 7
    first, relu, second = profile(make_mlp, lambda count: torch.zeros(count, 10)).at(samples)
    assert [each.modules for each in (first, relu, second)] == [("0",), ("1",), ("2",)]
    assert first.parameters == first.trainable == Part(4 * (10 * 100 + 100))
    assert second.count == Part(100 * 5 + 5)
    # Linear keeps its input; ReLU its output, which the next Linear keeps as well.
    assert [each.activations.total for each in (first, relu, second)] == [4 * 10 * samples, 4 * 100 * samples, 0]
    assert (relu.keeps_output, first.keeps_output, first.output_kept) == (True, False, False)
    assert [each.output for each in (first, relu, second)] == [400 * samples, 400 * samples, 20 * samples]
    assert [each.forward.total for each in (first, relu, second)] == [2 * 1000 * samples, 0, 2 * 500 * samples]
    # The first layer's input needs no gradient.
    assert [each.backward.total for each in (first, relu, second)] == [2 * 1000 * samples, 0, 4 * 500 * samples]


def test_what_is_divided_in_a_perceptron() -> None:
    samples = 4
    found = profile(make_mlp, lambda count: torch.zeros(count, 10), split={"0": "columns", "2": "rows"})
    first, relu, second = found.at(samples)
    assert first.parameters == Part(0, 4400)
    assert second.parameters == Part(4 * 5, 4 * 500)  # the bias of a layer that is split by rows is whole
    assert first.activations == Part(4 * 10 * samples, 0)
    assert relu.activations == Part(0, 4 * 100 * samples)
    assert relu.inside
    assert (first.forward, second.forward) == (Part(0, 8000), Part(0, 4000))
    assert first.reduced_backward == (4.0 * 10 * samples,)
    assert second.reduced_forward == (4.0 * 5 * samples,)
    assert first.parameters.over(4) == 1100
    alone = profile(make_mlp, lambda count: torch.zeros(count, 10), split={"0": "columns"}).at(samples)
    assert alone[1].activations == Part(4 * 100 * samples, 0)  # what it returns is gathered
    assert alone[0].reduced_forward == (200.0 * samples,)


class _Kept:
    """Bytes of storages that are really saved for the backward pass, besides a model's own."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._storages: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._tensors.append(tensor)
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def total(self) -> int:
        return sum(self._storages.values())


def make_convolutions() -> nn.Sequential:
    norm, pool = nn.BatchNorm2d(8), nn.MaxPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(8 * 64, 10))


@pytest.mark.parametrize(
    ("make", "batch", "criterion"),
    [
        (make_gpt, text_of, loss),
        (make_mlp, lambda count: torch.randn(count, 10), torch.sum),
        (make_convolutions, lambda count: torch.randn(count, 3, 16, 16), torch.sum),
        (lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True), lambda n: torch.randn(n, 8, 32), torch.sum),
    ],
    ids=["gpt", "perceptron", "convolutions", "encoder"],
)
def test_activations_are_those_that_are_kept(
    make: Callable[[], nn.Module], batch: Callable[[int], torch.Tensor], criterion: Callable[[Any], torch.Tensor]
) -> None:
    """Also for a number of samples that was not traced, since all is in proportion to it."""
    found = profile(make, batch, criterion)
    for samples in (2, 5):
        model = make()
        kept = _Kept(model)
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            total = criterion(model(batch(samples)))
        layers = found.at(samples)
        # Loss functions may keep a scalar or two.
        assert sum(layer.activations.total for layer in layers) == pytest.approx(kept.total(), rel=1e-3)
        assert sum(layer.parameters.total for layer in layers) == sum(p.nbytes for p in model.parameters())
        del total


def test_layers_of_a_transformer() -> None:
    model = make_without_memory(make_gpt)
    found = profile(make_gpt, text_of, loss, styles_of(model, 2))
    layers = found.at(4)
    assert [layer.modules for layer in layers] == [
        ("byte_embedding", "position_embedding"),  # of which only the weight is used
        ("blocks.0",),
        ("blocks.1",),
        ("norm",),
        ("head",),
    ]
    block, tokens, width = layers[1], 4 * 32, 64
    linear = 2 * tokens * width * (3 + 1 + 4 + 4) * width
    attention = 2 * 2 * 4 * 4 * 32 * 32 * (width // 4)
    assert block.forward.total == linear + attention
    assert block.backward.total == pytest.approx(2 * linear + 2.5 * attention)
    if "blocks.0.mlp_in" in found.split:
        assert block.parameters.split >= 4 * 2 * 4 * width * width
        assert block.reduced_forward[-1] == 4 * tokens * width
    whole = profile(make_gpt, text_of, loss).at(4)
    for divided, undivided in zip(layers, whole, strict=True):
        for name in ("parameters", "activations", "forward", "backward"):
            assert getattr(divided, name).total == pytest.approx(getattr(undivided, name).total)


class _Wrapper(nn.Module):
    """Model in a model, with a parameter of its own, and a layer that it runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inner["b"](x * self.scale)
        return {"out": self.inner["a"](self.frozen(self.inner["b"](x)))}


def test_models_of_other_forms() -> None:
    layers = profile(_Wrapper, lambda count: (torch.zeros(count, 3),)).at(2)
    assert [layer.name for layer in layers] == ["inner.b", "frozen", "inner.a"]  # in the order in which they run
    assert layers[0].count.total == 3 + 12
    assert layers[0].forward.total == 2 * (2 * 2 * 9)
    assert (layers[1].parameters.total, layers[1].trainable.total) == (48, 0)
    assert list(units(nn.Linear(2, 2))) == [""]
    (layer,) = profile(lambda: nn.Linear(2, 3), lambda count: torch.zeros(count, 2)).at(4)
    assert layer.forward.total == 2 * 4 * 6


def test_shared_parameters_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    assert shared_parameter(model) is None
    model[2].weight = model[0].weight
    assert shared_parameter(model) == ("0", "2")


def test_measured_seconds_take_the_place_of_flops() -> None:
    found = profile(make_mlp, lambda count: torch.zeros(count, 10), split={"0": "columns", "2": "rows"})
    timed = with_seconds(found, 8, [(1.0, 2.0), (0.5, 0.5), (3.0, 4.0)])
    assert timed.measured
    first, relu, second = timed.at(4)
    assert first.forward.whole == 0
    assert first.forward.split == pytest.approx(0.5)
    assert relu.backward.split == pytest.approx(0.25)  # between the two, so divided as they are
    assert second.backward.total == pytest.approx(2.0)
    assert first.activations == found.at(4)[0].activations


class _Reads(nn.Linear):
    """Layer that looks at values, which tensors without memory have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class _Counts(nn.Module):
    """Model that runs another layer for larger batches."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) if len(x) < 3 else self.large(x)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, 2)


def _raise(*_: object) -> Any:
    raise RuntimeError("first line\nsecond line")


@pytest.mark.parametrize(
    ("make", "batch", "criterion", "says"),
    [
        (_raise, zeros, None, "make_model() failed: RuntimeError: first line"),
        (lambda: 3, zeros, None, "what make_model() returns is a int, wanted a Module"),
        (nn.ReLU, zeros, None, "what make_model() returns has no parameters that are trained"),
        (lambda: nn.Linear(2, 2), _raise, None, "make_batch(2) failed: RuntimeError"),
        (lambda: nn.Linear(2, 2), lambda count: None, None, "make_batch(2) returns None, wanted a tensor"),
        (lambda: nn.Linear(2, 2), lambda count: zeros(5), None, "make_batch(2) returns [5, 2], wanted 2 samples"),
        (lambda: nn.Linear(3, 2), zeros, None, "the model cannot be traced without values, with a batch of 2"),
        (lambda: _Reads(2, 2), zeros, None, "the model cannot be traced without values"),
        (lambda: nn.Linear(2, 2), zeros, lambda out: out, "loss returns"),
        (lambda: nn.Linear(2, 2), zeros, lambda out: 3.0, "loss returns 3.0, wanted a tensor with one element"),
        (_Counts, zeros, None, "the model runs other layers for a batch of 4 than for one of 2"),
        (lambda: nn.Linear(2, 2), lambda count: (zeros(count),) * 2, None, "the model cannot be traced"),
    ],
)
def test_models_that_cannot_be_traced(make: Any, batch: Any, criterion: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        profile(make, batch, criterion)
    assert "second line" not in str(caught.value)


def test_this_machine_has_a_speed() -> None:
    device = measure_device()
    assert 1e6 < device.flops < 1e17
    assert 1e6 < device.bandwidth < 1e15

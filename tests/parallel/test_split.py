"""Tests of split models: equal to one process, whatever is split; and refusals on every rank."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from pycomm import parallel
from pycomm.parallel.styles import PART, SHARDED, WHOLE, layouts_of
from tests.backend.worlds import on_world
from tests.parallel.models import MODELS, Attention, D, GatedMLP, Words, assert_equal, make, random, train, whole, words


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.parametrize("name", MODELS)
@on_world(2)
def test_what_auto_splits_equals_one_process(name: str) -> None:
    wanted = train(*make(name))
    model, x = make(name, seed=dist.get_rank())  # the first rank's parameters count
    mesh = parallel.mesh(tp=dist.get_world_size())
    assert parallel.split(model, mesh, "auto") is model
    assert any(isinstance(param, DTensor) for param in model.parameters())
    assert_equal(train(model, x), wanted)


EXPLICIT: list[tuple[str, dict[str, Any]]] = [
    ("perceptron", {"0": "columns"}),
    ("perceptron", {"2": "rows"}),
    ("perceptron", {"0": "columns", "2": "columns", "4": "rows"}),
    ("perceptron", {"0": ColwiseParallel(output_layouts=Replicate())}),
    ("gated", {"norm": "sequence", "*_proj": "columns"}),
    ("gated", {"gate_proj": "columns", "down_proj": "rows"}),
    ("attention", {"0.norm": "sequence", "0.v_proj": "rows", "0.out_proj": "columns"}),
    ("gpt", {"blocks.*.query_key_value": "columns", "blocks.*.attention_out": "rows", "norm": "sequence"}),
    ("gpt", {"byte_embedding": "columns", "head": "rows"}),
    ("convolutions", {"0.0": "rows", "0.3": "columns", "3.0": "rows", "3.3": "columns", "3.4": "rows"}),
    ("words", {"embedding": "vocabulary", "head": "vocabulary"}),
]


@pytest.mark.parametrize(("name", "plan"), EXPLICIT, ids=[f"{name}-{'-'.join(plan)}" for name, plan in EXPLICIT])
@on_world(2)
def test_any_layer_alone_equals_one_process(name: str, plan: dict[str, Any]) -> None:
    wanted = train(*make(name))
    model, x = make(name, seed=dist.get_rank())
    parallel.split(model, parallel.mesh(tp=2), plan)
    assert_equal(train(model, x), wanted)


@pytest.mark.parametrize("plan", [{"": "columns"}, {"": "rows"}, "auto"], ids=str)
@on_world(2)
def test_a_single_layer(plan: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(260, 256).to(D)
    reference, x = copy.deepcopy(layer), random(3, 260)
    assert parallel.split(layer, parallel.mesh(tp=2), plan) is layer
    assert isinstance(layer.weight, DTensor)
    assert_equal(train(layer, x), train(reference, x))


@on_world(3)
def test_uneven_vocabularies_and_sequences() -> None:
    torch.manual_seed(0)
    model = Words(13, tied=False).to(D)
    reference, x = copy.deepcopy(model), words(13, 2, 4)
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pycomm")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    parallel.split(model, parallel.mesh(tp=3), {"embedding": "vocabulary", "head": "vocabulary"})
    log.removeHandler(listener)
    begins = f"[pycomm rank {dist.get_rank()}] split"
    assert told == [
        f"{begins}: embedding: 13 entries on 3 devices, padded to 5 on each while they travel",
        f"{begins}: head: 13 output features on 3 devices, padded to 5 on each while they travel",
    ]
    assert_equal(train(model, x), train(reference, x))
    torch.manual_seed(0)
    gated = GatedMLP().to(D)
    reference_too = copy.deepcopy(gated)
    parallel.split(gated, parallel.mesh(tp=3), {"norm": "sequence", "up_proj": "columns"})
    assert_equal(train(gated, random(2, 4, 8)), train(reference_too, random(2, 4, 8)))


@on_world(2)
def test_parts_are_parts() -> None:
    model, _ = make("words")
    wanted = {name: each.detach().clone() for name, each in model.named_parameters()}
    mesh = parallel.mesh(tp=2)
    parallel.split(model, mesh)
    words_model: Any = model
    assert words_model.embedding.weight is words_model.head.weight  # still one parameter
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), wanted[name])
    split = {"embedding.weight", "body.0.weight", "body.0.bias", "body.2.weight"}
    for name, param in model.named_parameters():
        local: Any = param.to_local() if isinstance(param, DTensor) else param
        assert local.numel() * (2 if name in split else 1) == param.numel()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(words(12, 2, 5)), model(words(12, 2, 5)))


@on_world(2)
def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    parallel.split(model, parallel.mesh(tp=2))
    weight: Any = model[0].weight
    assert weight.is_meta
    assert weight.to_local().shape == (3, 4)


class Bottleneck(nn.Module):
    """Layers with a norm between them, in whichever order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 4)


def test_layouts_follow_their_rule() -> None:
    pair = {"up": "columns", "down": "rows"}
    gated = {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}
    assert layouts_of(GatedMLP(), gated) == dict.fromkeys(gated, SHARDED)
    assert layouts_of(Bottleneck(), pair) == dict.fromkeys(pair, WHOLE)
    attention = {f"{key}_proj": "columns" for key in "qkv"} | {"out_proj": "rows"}
    assert layouts_of(Attention(), attention) == dict.fromkeys(attention, SHARDED)
    assert layouts_of(Attention(), {"q_proj": "columns"}) == {"q_proj": WHOLE}
    gpt, _ = make("gpt")
    fused = {"blocks.0.query_key_value": "columns", "blocks.0.attention_out": "rows"}
    assert layouts_of(gpt, fused) == dict.fromkeys(fused, WHOLE)
    stack = nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Sequential(nn.Flatten(), nn.Linear(16, 4)))
    assert layouts_of(stack, {"0": "columns", "2.1": "rows"}) == {"0": PART, "2.1": PART}
    for between in (nn.Softmax(-1), nn.LayerNorm(4), nn.MaxPool1d(1), nn.Flatten(0)):
        chain = nn.Sequential(nn.Linear(4, 4), between, nn.Linear(4, 4))
        assert layouts_of(chain, {"0": "columns", "2": "rows"}) == {"0": WHOLE, "2": WHOLE}


REFUSED: list[tuple[nn.Module, Any, str]] = [
    (nn.Linear(2, 2), {"up": "columns"}, "'up' matches no module"),
    (GatedMLP(), {"up_proj": "diagonals"}, "style of 'up_proj' is 'diagonals'"),
    (GatedMLP(), {"*_proj": "columns", "up_*": "rows"}, "'up_proj' is given two styles: 'columns' and 'rows'"),
    (GatedMLP(), {"norm": "columns"}, "'norm' is a RMSNorm, which 'columns' does not fit"),
    (
        nn.Sequential(nn.Linear(4, 3)),
        {"0": "columns"},
        "has 3 output features, which 2 devices cannot share evenly",
    ),
    (nn.Sequential(nn.Conv1d(3, 4, 1)), {"0": "rows"}, "'0' has 3 input channels"),
    (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), {"0": "columns"}, "'0' has 2 groups"),
    (nn.Sequential(nn.Embedding(4, 4)), {"0": "rows"}, "'0' is a Embedding, which 'rows' does not fit"),
    (nn.Sequential(nn.Embedding(4, 4, padding_idx=0)), {"0": "vocabulary"}, "'0' has a padding_idx"),
    (nn.Sequential(nn.MultiheadAttention(4, 2)), {"0.out_proj": "rows"}, "run by nn.MultiheadAttention"),
    (nn.Sequential(nn.LayerNorm((2, 2))), {"0": "sequence"}, "over the last dimension alone"),
    (Words(), {"embedding": "columns"}, "are one parameter"),
    (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), {"0": "columns"}, "is parametrized"),
    (nn.Sequential(nn.Linear(3, 3)), "auto", "finds no layer to split .0: "),
    (nn.Linear(2, 2), "auto", r'for the model itself write split.model, mesh, ."": "columns".'),
    (
        nn.Linear(2, 2),
        {"weight": "columns"},
        'matches no module; there are none but the model itself, whose name is ""',
    ),
    (nn.Linear(2, 2), {"*": "columns"}, "matches no module"),
    (nn.Linear(2, 2), "automatic", "plan is 'automatic', wanted 'auto' or a mapping"),
]


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "split grouped convolutions, or layers inside `nn.MultiheadAttention`",
    "`ValueError` everywhere.",
)
@on_world(2)
def test_wrong_plans_are_refused_on_every_rank() -> None:
    mesh, rank = parallel.mesh(tp=2), dist.get_rank()
    for model, plan, told in REFUSED:
        for on_every_rank in (True, False):
            right = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
            mine = (model, plan) if on_every_rank or rank == 1 else (right, {"0": "columns"})
            quoted = told if on_every_rank or rank == 1 else "rank 1 could not split the model: "
            with pytest.raises(ValueError, match=quoted):
                parallel.split(mine[0], mesh, mine[1])
            assert not any(isinstance(param, DTensor) for param in right.parameters())
    chain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="disagree: style 0 is '0: rows' on rank 1, '0: columns' on rank 0"):
        parallel.split(chain, mesh, {"0": "rows" if rank else "columns"})
    with pytest.raises(ValueError, match="disagree: parameter 0 is 'weight: .2, 3. torch.float32' on rank 1"):
        parallel.split(nn.Linear(2 + rank, 2), mesh, {})
    with pytest.raises(TypeError, match="plan is a int"):
        parallel.split(chain, mesh, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh is a int"):
        parallel.split(chain, 2, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted one of them to be 'tp'"):
        parallel.split(chain, parallel.mesh(pp=1, dp=2), {})
    parallel.split(chain, mesh, {"0": "columns"})
    with pytest.raises(ValueError, match="'0' is split already"):
        parallel.split(chain, mesh, {"0": "columns"})

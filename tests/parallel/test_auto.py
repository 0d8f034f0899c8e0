"""Tests of styles that are found without being told, and of the reasons for what stays whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pycomm.parallel import auto
from pycomm.parallel.styles import STYLES
from tests.parallel.models import Attention, GatedMLP, make


def styles_of(model: nn.Module, devices: int) -> dict[str, str]:
    """Return the style of each module that is split."""
    return {name: style for name, style in auto.explain(model, devices).items() if style in STYLES}


class MaskedAttention(Attention):
    """Attention that may be given a mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if mask is None else x


def test_transformer_blocks() -> None:
    model = nn.Sequential(Attention(), GatedMLP())
    assert styles_of(model, 2) == {
        **{f"0.{key}_proj": "columns" for key in "qkv"},
        "0.out_proj": "rows",
        "1.gate_proj": "columns",
        "1.up_proj": "columns",
        "1.down_proj": "rows",
    }


def test_the_byte_level_gpt() -> None:
    gpt, _ = make("gpt")
    block = {"query_key_value": "columns", "attention_out": "columns", "mlp_in": "columns", "mlp_out": "rows"}
    assert styles_of(gpt, 2) == {
        **{f"blocks.{i}.{key}": style for i in range(2) for key, style in block.items()},
        "byte_embedding": "vocabulary",
        "head": "vocabulary",
    }
    assert "no head predicts" in auto.explain(gpt, 2)["position_embedding"]


def test_stacks() -> None:
    stack, _ = make("convolutions")
    assert styles_of(stack, 2) == {"0.0": "columns", "0.3": "rows", "0.5": "columns", "3.0": "rows"} | {
        "3.3": "columns",
        "3.4": "rows",
    }
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 8))
    assert styles_of(large, 4) == {"0": "columns"}
    assert "no partner, and only 4104 parameters" in auto.explain(large, 4)["2"]


def test_heads_that_do_not_divide_leave_the_attention_whole() -> None:
    attention = Attention(num_heads=4)
    styles, reasons = styles_of(attention, 8), auto.explain(attention, 8)
    assert styles == {}
    assert reasons["q_proj"] == "stays whole: 4 heads (4 of keys) do not divide by 8 devices"
    del attention.num_heads
    assert "tells the number of heads" in auto.explain(attention, 2)["k_proj"]
    masked = Attention()
    masked.register_buffer("mask", torch.ones(5, 5))
    assert "has buffers" in auto.explain(masked, 2)["v_proj"]
    assert "may be given mask" in auto.explain(MaskedAttention(), 2)["v_proj"]


def test_torchs_own_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    assert styles_of(layer, 2) == {"linear1": "columns", "linear2": "rows"}
    assert "computes with its weights directly" in auto.explain(layer, 2)["self_attn"]


def test_what_is_used_twice_stays_whole() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert styles_of(model, 2) == {}
    assert "used several times" in auto.explain(model, 2)["0"]


def test_nothing_is_split_over_one_device() -> None:
    assert styles_of(GatedMLP(), 1) == {}
    with pytest.raises(ValueError, match="devices is 0, wanted at least 1"):
        styles_of(GatedMLP(), 0)

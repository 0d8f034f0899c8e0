"""Attention on DTensors split by heads: what torch knows for GPUs, for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard


@functools.cache
def let_attention_be_split() -> None:
    """Tell DTensor how ``scaled_dot_product_attention`` on the CPU may be split: by heads, or by samples.

    Where torch cannot be told, or tells itself, nothing changes.
    """
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch < 2.6: attention over heads then says that it has no sharding strategy
        return
    forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if forward is not None and backward is not None:
        register_sharding(forward.default)(_forward)
        register_sharding(backward.default)(_backward)


_PLACEMENTS = (Shard(1), Shard(0), Replicate())  # tensors are (samples, heads, positions, features)


def _forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[Any]:
    mask = None if attn_mask is None else Replicate()
    return [([each] * 2, [*[each] * 3, None, None, mask, None]) for each in _PLACEMENTS]


def _backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[Any]:
    mask = None if attn_mask is None else Replicate()
    return [([each] * 3, [*[each] * 6, None, None, mask, None]) for each in _PLACEMENTS]

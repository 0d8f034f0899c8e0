"""Checks whether the gradients of parameters can be averaged, and whether something else steps or shards them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pycomm.collectives.layout import is_dense
from pycomm.collectives.tensor_memory import look_at, overlapping
from pycomm.torch_internals import is_flat_parameter, local_of, steps_in_backward

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of gradients that can be averaged."""


def check_parameters(names: Mapping[str, torch.Tensor], device: torch.device | None = None) -> None:
    """Raise TypeError or ValueError if a gradient cannot be sent, or a parameter is not on ``device``.

    Frozen parameters may be of any kind.
    """
    for name, param in names.items():
        _check_owner(name, param)
        if param.requires_grad:
            _check_memory(name, param)
            _check_dtypes(name, param)
        if param.device.type == "meta":
            continue
        if param.device.type not in ("cpu", "cuda"):
            raise ValueError(f"parameter {name!r} is on device {param.device}, wanted CPU or CUDA memory")
        device = device or param.device
        if param.device != device:
            raise ValueError(
                f"parameter {name!r} is on device {param.device}, others on {device}; wanted all parameters of a "
                "process on one device"
            )


def refuse_overlaps(
    moved: Mapping[str, torch.Tensor], call: str, others: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """Raise ValueError if one of ``moved``, which ``call`` moves, shares memory with another or with ``others``."""
    named = {id(tensor): (name, tensor) for name, tensor in [*others, *moved.items()]}
    ids, pairs = {id(param) for param in moved.values()}, list(named.values())
    for (name, tensor), (other, tied) in ((pairs[i], pairs[j]) for i, j in overlapping([t for _, t in pairs])):
        if {id(tensor), id(tied)} & ids:
            raise ValueError(
                f"{name!r} and {other!r} are two tensors in the same memory (tied by .data, or views of one), and "
                f"{call} takes each parameter alone, which would separate them: tie modules by one parameter object "
                "(decoder.weight = encoder.weight)"
            )


def _check_owner(name: str, param: torch.Tensor) -> None:
    """Raise TypeError or ValueError if something else shards or steps ``param``."""
    if is_flat_parameter(param):
        raise TypeError(
            f"parameter {name!r} is a flat parameter of FullyShardedDataParallel, of which each rank has a "
            "different shard: FSDP averages gradients itself; leave pycomm.attach out, or shard with FSDP2's "
            "fully_shard, whose replicas pycomm.ddp.register_hsdp averages"
        )
    if steps_in_backward(param):
        raise ValueError(
            f"parameter {name!r} is stepped in backward (_apply_optimizer_in_backward), before its gradient could be "
            "averaged: use an ordinary optimizer.step()"
        )


def _check_memory(name: str, param: torch.Tensor) -> None:
    """Raise TypeError or ValueError if trainable ``param`` is not backed by ordinary memory of this process."""
    kind = type(param).__name__
    memory = look_at(name, param, "parameter")
    local = local_of(param)
    if hasattr(local, "__tensor_flatten__"):
        raise TypeError(
            f"parameter {name!r} is a {kind}, wrapped around other tensors: wanted ordinary parameters, or DTensors of "
            "ordinary tensors"
        )
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        raise TypeError(f"parameter {name!r} is not laid out in ordinary memory ({memory.text}): wanted a dense one")
    if not memory.parts:
        raise TypeError(
            f"parameter {name!r}, a {kind} on device {param.device}, has no memory: wanted parameters that are "
            "materialised (module.to_empty(device=...), then initialized) and not freed"
        )
    if memory.text or not is_dense(local):
        raise ValueError(
            f"parameter {name!r} of shape {list(local.shape)} has gaps or overlaps in memory (strides "
            f"{list(local.stride())}): give the optimizer a parameter of its .contiguous() or .clone()"
        )


def _check_dtypes(name: str, param: torch.Tensor) -> None:
    """Raise TypeError if gradients of ``param`` have another dtype than it has, or one that cannot be averaged."""
    if param.dtype not in GRADIENT_DTYPES:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in GRADIENT_DTYPES)
        raise TypeError(f"parameter {name!r} has dtype {param.dtype}, wanted one of {wanted}")
    of_gradient = getattr(param, "grad_dtype", None)  # torch 2.10; None allows any
    if of_gradient not in (None, param.dtype):
        raise TypeError(
            f"parameter {name!r} has dtype {param.dtype} and grad_dtype {of_gradient}, wanted gradients in the dtype "
            "of the parameter: leave grad_dtype as it is; pycomm.master_weights(optimizer) steps float32 masters"
        )

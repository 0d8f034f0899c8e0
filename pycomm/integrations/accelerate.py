"""Accelerate: gradients averaged by pycomm, whichever way a model and its optimizer were prepared."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycomm.integrations.averaging import Averaging, averaging_of, library
from pycomm.torch_internals import uncompiled

_accelerate: Any = library("accelerate", whose="pycomm.integrations.accelerate")
_optimizer: Any = library("accelerate.optimizer", whose="pycomm.integrations.accelerate")

_attached: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many times :func:`attach` was called for an Accelerator: the numbers in names of files."""

_ELSEWHERE = {
    "FSDP": "FSDP shards parameters and averages gradients itself; pycomm.ddp.register_hsdp compresses the averages "
    "between replicas of FSDP2's shards, and dist.init_process_group('pycomm') carries all of it",
    "DEEPSPEED": "DeepSpeed averages gradients itself: leave pycomm out, or launch without DeepSpeed",
    "MEGATRON_LM": "Megatron-LM averages gradients itself: leave pycomm out, or launch without it",
}


def attach(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    compression: Any = None,
    **options: Any,
) -> Averaging:
    """Average the gradients of a model that is trained with Accelerate. Collective.

    Call it after ``accelerator.prepare``. If ``model`` was prepared, and is in a DistributedDataParallel therefore,
    this is :func:`pycomm.ddp.register`. If only the optimizer was, this is :func:`pycomm.attach`, and the model is
    prepared without a wrapper here: placed, under autocast, and part of ``save_state``. Either way
    ``accelerator.accumulate``, ``backward`` and ``clip_grad_norm_`` mean what they did, ragged last windows included,
    float16's scaler is known, and ``save_state`` and ``load_state`` keep what compression carries from step to step,
    in one file per rank: with such a method all ranks have to call ``save_state``, not the main process alone.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        model: as ``prepare`` returned it, or the module itself.
        optimizer: as ``prepare`` returned it. With several, call this once for each.
        compression: as for :func:`pycomm.attach`.
        options: further arguments of :func:`pycomm.ddp.register` (``algorithm``, ``timeout``) or, where the model was
            not prepared, of :func:`pycomm.attach`, except those that Accelerate answers: ``process_group``,
            ``accumulate``, ``loss_scaler``.

    Returns:
        The :class:`pycomm.integrations.averaging.Averaging`, whose ``inner`` is the handle or the Reducer. With one
        process that has no process group there is nothing to average, and ``inner`` is ``None``.

    Raises:
        TypeError: an argument is of the wrong kind or unknown.
        ValueError: the optimizer was not prepared, Accelerate is to compile a model that was not, or runs FSDP,
            DeepSpeed or Megatron-LM, something else averages these gradients already, or ranks differ (on every rank).
    """
    _check(accelerator, model, optimizer)
    if not isinstance(uncompiled(model), DistributedDataParallel):
        _require_compiled(accelerator, model)
        if not getattr(model, "_is_accelerate_prepared", False):  # else it would be in checkpoints twice
            accelerator.prepare_model(model, evaluation_mode=True)
    averaging = averaging_of(
        model,
        optimizer,
        is_last=lambda: bool(accelerator.sync_gradients),
        loss_scaler=getattr(accelerator, "scaler", None),
        options={"compression": compression, **options},
        whose="attach",
    )
    number = _attached.get(accelerator, 0)
    _attached[accelerator] = number + 1
    _keep_with_checkpoints(accelerator, averaging, "pycomm" if number == 0 else f"pycomm{number}")
    return averaging


def _check(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raise TypeError or ValueError if these cannot be attached."""
    if not isinstance(accelerator, _accelerate.Accelerator):
        raise TypeError(f"accelerator is a {type(accelerator).__name__}, wanted an accelerate.Accelerator")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a module")
    kind = accelerator.distributed_type.value
    if kind in _ELSEWHERE:
        raise ValueError(f"accelerator runs {kind}: {_ELSEWHERE[kind]}")
    if not isinstance(optimizer, _optimizer.AcceleratedOptimizer):
        given = "an unprepared" if isinstance(optimizer, torch.optim.Optimizer) else "no optimizer but a"
        raise (ValueError if isinstance(optimizer, torch.optim.Optimizer) else TypeError)(
            f"optimizer is {given} {type(optimizer).__name__}, wanted what accelerator.prepare(optimizer) returns"
        )
    if accelerator.num_processes > 1 and not dist.is_initialized():
        raise ValueError(f"accelerator has {accelerator.num_processes} processes ({kind}) without a process group")


def _require_compiled(accelerator: Any, model: torch.nn.Module) -> None:
    """Raise ValueError if Accelerate is to compile ``model``, which makes another object of it, and has not done so."""
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and plugin.backend.value != "NO" and uncompiled(model) is model:
        raise ValueError(
            f"accelerator compiles models (with {plugin.backend.value}), but not this one: model is a "
            f"{type(model).__name__}, wanted what accelerator.prepare_model(model, evaluation_mode=True) returns"
        )


def _keep_with_checkpoints(accelerator: Any, averaging: Averaging, prefix: str) -> None:
    """Have ``save_state`` and ``load_state`` keep the state of ``averaging``, in files that begin with ``prefix``."""

    def save(_models: Any, _weights: Any, output_dir: str | os.PathLike[str]) -> None:
        averaging.save(output_dir, prefix)

    def load(_models: Any, input_dir: str | os.PathLike[str]) -> None:
        averaging.load(input_dir, prefix)

    for hook in (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)):
        averaging.on_detach.append(hook.remove)

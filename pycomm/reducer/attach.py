"""The one line that a training script adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.communicator import DEFAULT_TIMEOUT, Communicator
from pycomm.compression import Compression
from pycomm.errors import CommError
from pycomm.optim.attached import refuse_second_attach, register
from pycomm.optim.parameters import unwrapped
from pycomm.reducer.broadcast import broadcast_state, broadcast_tensors, check_same_lines, signature
from pycomm.reducer.parameters import ParameterTable, table_of
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.settings import Settings, checked_settings
from pycomm.reducer.wrappers import refuse_wrapped, watch_constructions

_T = TypeVar("_T")


def attach(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    compression: Compression | str | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_mb: float = 25,
    accumulate: int = 1,
    average: bool = True,
    loss_scaler: Any = None,
    clip_local_norm: float | None = None,
    algorithm: str = "auto",
    all_parameters: bool = False,
    check_replicas: int = 1000,
    buffers: str = "local",
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> Reducer:
    """Average the gradients of ``optimizer``'s parameters over the ranks, from now on.

    When ``loss.backward()`` returns, every ``.grad`` holds the average over ``process_group``. The
    optimizer and the model stay the objects they are; ``optimizer.step()``, schedulers, GradScaler,
    clipping and checkpoints work as before. Collective: parameters, buffers and optimizer state of
    rank 0 are copied to all ranks first.

    Args:
        optimizer: any torch optimizer; a trainer's proxy (Accelerate's, Lightning's, Fabric's) stands for
            the one inside.
        model_or_named_parameters: the module, or its ``named_parameters()``. Names every parameter of the
            optimizer; state is kept by name. What averages or shards parameters itself is refused, also
            when it comes later: DistributedDataParallel, FSDP, DeepSpeed, inside or around the module.
        compression: ``NoCompression()`` (the default); ``FP16()``, ``BF16()``; ``DGC(ratio)`` for SGD,
            ``TopK(ratio)`` for any optimizer, ``RandomK(ratio)``; ``PowerSGD(rank)``; ``Int8()``,
            ``OneBit()``, ``QSGD(levels)``, ``TernGrad()``. "auto" is ``Auto()``: per bucket whichever
            is fastest on this link, of dense, FP16, PowerSGD and top-k.
        process_group: a group, or a ``DeviceMesh`` of one dimension; the default group if ``None``.
        bucket_mb: gradients travel in buckets of about this many MiB.
        accumulate: backward passes per optimizer step; gradients travel in the last one. As without
            pycomm, divide the loss yourself. A ragged last window needs ``Reducer.flush()``.
        average: ``False`` leaves the sum over the ranks in ``.grad``.
        loss_scaler: the :class:`pycomm.LossScaler` or ``torch.amp.GradScaler`` in use, or any object
            with its ``scale``; needed with methods that carry state, which is kept without the loss scale.
        clip_local_norm: each rank's own gradient, without the loss scale, is brought to at most this
            norm before it is averaged. The whole gradient must be known first, so nothing travels while
            backward runs. To clip the average, see ``Reducer.clip_grad_norm``.
        algorithm: how dense buckets are summed, by name: see ``Communicator.all_reduce``.
        all_parameters: average the gradients of all parameters that have a name, those of the optimizer
            or not. Without it a parameter of the module that gets a gradient and that no attach covers is
            warned of, once.
        check_replicas: after the first step, and every so many reductions, all ranks' parameters are
            compared (by hashes: one read of them), and a difference is an error; 0: never. Buffers that
            differ are noted in the log.
        buffers: what becomes of the module's buffers, BatchNorm's statistics say, with each reduction:
            "local": each rank keeps its own; "broadcast": all get rank 0's; "average": floating ones are
            averaged, the others are rank 0's.
        timeout: for every wait for a peer; seconds or ``timedelta``.

    Returns:
        The :class:`Reducer`. It lives as long as the optimizer or the module do, kept or not.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: an argument is wrong, or ranks differ in names, shapes, dtypes, order
            or settings (on every rank, naming the first difference). Nothing is left behind then.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = unwrapped(optimizer)

    def settings() -> Settings:
        return checked_settings(
            model_or_named_parameters,
            compression=compression,
            bucket_mb=bucket_mb,
            accumulate=accumulate,
            average=average,
            loss_scaler=loss_scaler,
            clip_local_norm=clip_local_norm,
            algorithm=algorithm,
            all_parameters=all_parameters,
            check_replicas=check_replicas,
            buffers=buffers,
        )

    asked = _ask(settings, optimizer, model_or_named_parameters)
    communicator = Communicator(process_group, timeout)
    try:
        return _join(communicator, asked)
    except BaseException:
        communicator.close()
        raise


_Asked = tuple[Settings, ParameterTable] | Exception


def _ask(settings_of: Callable[[], Settings], optimizer: Any, model_or_named_parameters: Any) -> _Asked:
    """Return the settings and the parameters; or what is wrong with them.

    Not raised yet: the others are told first, who are on their way to the same rendezvous.
    """
    try:
        settings = settings_of()
        table = table_of(optimizer, model_or_named_parameters, settings.all_parameters)
        names = dict(table.named())
        refuse_wrapped(names, model_or_named_parameters)
        refuse_second_attach(names)
        settings.compression.check(table.optimizer)
    except (TypeError, ValueError) as error:
        return error
    return settings, table


def _join(communicator: Communicator, asked: _Asked) -> Reducer:
    """Make a Reducer on all ranks, or on none."""
    settings, table = _shared(communicator, asked)
    _make_equal(communicator, table, settings)
    try:
        made: Reducer | Exception = Reducer(table, communicator, settings)
    except Exception as error:
        made = error
    try:
        reducer = _shared(communicator, made)
        register(reducer)
        watch_constructions(reducer)
        return reducer
    except BaseException:
        if isinstance(made, Reducer):
            made.detach()
        raise


def _make_equal(communicator: Communicator, table: ParameterTable, settings: Settings) -> None:
    """Refuse ranks that differ in what must be given alike; then give all of them what rank 0 has."""
    check_same_lines(communicator, settings.lines(), "setting")
    communicator.all_reduce(
        torch.zeros(1, dtype=torch.float32), algorithm=settings.algorithm
    )  # a name that is none is an error here
    names = dict(table.named())
    lines = [f"{name}: {signature(p)}{'' if p.requires_grad else ' frozen'}" for name, p in names.items()]
    check_same_lines(communicator, lines, "parameter")
    module, stepper = table.module, table.stepper
    stepper.warn_of_lost_updates(names)
    tensors = list(names.values()) if module is None else [*module.parameters(), *module.buffers()]
    broadcast_tensors(communicator, [*tensors, *stepper.masters()], src=0)
    stepper.restore()
    broadcast_state(communicator, table.optimizer, src=0)


def _shared(communicator: Communicator, outcome: _T | Exception) -> _T:
    """The outcome of this rank, if no rank has an error instead: raised here, and quoted on the others."""
    if isinstance(outcome, CommError):
        raise outcome  # they cannot be told
    problem = str(outcome) or type(outcome).__name__ if isinstance(outcome, Exception) else ""
    problems = [text.decode() for text in communicator.channel.all_gather_bytes(problem.encode())]
    if isinstance(outcome, Exception):
        raise outcome
    for rank, text in enumerate(problems):
        if text:
            raise ValueError(f"rank {rank} could not attach: {text}")
    return outcome

"""Entry point ``attach``: the one line that a training script adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.checks import seconds_of
from pycomm.communicator import DEFAULT_TIMEOUT, Communicator
from pycomm.compression import Compression
from pycomm.optim.attached import refuse_second_attach, register
from pycomm.optim.parameters import unwrapped
from pycomm.reducer.agreement import agreed
from pycomm.reducer.arrivals import Waits, open_board
from pycomm.reducer.broadcast import broadcast_state, broadcast_tensors, check_same_lines, signature
from pycomm.reducer.engine import Engine
from pycomm.reducer.joining import join as join_ranks
from pycomm.reducer.joining import surviving_engine
from pycomm.reducer.lanes import open_lanes
from pycomm.reducer.parameters import ParameterTable, table_of
from pycomm.reducer.partition.opening import open_partition, require_reachable, require_shardable, settings_lines
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.settings import Settings, checked_settings
from pycomm.reducer.sharded import check_sharding
from pycomm.reducer.wrappers import refuse_wrapped, watch_constructions
from pycomm.torch_internals import is_dtensor
from pycomm.transport.own_group import group_of


def attach(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    compression: Compression | str | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_mb: float = 25,
    accumulate: int | Callable[[], bool] = 1,
    average: bool = True,
    loss_scaler: Any = None,
    clip_local_norm: float | None = None,
    algorithm: str = "auto",
    all_parameters: bool = False,
    check_replicas: int = 1000,
    buffers: str = "local",
    on_failure: str = "raise",
    min_ranks: int = 1,
    backup: int = 0,
    shard: str | None = None,
    full_grad: bool | None = False,
    join: str | None = None,
    carry: Mapping[str, Any] | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> Reducer:
    """Average the gradients of ``optimizer``'s parameters over the ranks from now on.

    When ``loss.backward()`` returns, every ``.grad`` holds the average over ``process_group``. The
    optimizer and the model remain the same objects; ``optimizer.step()``, schedulers, GradScaler,
    clipping and checkpoints work as before. Collective: rank 0's parameters, buffers and optimizer
    state are first copied to all ranks.

    Args:
        optimizer: any torch optimizer. A trainer's proxy (Accelerate's, Lightning's, Fabric's) is
            replaced by the optimizer inside it.
        model_or_named_parameters: the module, or its ``named_parameters()``. It must name every parameter
            of the optimizer, as state is kept by name. A wrapper that averages or shards parameters itself
            (DistributedDataParallel, FSDP, DeepSpeed), inside or around the module, is refused, even if it
            is added later.
        compression: ``NoCompression()`` (the default); ``FP16()``, ``BF16()``; ``DGC(ratio)`` for SGD,
            ``TopK(ratio)`` for any optimizer, ``RandomK(ratio)``; ``PowerSGD(rank)``; ``Int8()``,
            ``OneBit()``, ``QSGD(levels)``, ``TernGrad()``. "auto" means ``Auto()``, which picks for each
            bucket whichever of dense, FP16, PowerSGD and top-k is fastest on this link.
        process_group: a group, or a one-dimensional ``DeviceMesh``; the default group if ``None``. Parameters may
            be DTensors over other ranks (tensor parallelism: ``mesh["dp"]`` for a model that is split over
            ``mesh["tp"]``): the gradients of each rank's part are averaged, compressed and kept as ordinary
            ones; norms are of whole parameters, and a step is skipped by all ranks that have parts or by none.
            Those that are laid over the ranks of this group itself, or by ``fully_shard``, are refused.
        bucket_mb: approximate size of a bucket in MiB; gradients are sent in buckets. On a GPU, that is of
            what ``TopK`` and ``DGC`` send, up to eight times as much of the gradients.
        accumulate: number of backward passes per optimizer step; gradients are sent during the last one.
            As without pycomm, divide the loss yourself. A window that ends early needs ``Reducer.flush()``.
            Or a function without arguments, called when a pass begins, that returns whether it is the last one of
            its step, as trainers know it; all ranks must get the same answers.
        average: ``False`` leaves the sum over the ranks in ``.grad``.
        loss_scaler: the :class:`pycomm.LossScaler` or ``torch.amp.GradScaler`` in use, or any object
            with the same ``scale`` method. Required by methods that carry state, which is kept without the
            loss scale, and with DTensors.
        clip_local_norm: maximum norm of each rank's own gradient, without the loss scale, before it is
            averaged. The whole gradient must be known first, so nothing is sent while backward runs. To
            clip the average, see ``Reducer.clip_grad_norm``.
        algorithm: name of the algorithm that sums dense buckets; see ``Communicator.all_reduce``.
        all_parameters: average the gradients of all named parameters, whether or not they belong to the
            optimizer. Otherwise a parameter of the module that gets a gradient without being covered by
            any attach is reported, once, by a warning.
        check_replicas: compare all ranks' parameters after the first step and then once in this many
            reductions (by hashes, which read them once); 0 never does. A difference is an error: a
            :class:`pycomm.CommError` if most ranks agree, whose ``peer`` is then the other one, or if only a few
            elements differ, as after a flipped bit. Residuals and velocities, which differ between the ranks, are
            compared with what they were after the step before; a rank whose own have changed is an error of all.
            Buffers that differ are only logged.
        buffers: treatment of the module's buffers (BatchNorm's statistics, for example) in each reduction.
            "local": each rank keeps its own; "broadcast": all ranks get rank 0's; "average": floating-point
            buffers are averaged, the others are rank 0's.
        on_failure: treatment of ranks that are lost: that die, are stopped, do not come within the timeout, or raise
            in ``backward()``. "raise": every rank gets a CommError. "shrink": those that are left agree on who they
            are, and reduce the step again from the gradients that they have; ``backward()`` returns the mean over
            them. See ``Reducer.world`` and ``Reducer.on_change``. In CPU memory only, and not with DTensors.
        min_ranks: fewest ranks that go on; with fewer left, each of them gets the same CommError.
        backup: number of ranks that need not be waited for, in every step: as soon as the others have all their
            gradients, a rank goes on without its own, which it adds to those of its next step. See
            ``docs/survival.md``; wants "shrink".
        shard: "optimizer": in ``optimizer.step()`` each rank steps its own part of the parameters, in all ranks' memory
            on one host, else followed by messages that the next forward waits for as it needs them, and keeps that
            part of the optimizer's state only; "parameters": likewise, on one host, and the ranks have one copy of the
            parameters among them. ``None``: each steps all of them. See ``docs/sharding.md``. After ``backward()`` a
            rank has the average of its own part in ``.grad``, else its own gradient.
        full_grad: with ``shard``, True: every rank gets all of the average in ``.grad``. ``None``: no rank gets any of
            it, as the sum is made inside the step, which then moves fewer bytes; ``.grad`` stays this rank's own.
        join: address, "host:port", of the store in which other ranks have met, to become one more of them between
            two steps. Such a process calls no ``init_process_group``. It gets all state from them, and takes part
            in its first step with weight zero. Wants "shrink", on all ranks.
        carry: objects with ``state_dict`` and ``load_state_dict``, by name, whose state newcomers get as well:
            learning-rate schedules, samplers. Equal names on all ranks.
        timeout: limit of every wait for a peer; seconds or ``timedelta``.

    Returns:
        The :class:`Reducer`. It lives as long as the optimizer or the module, even if you do not keep it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        CommError: with ``join``, nobody answers.
        TypeError, ValueError: an argument is wrong, or ranks differ in names, shapes, dtypes, order, parts of DTensors
            or settings (on every rank, naming the first difference). Nothing is left behind in that case.
    """
    settings = functools.partial(
        checked_settings,
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
        on_failure=on_failure,
        min_ranks=min_ranks,
        backup=backup,
        shard=shard,
        full_grad=full_grad,
    )
    request = _check_request(settings, optimizer, model_or_named_parameters)
    return _attach_all(request, process_group, timeout, carry or {}, join)


_Request = tuple[Settings, ParameterTable] | Exception


def _check_request(settings_of: Callable[[], Settings], optimizer: Any, model_or_named_parameters: Any) -> _Request:
    """Return the settings and the parameters, or the error that they cause.

    The error is not raised yet: the other ranks are about to meet this one, and have to be told first.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = unwrapped(optimizer)
    try:
        settings = settings_of()
        table = table_of(optimizer, model_or_named_parameters, settings.all_parameters)
        names = dict(table.named())
        refuse_wrapped(names, model_or_named_parameters)
        refuse_second_attach(names)
        settings.compression.check(table.optimizer)
        if settings.survives:
            _require_survivable(table)
        if settings.shard is not None:
            require_shardable(table, settings.shard)
    except (TypeError, ValueError) as error:
        return error
    return settings, table


def _require_survivable(table: ParameterTable) -> None:
    """Raise TypeError or ValueError if ranks that go on without others could not keep or move these gradients."""
    if table.on_gpu:
        raise ValueError('on_failure="shrink" wants gradients in CPU memory, and these parameters are on a GPU')
    for name, param in table.named():
        if is_dtensor(param):
            raise TypeError(
                f'parameter {name!r} is a DTensor, which on_failure="shrink" does not take: a lost rank takes its part '
                "of the parameter with it"
            )


def _attach_all(
    request: _Request,
    process_group: dist.ProcessGroup | DeviceMesh | None,
    timeout: timedelta | float,
    carry: Mapping[str, Any],
    join: str | None,
) -> Reducer:
    """Attach on all ranks together, or on none of them; nothing is left behind then. ``join``: of ranks to join."""
    if join is not None:
        return _join(request, join, carry, timeout)
    communicator = Communicator(process_group, timeout)
    try:
        settings, table = agreed(communicator, _check_ranks(request, process_group))
        _make_equal(communicator, table, settings)
        lanes = open_lanes(communicator, settings, table.on_gpu)
        if settings.shard is not None:
            require_reachable(communicator, settings)
        return _attach_over(lanes, settings, table, carry)
    except BaseException:
        communicator.close()
        raise


def _join(request: _Request, address: str, carry: Mapping[str, Any], timeout: timedelta | float) -> Reducer:
    """Attach as one more rank of those that are there already."""
    if isinstance(request, Exception):
        raise request
    settings, table = request
    if not settings.survives:
        raise ValueError('join wants on_failure="shrink", as the ranks that are there have it')
    return join_ranks(address, table, settings, carry, seconds_of(timeout))


def _check_ranks(request: _Request, process_group: dist.ProcessGroup | DeviceMesh | None) -> _Request:
    """Return ``request``, or the error that it causes with the ranks of ``process_group``.

    Those of a DTensor that is laid over them, or too few of them.
    """
    if isinstance(request, Exception):
        return request
    settings, table = request
    table.ranks = tuple(dist.get_process_group_ranks(group_of(process_group)))
    try:
        check_sharding(dict(table.named()), table.ranks)
        if 0 < len(table.ranks) <= settings.backup:
            raise ValueError(f"backup={settings.backup} wants more ranks than the {len(table.ranks)} that there are")
    except (TypeError, ValueError) as error:
        return error
    return request


def _attach_over(
    lanes: Sequence[Communicator], settings: Settings, table: ParameterTable, carry: Mapping[str, Any]
) -> Reducer:
    """Make a Reducer over the communicators ``lanes`` on all ranks, or on none of them."""
    board = open_board(lanes[0], table.on_gpu)
    try:
        survives = settings.survives
        engine = surviving_engine(lanes, table, settings, carry) if survives else Engine(table, lanes, settings)
        engine.waits = Waits(board, engine)
        if settings.shard is not None:
            table.partition = open_partition(lanes[0], table, settings)
        made: Reducer | Exception = Reducer(engine)
    except Exception as error:
        made = error
    try:
        reducer = agreed(lanes[0], made)
        register(reducer)
        watch_constructions(reducer)
        return reducer
    except BaseException:
        if isinstance(made, Reducer):
            made.detach()
        elif table.partition is not None:
            table.partition.move_out()
        raise


def _make_equal(communicator: Communicator, table: ParameterTable, settings: Settings) -> None:
    """Raise ValueError if the ranks' settings or parameters do not match; then copy rank 0's state to all ranks."""
    check_same_lines(communicator, settings.lines(), "setting")
    if settings.shard is not None:
        check_same_lines(communicator, settings_lines(table.optimizer), "parameter group")
    communicator.all_reduce(
        torch.zeros(1, dtype=torch.float32), algorithm=settings.algorithm
    )  # raises here if there is no such algorithm
    names = dict(table.named())
    lines = [f"{name}: {signature(p)}{'' if p.requires_grad else ' frozen'}" for name, p in names.items()]
    module, stepper = table.module, table.stepper
    if module is not None:  # other DTensors, which are about to be broadcast too
        others = [*module.named_parameters(), *module.named_buffers()]
        lines += [f"{name}: {signature(t)}" for name, t in others if is_dtensor(t) and name not in names]
    check_same_lines(communicator, lines, "parameter")
    stepper.warn_of_lost_updates(names)
    tensors = list(names.values()) if module is None else [*module.parameters(), *module.buffers()]
    broadcast_tensors(communicator, [*tensors, *stepper.masters()], src=0)
    stepper.restore()
    broadcast_state(communicator, table.optimizer, src=0)

"""Entry point ``attach``: the one line that a training script adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.checks import refuse_unknown, shown
from pycomm.communicator import Communicator
from pycomm.compression import Compression
from pycomm.optim.attached import refuse_second_average, register
from pycomm.optim.parameters import optimizer_parameters
from pycomm.reducer.agreement import agreed
from pycomm.reducer.arrivals import Waits, open_board
from pycomm.reducer.attached_tensors import AttachedTensors
from pycomm.reducer.broadcast import broadcast_state, check_same_lines, check_state_keys
from pycomm.reducer.engine import Engine, StepPolicy
from pycomm.reducer.joining import join as join_ranks
from pycomm.reducer.joining import surviving_policy
from pycomm.reducer.lanes import open_lanes
from pycomm.reducer.newcomers import checked_carry
from pycomm.reducer.parameters import ParameterTable, table_of
from pycomm.reducer.partition.opening import open_partition, require_reachable, require_shardable, settings_lines
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.settings import NAMES, OF_DISTRIBUTED_DATA_PARALLEL, Settings, checked_settings
from pycomm.reducer.sharded import check_sharding
from pycomm.reducer.wrappers import refuse_wrapped, watch_constructions
from pycomm.torch_internals import is_dtensor
from pycomm.transport.authentication import secret
from pycomm.transport.own_group import timeout_seconds


def attach(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    compression: Compression | str | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_mb: float | None = None,
    accumulate: int | Callable[[], bool] = 1,
    average: bool = True,
    loss_scaler: Any = None,
    clip_local_norm: float | None = None,
    algorithm: str = "auto",
    all_parameters: bool = False,
    ignore: Iterable[str | torch.Tensor | torch.nn.Module] = (),
    check_replicas: int = 1000,
    buffers: str = "local",
    optimizer_state: str = "broadcast",
    on_failure: str = "raise",
    min_ranks: int = 1,
    backup: int = 0,
    shard: str | None = None,
    full_grad: bool | None = False,
    join: str | None = None,
    carry: Mapping[str, Any] | None = None,
    per_rank: Iterable[str] = (),
    timeout: timedelta | float | None = None,
    **unknown: NoReturn,
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
            ``OneBit()``, ``QSGD(levels)``, ``TernGrad()``. Or the name of one that needs no arguments: "fp16",
            "bf16", "int8", "onebit", "qsgd", "terngrad", "powersgd", "dgc". "auto" means ``Auto()``, which picks for
            each bucket whichever of dense, FP16, PowerSGD and top-k is fastest on this link.
        process_group: a group, or a one-dimensional ``DeviceMesh``; the default group if ``None``. Parameters may
            be DTensors over other ranks (tensor parallelism: ``mesh["dp"]`` for a model that is split over
            ``mesh["tp"]``): the gradients of each rank's part are averaged, compressed and kept as ordinary
            ones; norms are of whole parameters, and a step is skipped by all ranks that have parts or by none.
            Those that are laid over the ranks of this group itself, or by ``fully_shard``, are refused.
        bucket_mb: approximate size of a bucket in MiB; gradients are sent in buckets, while backward computes those of
            the next one. ``None``: 25. On one host a model of less than 100 MiB then has four equal buckets, but none
            below 1 MiB, if gradients travel as they are or in half precision. On a GPU, the size is that of what
            ``TopK`` and ``DGC`` send, up to eight times as much of the gradients.
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
        ignore: what is each rank's own: names of parameters and buffers, patterns of them as in a shell
            ("experts.*"), parameters, or modules. It is not sent, averaged, compared or warned of, and may have other
            shapes on other ranks. Patterns must be equal on all ranks. Without it, trainable parameters of the module
            that this optimizer does not have, and that differ between ranks, stay as they are, with a RuntimeWarning
            that names them; all others become rank 0's.
        check_replicas: compare all ranks' parameters after the first step and then once in this many
            reductions (by hashes, which read them once); 0 never does. A difference is an error: a
            :class:`pycomm.CommError` if most ranks agree, whose ``peer`` is then the other one, or if only a few
            elements differ, as after a flipped bit. Residuals and velocities, which differ between the ranks, are
            compared with what they were after the step before; a rank whose own have changed is an error of all.
            Buffers that differ are only logged.
        buffers: treatment of the module's buffers (BatchNorm's statistics, for example) in each reduction.
            "local": each rank keeps its own; "broadcast": all ranks get rank 0's; "average": floating-point
            buffers are averaged, the others are rank 0's. Buffers that are sparse or quantised are compared instead.
        optimizer_state: "broadcast": all ranks get rank 0's; what other ranks have and rank 0 does not is an error.
            "keep": each rank keeps its own, for an optimizer that shares its state out among the ranks; only
            hyperparameters become rank 0's.
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
        join: address, "host:port" or "[::1]:port", of the store in which other ranks have met, to become one more of
            them between two steps. Such a process calls no ``init_process_group``. It gets all state from them, and
            takes part in its first step with weight zero. Wants "shrink", on all ranks.
        carry: objects with ``state_dict`` and ``load_state_dict``, by name, whose state newcomers get as well:
            learning-rate schedules, samplers. Equal names on all ranks.
        per_rank: keys of ``optimizer.param_groups``, such as "lr", whose numbers may differ between ranks. All others
            are compared in every reduction, and a difference is an error that names group, key and values.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Returns:
        The :class:`Reducer`. It lives as long as the optimizer or the module, even if you do not keep it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        CommError: with ``join``, nobody answers.
        TypeError, ValueError: an argument is wrong, or has an unknown name; or ranks differ in settings, in names,
            shapes, dtypes, order or kinds of parameters and buffers, or in the contents of those that cannot be sent;
            or a parameter cannot be averaged (on every rank, naming the first one). Nothing is left behind in that
            case.
    """
    given = locals()
    settings = functools.partial(checked_settings, model_or_named_parameters, **{name: given[name] for name in NAMES})
    request = _check_request(settings, optimizer, model_or_named_parameters, ignore, carry, unknown)
    return _attach_all(request, process_group, timeout, join)


class _Attached(NamedTuple):
    """What is attached, on this rank: settings, parameters, all tensors beside them, and what newcomers get as well."""

    settings: Settings
    table: ParameterTable
    tensors: AttachedTensors
    carry: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Return what the ranks must have set alike."""
        return [*self.settings.lines(), f"carry={sorted(self.carry)}"]


_Request = _Attached | Exception


def _check_request(
    settings_of: Callable[[], Settings],
    optimizer: Any,
    model_or_named_parameters: Any,
    ignore: Any,
    carry: Any,
    unknown: Iterable[str],
) -> _Request:
    """Return what is to be attached, or the error that it causes.

    The error is not raised yet: the other ranks are about to meet this one, and have to be told first.
    """
    try:
        refuse_unknown("attach", unknown, attach.__kwdefaults__ or (), OF_DISTRIBUTED_DATA_PARALLEL)
        settings = settings_of()
        table = table_of(optimizer, model_or_named_parameters, settings.all_parameters, ignore)
        settings = replace(settings, ignore=table.ignored.patterns)
        names = dict(table.named())
        refuse_wrapped(names, model_or_named_parameters)
        refuse_second_average(names, "attach()")
        settings.compression.check(table.optimizer)
        if settings.survives:
            _require_survivable(table)
        if settings.shard is not None:
            require_shardable(table, settings.shard)
        _check_ignored(table, settings)
        made = _Attached(settings, table, AttachedTensors(table), checked_carry(carry))
        made.lines()  # which a method of the user's own may make fail
        return made
    except Exception as error:  # what users pass may raise anything
        return error


def _check_ignored(table: ParameterTable, settings: Settings) -> None:
    """Raise ValueError if the optimizer has ignored parameters, and its steps concern all of them at once."""
    ignored = next(filter(None, map(table.ignored.name_of, optimizer_parameters(table.optimizer))), None)
    if ignored is None:
        return
    for what, is_given in (("loss_scaler", settings.loss_scaler is not None), ("shard", settings.shard is not None)):
        if is_given:
            raise ValueError(
                f"ignore has {ignored!r}, which the attached optimizer steps, and does not go with {what}: ranks step "
                "all its parameters or none; give what is each rank's own to an optimizer of its own"
            )


def _require_survivable(table: ParameterTable) -> None:
    """Raise TypeError or ValueError if ranks that go on without others could not keep or move these gradients."""
    if table.on_gpu:
        raise ValueError('on_failure="shrink" wants gradients in CPU memory, and these parameters are on a GPU')
    secret()  # by which newcomers are known: what is wrong with it is told to all ranks
    for name, param in table.named():
        if is_dtensor(param):
            raise TypeError(
                f'parameter {name!r} is a DTensor, which on_failure="shrink" does not take: a lost rank takes its part '
                "of the parameter with it"
            )


def _attach_all(
    request: _Request,
    process_group: dist.ProcessGroup | DeviceMesh | None,
    timeout: timedelta | float | None,
    join: Any,
) -> Reducer:
    """Attach on all ranks together, or on none of them; nothing is left behind then. ``join``: of ranks to join."""
    if timeout is (attach.__kwdefaults__ or {}).get("timeout"):
        timeout = None  # a default, whichever one attach declares, does not overrule the group's
    if join is not None and not isinstance(join, str):
        request, join = TypeError(f"join is {shown(join)}, wanted an address, or None"), None
    if join is not None:
        return _join(request, join, timeout)
    communicator = Communicator(process_group, timeout)
    try:
        attached = agreed(communicator, _check_ranks(request, communicator.place.ranks))
        settings, table, tensors, carry = attached
        check_same_lines(communicator, attached.lines(), "setting")
        _make_equal(communicator, table, settings, tensors)
        lanes = open_lanes(communicator, settings, table.on_gpu)
        if settings.shard is not None:
            require_reachable(communicator, settings)
        return _attach_over(lanes, settings, table, carry)
    except BaseException:
        communicator.close()
        raise


def _join(request: _Request, address: str, timeout: timedelta | float | None) -> Reducer:
    """Attach as one more rank of those that are there already."""
    if isinstance(request, Exception):
        raise request
    settings, table, _, carry = request
    if not settings.survives:
        raise ValueError('join wants on_failure="shrink", as the ranks that are there have it')
    return join_ranks(address, table, settings, carry, timeout_seconds(timeout))


def _check_ranks(request: _Request, ranks: Sequence[int]) -> _Request:
    """Return ``request``, or the error that it causes with these global ranks.

    Those of a DTensor that is laid over them, or too few of them.
    """
    if isinstance(request, Exception):
        return request
    settings, table = request.settings, request.table
    table.ranks = tuple(ranks)
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
        policy = surviving_policy(lanes[0], table, settings, carry) if settings.survives else StepPolicy()
        engine = Engine(table, lanes, settings, policy)
        engine.statistics.waits = Waits(board, engine)
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


def _make_equal(
    communicator: Communicator, table: ParameterTable, settings: Settings, tensors: AttachedTensors
) -> None:
    """Raise ValueError if the ranks' settings or tensors do not match; then copy rank 0's state to all ranks."""
    if settings.shard is not None:
        check_same_lines(communicator, settings_lines(table.optimizer), "parameter group")
    communicator.all_reduce(
        torch.zeros(1, dtype=torch.float32), algorithm=settings.algorithm
    )  # raises here if there is no such algorithm
    names = dict(table.named())
    table.stepper.warn_of_lost_updates(names)
    tensors.make_equal(communicator)
    broadcast_state(
        *(communicator, table.optimizer, 0),
        leaves_out=table.ignored.covers,
        check=functools.partial(check_state_keys, table.optimizer, names),
        keeps_state=settings.optimizer_state == "keep",
    )

"""Entry point ``attach``: the one line that a training script adds."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.agreement import agreed, check_same_lines, exchanged, require_same
from pycomm.checks import environment_count
from pycomm.collectives import broadcasting
from pycomm.collectives.broadcasting import broadcast_state, check_state_keys
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import look_at
from pycomm.collectives.transport.own_group import group_of
from pycomm.compression import Compression
from pycomm.descriptions import first_names
from pycomm.errors import attempt
from pycomm.optim.attached import refuse_second_average, register
from pycomm.optim.parameters import optimizer_parameters, wrapper_of_unknown_step
from pycomm.optim.wrappers import refuse_wrapped
from pycomm.training.reducer.buckets import check_sharding, open_lanes
from pycomm.training.reducer.engine import Engine, FixedMembers
from pycomm.training.reducer.parameters import ParameterTable, table_of
from pycomm.training.reducer.reducer import Reducer
from pycomm.training.reducer.settings import (
    OPTIMIZER_STATE,
    Options,
    Sharding,
    Survive,
    Tuning,
    checked_buffers,
    refuse_unknown,
)
from pycomm.training.reducer.statistics import open_ready_page

if TYPE_CHECKING:
    from pycomm.training.reducer.second_average import SecondAverage

_COMPARE = "PYCOMM_COMPARE"
"""Environment variable: number of initial steps that are averaged a second time, for comparison."""


class AttachedTensors:
    """Tensors of an optimizer and its module, as one rank sees them before the ranks meet.

    | tensor | treatment |
    |---|---|
    | averaged parameter | rank 0's is sent; an error unless it is dense and of a dtype with gradients |
    | frozen parameter, buffer | rank 0's is sent, whatever its dtype; of an expanded one, the memory behind it |
    | sparse, quantized or composite frozen parameter or buffer | compared if its bytes are accessible; never changed |
    | trainable parameter of other optimizers | compared; on a difference each rank keeps its own, with a warning |
    | named by ``ignore`` | none |

    Raises:
        TypeError: one of them can be neither sent nor compared yet; it is named.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        averaged = dict(table.named())
        known = {id(param) for param in averaged.values()}
        others = {name: t for name, t in table.module_tensors().items() if id(t) not in known}
        self._own = [name for name, t in others.items() if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        self._memories = {name: look_at(name, t) for name, t in [*averaged.items(), *others.items()]}
        self._averaged = [broadcasting.line_of(name, param, self._memories[name]) for name, param in averaged.items()]
        self._order = broadcasting.names_in_order(table.optimizer, averaged, table.ignored.covers)
        self._others = [broadcasting.line_of(name, tensor, self._memories[name]) for name, tensor in others.items()]

    def make_equal(self, communicator: Communicator) -> None:
        """Send rank 0's tensors to all ranks, and compare what cannot be sent. Collective."""
        gather = communicator.channel.all_gather_bytes
        lines = {"parameter": self._averaged, broadcasting.ORDER: self._order}
        require_same(exchanged(gather, lines, "compare"), "compare")
        check_same_lines(gather, self._others, "parameter or buffer outside the optimizer", f"; {broadcasting.OWN}")
        own = dict.fromkeys(self._own)
        compared = [name for name, m in self._memories.items() if name in own or (m.parts and not m.writable)]
        differing = broadcasting.differing_memories(communicator, {name: self._memories[name] for name in compared})
        odd = [name for name in differing if name not in own]
        if odd:
            raise ValueError(f"{broadcasting.describe_difference(odd, differing[odd[0]])}; {broadcasting.OWN}")
        if differing:
            self._table.rank_local = frozenset(differing)
            _warn_of(list(differing))
        stepper = self._table.stepper
        masters = stepper.masters(self._table.ignored.covers)
        parts = [part for name, m in self._memories.items() if m.writable and name not in own for part in m.parts]
        broadcasting.broadcast_parts(communicator, parts, src=0)
        broadcasting.broadcast_tensors(communicator, masters, src=0)
        stepper.restore()


def _warn_of(names: Sequence[str]) -> None:
    warnings.warn(
        "parameters of the module that this optimizer does not have differ between the ranks: "
        f"{first_names(names)}. Each rank keeps its own. If they are meant to differ, write "
        "tuning=pycomm.Tuning(ignore=[names or patterns]); if not, add them to this optimizer, attach their optimizer "
        "too, or build the model from the same seed on all ranks",
        RuntimeWarning,
        stacklevel=5,
    )


Checked = tuple[Options, ParameterTable, AttachedTensors]
"""Checked arguments of ``attach`` on this rank: settings, parameters, and all other tensors."""


def attach(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    compression: Compression | str | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    accumulate: int | Callable[[], bool] = 1,
    loss_scaler: Any = None,
    average: bool = True,
    buffers: str = "local",
    survive: Survive | None = None,
    shard: Sharding | str | None = None,
    tuning: Tuning | None = None,
    **unknown: NoReturn,
) -> Reducer:
    """Average the gradients of ``optimizer``'s parameters over the ranks in every ``backward()``.

    When ``loss.backward()`` returns, every ``.grad`` holds the average over ``process_group``. The
    optimizer and the model remain the same objects; ``optimizer.step()``, schedulers, GradScaler,
    clipping and checkpoints work as before. Collective: rank 0's parameters, buffers and optimizer
    state are first copied to all ranks.

    Args:
        optimizer: any torch optimizer. A trainer's proxy (Accelerate's, Lightning's, Fabric's) is
            replaced by the optimizer inside it.
        model: the module, or its ``named_parameters()``. It must name every parameter
            of the optimizer, as state is kept by name. A wrapper that averages or shards parameters itself
            (DistributedDataParallel, FSDP, DeepSpeed) is refused inside the module, and a DistributedDataParallel
            around it in its first forward.
        compression: ``NoCompression()`` (the default); ``FP16()``, ``BF16()``; ``DGC(ratio)`` for SGD,
            ``TopK(ratio)`` for any optimizer, ``RandomK(ratio)``, ``ChunkTopK(k)``; ``PowerSGD(rank)``; ``FP8()``,
            ``Int8()``, ``Int4()``, ``OneBit()``, ``QSGD(levels)``, ``TernGrad()``. Or the name of one that needs no
            arguments: "fp16", "bf16", "fp8", "int8", "int4", "onebit", "qsgd", "terngrad", "powersgd", "dgc". "auto"
            means ``Auto()``, which picks for each bucket whichever of dense, FP16, FP8, Int4 and PowerSGD is fastest
            on this link.
        process_group: a group, or a one-dimensional ``DeviceMesh``; the default group if ``None``. Parameters may
            be DTensors over other ranks (tensor parallelism: ``mesh["dp"]`` for a model that is split over
            ``mesh["tp"]``): the gradients of each rank's part are averaged, compressed and kept as ordinary
            ones; norms are of whole parameters, and a step is skipped by all ranks that have parts or by none.
            Those that are laid over the ranks of this group itself, or by ``fully_shard``, are refused.
        accumulate: number of backward passes per optimizer step; gradients are sent during the last one.
            As without pycomm, divide the loss by the number of passes yourself. With weights
            (``Reducer.set_weight``), the loss must not be divided by the number of passes. A window that ends early
            needs ``Reducer.flush()``.
            Or a function without arguments, called when a pass begins, that returns whether it is the last one of
            its step, as trainers know it; all ranks must get the same answers.
        average: ``False`` leaves the sum over the ranks in ``.grad``.
        loss_scaler: the :class:`pycomm.LossScaler` or ``torch.amp.GradScaler`` in use, or any object
            with the same ``scale`` method. Required by methods that carry state, which is kept without the
            loss scale, and with DTensors.
        buffers: treatment of the module's buffers (BatchNorm's statistics, for example) in each reduction.
            "local": each rank keeps its own; "broadcast": all ranks get rank 0's; "average": floating-point
            buffers are averaged, all others become rank 0's. Sparse or quantized buffers are compared instead.
        survive: ``pycomm.Survive(min_ranks=..., carry=...)``: continue when ranks are lost, and admit
            newcomers (:func:`pycomm.join`). ``None``: every rank gets a CommError.
        shard: ``pycomm.Sharding("optimizer", grads=...)``, or "optimizer": the ranks divide the optimizer's step and
            state among themselves (ZeRO).
        tuning: ``pycomm.Tuning(bucket_mb=..., timeout=..., transport=...)``: settings that most scripts leave alone.

    Returns:
        The :class:`Reducer`. It lives as long as the optimizer or the module, even if you do not keep it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError, ValueError: an argument is wrong, or has an unknown name; or ranks differ in settings, in names,
            shapes, dtypes, order or kinds of parameters and buffers, or in the contents of those that cannot be sent;
            or a parameter cannot be averaged (on every rank, naming the first one). Everything is undone then.
    """
    meets = tuning if isinstance(tuning, Tuning) else Tuning()
    communicator = Communicator(process_group, meets.timeout, transport=meets.transport)

    def check() -> Checked:
        refuse_unknown(unknown)
        options: Any = {"compression": compression, "accumulate": accumulate, "loss_scaler": loss_scaler}
        options |= {"average": average, "buffers": buffers, "survive": survive, "shard": shard, "tuning": tuning}
        return checked(Options(**options), optimizer, model, communicator.place.ranks)

    try:
        settings, table, tensors = agreed(communicator.channel.all_gather_bytes, attempt(check), lines=_lines)
        _make_equal(communicator, settings, table, tensors)
        lanes = open_lanes(communicator, settings, table.on_gpu)
        return _attach_over(lanes, settings, table, _second_average(process_group, settings))
    except BaseException:
        communicator.close()
        raise


def _lines(found: Checked) -> dict[str, list[str]]:
    """Return lines that must be equal on all ranks."""
    settings, table, _ = found
    steps = f"{_COMPARE}={_steps_to_compare(settings)}"
    return {"setting": [*settings.lines(), steps], "optimizer": [type(table.optimizer).__name__]}


def _steps_to_compare(settings: Options) -> int:
    """Return how many steps are averaged twice. Raise ValueError if the environment variable is not a count."""
    steps = environment_count(_COMPARE) if _COMPARE in os.environ else 0
    if steps > 0 and settings.survive is not None:
        raise ValueError(f"{_COMPARE} cannot be combined with survive=: the process group keeps lost ranks")
    return steps


def checked(settings: Options, optimizer: Any, model: Any, ranks: Sequence[int]) -> Checked:
    """Check an ``attach`` over the global ``ranks``; raise the first error."""
    checked_buffers(settings.buffers, model)
    table = table_of(optimizer, model, settings.tuning.all_parameters, settings.tuning.ignore)
    settings = replace(settings, tuning=replace(settings.tuning, ignore=table.ignored.patterns, timeout=None))
    names = dict(table.named())
    refuse_wrapped(names, model)
    refuse_second_average(names, "attach()")
    settings.compression.check(table.optimizer)
    if settings.survive is not None:
        _surviving().require_survivable(table)
    if settings.shard is not None:
        _refuse_wrapped_step(optimizer, table, settings.shard)
        shardable = table.optimizer, names, settings.shard, settings.compression
        _sharded().require_shardable(*shardable, on_gpu=table.on_gpu)
        table.refuse_overlaps(names)
    _check_ignored(table, settings)
    tensors = AttachedTensors(table)
    table.ranks = tuple(ranks)
    check_sharding(names, table.ranks, table.module)
    _steps_to_compare(settings)
    return settings, table, tensors


def _refuse_wrapped_step(optimizer: Any, table: ParameterTable, shard: Sharding) -> None:
    """Raise ValueError if ``optimizer`` is a wrapper whose own step may change the parameters of other ranks."""
    name = wrapper_of_unknown_step(optimizer)
    if name is not None:
        inner = type(table.optimizer).__name__
        raise ValueError(
            f"shard={shard} requires the optimizer that steps, and this is a {name} around its {inner}: whatever else "
            f"the step of a {name} changes, each rank would change by its own gradients. Leave shard out, or pass "
            f"the {inner} to attach if the {name} only calls it"
        )


def _check_ignored(table: ParameterTable, settings: Options) -> None:
    """Raise ValueError if a setting cannot be combined with what ``ignore`` leaves to each rank."""
    if table.ignored.keeps_state:
        for what, option, why in (
            (f"survive={settings.survive}", settings.survive, "a lost rank takes its share of the state with it"),
            (f"shard={settings.shard}", settings.shard, "pycomm divides the state itself then"),
        ):
            if option is not None:
                raise ValueError(f'ignore=["{OPTIMIZER_STATE}"] cannot be combined with {what}: {why}')
    ignored = next(filter(None, map(table.ignored.name_of, optimizer_parameters(table.optimizer))), None)
    if ignored is None:
        return
    for what, is_given in (("loss_scaler", settings.loss_scaler is not None), ("shard", settings.shard is not None)):
        if is_given:
            raise ValueError(
                f"ignore has {ignored!r}, which the attached optimizer steps; this cannot be combined with {what}: "
                "ranks step all its parameters or none; give each rank's own parameters a separate optimizer"
            )


def _surviving() -> ModuleType:
    """Return the module of ranks that may be lost, which few scripts need."""
    from pycomm.training.reducer import members

    return members


def _second_average(process_group: dist.ProcessGroup | DeviceMesh | None, settings: Options) -> SecondAverage | None:
    """Return the object that averages a second time, if the environment requests it."""
    steps = _steps_to_compare(settings)
    if steps == 0:
        return None
    from pycomm.training.reducer.second_average import SecondAverage

    return SecondAverage(group_of(process_group), steps, settings)


def _sharded() -> ModuleType:
    """Return the package of sharded steps, which few scripts need."""
    from pycomm.training.reducer import partition

    return partition


def _attach_over(
    lanes: Sequence[Communicator], settings: Options, table: ParameterTable, second: SecondAverage | None
) -> Reducer:
    """Create a Reducer over the communicators ``lanes`` on all ranks, or on none of them."""
    page = open_ready_page(lanes[0], table.on_gpu)
    try:
        members = FixedMembers(lanes[0])
        if settings.survive is not None:
            members = _surviving().members_of(lanes[0], table, settings)
        engine = Engine(table, lanes, settings, members, page, second)
        if settings.shard is not None:
            compare = weakref.WeakMethod(engine.comparison.compare_replicas)
            arguments = lanes[0], table.optimizer, table.module, settings, compare
            if table.on_gpu or _sharded().memory_of_all(lanes[0]) is None:
                table.partition = _sharded().SpreadPartition(*arguments, table.on_gpu)
            else:
                table.partition = _sharded().HostPartition(*arguments)
        made: Reducer | Exception = Reducer(engine)
    except Exception as error:
        made = error
    try:
        reducer = agreed(lanes[0].channel.all_gather_bytes, made)
        register(reducer)
        return reducer
    except BaseException:
        if isinstance(made, Reducer):
            made.detach()
        elif table.partition is not None:
            table.partition.move_out()
        raise


def _make_equal(communicator: Communicator, settings: Options, table: ParameterTable, tensors: AttachedTensors) -> None:
    """Compare the ranks' settings and tensors, then copy rank 0's state to all; ValueError if they differ."""
    if settings.shard is not None:
        check_same_lines(
            communicator.channel.all_gather_bytes, _sharded().settings_of(table.optimizer), "parameter group"
        )
    communicator.all_reduce(
        torch.zeros(1, dtype=torch.float32), algorithm=settings.tuning.algorithm
    )  # raises if there is no such algorithm
    names = dict(table.named())
    table.stepper.warn_of_lost_updates(names)
    tensors.make_equal(communicator)
    broadcast_state(
        *(communicator, table.optimizer, 0),
        leaves_out=table.ignored.covers,
        check=functools.partial(check_state_keys, table.optimizer, names),
        keeps_state=table.ignored.keeps_state,
    )

"""DistributedOptimizer: makes an optimizer reduce its gradients over the ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import pycomm.compression as methods
from pycomm.errors import attempt
from pycomm.horovod.averaging import (
    Arguments,
    AttachedAveraging,
    Averaging,
    DeltaAveraging,
    Named,
    NamedAveraging,
    is_needed,
    sparse_parameters,
)
from pycomm.horovod.functions import agreed
from pycomm.horovod.names import Adasum, Average, Compression, HorovodInternalError, checked_op
from pycomm.horovod.process_sets import ProcessSet, global_process_set, known_set, known_world, world
from pycomm.optim.parameters import checked_optimizer, unwrapped

_LATE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): the gradients "
    "are not reduced a second time, so that this is only a note"
)


class Control:
    """Horovod's methods of one optimizer, and their state."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        self._arguments = arguments
        self._skips, self._synchronized = False, False
        self._averaging: Averaging | None = None
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        try:
            self.begin(optimizer)
        except BaseException:
            self._hook.remove()
            raise

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to reduce the gradients of ``optimizer``, among the present ranks. Collective."""
        here = world()
        self._averaging = self._make(optimizer) if self._arguments.process_set.included() else None
        here.on_shutdown.append(weakref.WeakMethod(self.end))
        self._world = here

    def _make(self, optimizer: torch.optim.Optimizer) -> Averaging:
        arguments = self._arguments
        if arguments.op == Adasum and world().size > 1:
            return DeltaAveraging(optimizer, arguments)
        if arguments.sparse or is_needed(arguments):
            return NamedAveraging(optimizer, arguments)
        return AttachedAveraging(optimizer, arguments)

    def end(self) -> None:
        """Stop reducing; steps are errors from then on."""
        if self._averaging is not None:
            self._averaging.detach()

    def remove(self) -> None:
        """Restore the optimizer."""
        self.end()
        self._hook.remove()

    @property
    def has_ended(self) -> bool:
        """Whether Horovod has been shut down since."""
        return known_world() is not self._world

    def synchronize(self) -> None:
        """Return once all gradients are reduced. Collective if some are not yet."""
        self._require_begun()
        self._average()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let a ``step()`` inside use the gradients as they are: ``synchronize()`` has been called."""
        if self._arguments.op == Adasum:
            raise ValueError("skip_synchronize() cannot be combined with op=Adasum, which combines what steps changed")
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after every ``passes`` backward passes. All ranks must call it, between two steps."""
        self._require_begun()
        _require_passes(passes)
        if self._averaging is not None:
            self._averaging.set_passes(passes)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._require_begun()
        skips, late = self._skips, self._synchronized
        self._synchronized = False
        if skips:
            return None
        if late:
            warnings.warn(_LATE, stacklevel=4)
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._average()
            return None

        def reduced() -> Any:
            loss = closure()
            self._average()
            return loss

        return ((args[0], reduced, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reduced})

    def _average(self) -> None:
        if self._averaging is not None:
            self._averaging.synchronize()

    def _require_begun(self) -> None:
        if self.has_ended:
            raise HorovodInternalError(
                "Horovod has been shut down since this optimizer was wrapped: its gradients are not reduced; call "
                "hvd.init() and hvd.DistributedOptimizer(optimizer, ...) again"
            )


def control_of(optimizer: torch.optim.Optimizer) -> Control | None:
    """Return the control that ``DistributedOptimizer`` added to ``optimizer``, or ``None``."""
    return vars(unwrapped(optimizer)).get("_horovod")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    loss_scaler: Any = None,
    **unknown: Any,
) -> torch.optim.Optimizer:
    """Reduce the gradients of ``optimizer`` over the ranks, and return it: the same object.

    It gets three more methods: ``synchronize()``, the context ``skip_synchronize()`` and
    ``set_backward_passes_per_step(passes)``. With ``Average`` and ``Sum``, and dense gradients, this is
    :func:`pycomm.attach`: gradients are reduced in buckets while ``backward()`` runs, until it returns. With other
    reductions, sparse gradients or a compression of your own they are reduced one by one, by name, until ``step()`` or
    ``synchronize()`` returns. All ranks of ``process_set`` must call this. The first rank's named parameters and
    optimizer state are copied to all; buffers are not, as no argument names them.

    Args:
        optimizer: any of torch's, or a trainer's proxy of one; with ``Adasum``, the changes made by its steps are
            combined, not the gradients.
        named_parameters: names and parameters, ``model.named_parameters()``; all of the optimizer's, and maybe more.
            ``None``: generated names.
        compression: ``Compression.none`` or ``.fp16``; one of pycomm's methods, ``pycomm.DGC(0.001)``; or a class with
            ``compress`` and ``decompress``.
        backward_passes_per_step: passes whose gradients are added up before they are reduced.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        gradient_predivide_factor: checked, otherwise without effect: averages neither overflow nor underflow, as every
            bucket is scaled separately.
        num_groups, groups: parameters of a group are reduced together; without effect where buckets are used.
        sparse_as_dense: convert sparse gradients to dense ones for the reduction.
        process_set: the ranks; other ranks step independently.
        loss_scaler: the ``GradScaler`` that the loss is scaled by, for methods of pycomm's that carry state: with one,
            residuals follow changes of the scale. Horovod has no such argument.
        unknown: refused, each by name.

    Raises:
        TypeError, ValueError: an argument is wrong; a parameter has no name, or two have one; the optimizer is wrapped
            already, or another wrapper averages its parameters; or the ranks disagree (on every rank).
    """
    if isinstance(num_groups, int) and num_groups:
        warnings.warn("num_groups= has been replaced by groups=", DeprecationWarning, stacklevel=2)
    if groups is None:
        groups = num_groups or None
    kept = (compression, backward_passes_per_step, op, groups, sparse_as_dense, process_set)
    given = Arguments([], *kept, loss_scaler=loss_scaler)
    _wrap(optimizer, *_agreed(optimizer, named_parameters, given, gradient_predivide_factor, unknown))
    return optimizer


def _agreed(
    optimizer: Any, named_parameters: Any, given: Arguments, predivide_factor: Any, unknown: Collection[str]
) -> tuple[torch.optim.Optimizer, Arguments]:
    """Return the result of :func:`_checked`, if it succeeds on all ranks of the process set. Collective."""
    ranks, misplaced = known_set(given.process_set, included=False)
    outcome = attempt(lambda: _checked(optimizer, named_parameters, given, predivide_factor, unknown), misplaced)
    if ranks.included():
        outcome = agreed(outcome, "DistributedOptimizer", ranks, lambda made: _lines(made[1]))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _checked(
    optimizer: Any, named_parameters: Any, given: Arguments, predivide_factor: Any, unknown: Collection[str]
) -> tuple[torch.optim.Optimizer, Arguments]:
    """Return the optimizer inside a proxy, and the checked arguments; raise the first error."""
    _require_no_others(unknown)
    inner = checked_optimizer(optimizer)
    named = _named_parameters_of(inner, named_parameters)
    known = control_of(inner)
    if known is not None and not known.has_ended:
        raise ValueError("optimizer has been passed to DistributedOptimizer before: leave one of the two calls out")
    _require_groups(given.groups)
    _require_passes(given.passes)
    chosen = checked_op(given.op)
    _require_factor(predivide_factor, chosen)
    _require_compression(given.compression)
    is_dense, sparse = bool(given.sparse_as_dense), sparse_parameters(inner, named)
    return inner, replace(given, named=named, op=chosen, sparse_as_dense=is_dense, sparse=sparse)


def _named_parameters_of(optimizer: torch.optim.Optimizer, given: Iterable[Any] | None) -> Named:
    """Return the ``given`` names, or names by the positions in the optimizer's groups."""
    own = [
        (f"allreduce.noname.{i}.{j}", param)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if given is None:
        return own
    if isinstance(given, torch.nn.Module):
        raise TypeError(f"named_parameters is a {type(given).__name__}, wanted model.named_parameters()")
    named = list(given)
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(f"named_parameters has a {type(item).__name__}, wanted pairs: model.named_parameters()")
    twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
    if twice:
        raise ValueError(f"named_parameters has the name {twice[0]!r} more than once: put the model's name in front")
    known = {id(param) for _, param in named}
    for position, param in own:
        if id(param) not in known:
            where = position.removeprefix("allreduce.noname.")
            raise ValueError(f"named_parameters leaves out the optimizer's parameter {where} (group.position)")
    return named


def _require_groups(groups: Any) -> None:
    """Raise TypeError or ValueError unless ``groups`` is a number, or a list of lists of tensors, or ``None``."""
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups is {groups}, wanted a number that is not negative")
        return
    if not isinstance(groups, list):
        raise TypeError(f"groups is a {type(groups).__name__}, wanted a number or a list of lists of tensors")
    seen: set[int] = set()
    for group in groups:
        for param in group:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"groups has a {type(param).__name__}, wanted lists of tensors")
            if id(param) in seen:
                raise ValueError("groups has a parameter twice")
            seen.add(id(param))


def _lines(arguments: Arguments) -> list[str]:
    """Return the settings that must be the same on all ranks."""
    compression = arguments.compression
    groups = arguments.groups
    return [
        f"op={arguments.op.name}",
        f"backward_passes_per_step={arguments.passes}",
        f"compression={getattr(compression, '__name__', None) or type(compression).__name__}",
        f"groups={[len(group) for group in groups] if isinstance(groups, list) else groups}",
        f"sparse_as_dense={arguments.sparse_as_dense}",
        f"{len(arguments.sparse)} sparse parameters",
        *(f"{name}: {list(param.shape)} {param.dtype}" for name, param in arguments.named),
    ]


def _wrap(optimizer: Any, inner: Any, arguments: Arguments) -> None:
    """Reduce the gradients of ``inner``; ``optimizer`` may be a trainer's proxy around it."""
    known = control_of(inner)
    if known is not None:
        known.remove()
    control = Control(inner, arguments)
    for each in {id(inner): inner, id(optimizer): optimizer}.values():
        each._horovod = control  # a copy or a pickle of the optimizer does not have these
        each.synchronize, each.skip_synchronize = control.synchronize, control.skip_synchronize
        each.set_backward_passes_per_step = control.set_backward_passes_per_step
        each._parameter_names = {param: name for name, param in arguments.named}


def _require_no_others(unknown: Collection[str]) -> None:
    if unknown:
        raise TypeError(
            f"DistributedOptimizer() has no argument {sorted(unknown)[0]!r}: leave it out; see pycomm.attach for what "
            "else there is"
        )


def _require_passes(passes: Any) -> None:
    if not isinstance(passes, int) or isinstance(passes, bool):
        raise TypeError(f"backward_passes_per_step is {passes!r}, wanted an integer")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}, wanted 1 or more")


def _require_factor(factor: Any, op: Any) -> None:
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise TypeError(f"gradient_predivide_factor is {factor!r}, wanted a number")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor is {factor}, wanted a positive number")
    if factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor is {factor}, and op is {op.name}: it works with Average only")


def _require_compression(compression: Any) -> None:
    known = isinstance(compression, methods.Compression | str) or compression is None
    if not known and not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression is {compression!r}, wanted hvd.Compression.none or .fp16, one of pycomm's methods, or a "
            "class with compress and decompress"
        )

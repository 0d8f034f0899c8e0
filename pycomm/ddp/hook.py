"""Communication hook of DistributedDataParallel, which averages gradients by any compression method."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import signature
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression
from pycomm.ddp.comparison import PassComparison
from pycomm.ddp.registration import HookSettings, Registration, checked_settings
from pycomm.ddp.steps import Steps
from pycomm.errors import attempt
from pycomm.optim.guard import training_alone
from pycomm.optim.module_hooks import watch_copies
from pycomm.optim.parameter_checks import check_parameters
from pycomm.torch_internals import GradBucket
from pycomm.torch_internals.wrappers import (
    add_communication_hook,
    communication_hooks,
    divides_by_active_ranks,
    zero_buckets,
)
from pycomm.training.reductions.requests import StopRequest


def register(
    ddp_model: DistributedDataParallel,
    *,
    compression: Compression | str | None = None,
    loss_scaler: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    algorithm: str = "auto",
    per_rank: Iterable[str] = (),
    check_replicas: int = 1000,
    timeout: timedelta | float | None = None,
) -> HookHandle:
    """Average the gradients of ``ddp_model`` through pycomm, with optional ``compression``.

    DistributedDataParallel is unchanged: buckets, ``no_sync()``, ``join()``, ``static_graph``,
    ``find_unused_parameters`` and ``gradient_as_bucket_view`` work as before, and so do optimizers, GradScaler
    and checkpoints. Its buckets travel over a :class:`pycomm.Communicator` on ``ddp_model.process_group``, of
    whatever backend. Collective.

    Args:
        ddp_model: the wrapped model; it must have no communication hook yet, nor ``mixed_precision``.
        compression: as for :func:`pycomm.attach`; ``None`` sends gradients as they are.
        loss_scaler: the :class:`pycomm.LossScaler` or ``torch.amp.GradScaler`` in use, or any object with the
            same ``scale`` method. Required by methods that carry state, which is kept without the loss scale.
            A step with an overflow on any rank leaves the state unchanged, and gradients NaN on all ranks.
        optimizer: the optimizer in use, to check that the method suits it, such as DGC its momentum, and to compare its
            hyperparameters from the first step on. Others are found by their steps, and compared from then on.
        algorithm: name of the algorithm that sums dense buckets; see ``Communicator.all_reduce``.
        per_rank: keys of ``optimizer.param_groups``, such as "lr", whose numbers may differ between ranks.
        check_replicas: number of passes after which parameters are compared; at the beginning also after 1, 2, 4, 8,
            ... passes. 0: never.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Returns:
        The handle of the hook, which lives as long as ``ddp_model``, even if you do not keep it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError, ValueError: an argument is wrong, the model has a hook already or sparse gradients, or the
            ranks' settings differ (on every rank). Everything is undone then. From ``backward()``: ValueError if the
            optimizers' numbers differ between ranks, and RuntimeError if a rank has left out a batch or made another
            number of steps, or parameters differ. From ``optimizer.step()``: RuntimeError if nothing was averaged since
            many steps.
    """
    tuning = {"algorithm": algorithm, "per_rank": per_rank, "check_replicas": check_replicas}
    request = attempt(lambda: _checked(ddp_model, compression, loss_scaler, optimizer, **tuning))
    communicator = Communicator(getattr(ddp_model, "process_group", None), timeout)
    try:
        settings, names = agreed(communicator.channel.all_gather_bytes, request, "register", _lines)
        communicator.all_reduce(torch.zeros(1), algorithm=algorithm)  # raises if there is no such algorithm
        return _install(ddp_model, names, communicator, settings)
    except BaseException:
        communicator.close()
        raise


def _checked(
    ddp_model: Any, compression: Any, loss_scaler: Any, optimizer: Any, **tuning: Any
) -> tuple[HookSettings, dict[str, torch.Tensor]]:
    """Return the settings, and by name the parameters that DistributedDataParallel does not ignore."""
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model is a {type(ddp_model).__name__}, wanted a DistributedDataParallel; for a plain module, use "
            "pycomm.attach"
        )
    _slot_of(ddp_model)
    for name, module in ddp_model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{name!r} has sparse=True; pycomm reduces dense gradients")
    ignored = ddp_model.parameters_to_ignore
    names = {name: param for name, param in ddp_model.module.named_parameters() if name not in ignored}
    check_parameters({name: param for name, param in names.items() if param.requires_grad})
    return checked_settings(compression, loss_scaler, optimizer, **tuning), names


def _lines(checked: tuple[HookSettings, Mapping[str, torch.Tensor]]) -> dict[str, list[str]]:
    """Return lines that must be equal on all ranks."""
    settings, names = checked
    return {"setting": settings.lines(), "parameter": [f"{name}: {signature(p)}" for name, p in names.items()]}


class _Slot:
    """Slot for a handle in a DistributedDataParallel, whose hook cannot be removed.

    Attributes:
        handle: handle that averages; ``None`` after its removal, for DistributedDataParallel's own all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.handle: HookHandle | None = None
        self.group = group


def _pycomm_hook(slot: _Slot, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
    if slot.handle is None:
        return allreduce_hook(slot.group, bucket)
    return slot.handle._take(bucket)


def _slot_of(ddp_model: DistributedDataParallel) -> _Slot | None:
    """Return the slot of an earlier, removed handle; ``None`` if the model never had a hook."""
    for hook, state in communication_hooks(ddp_model):
        if not isinstance(state, _Slot):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            own = ddp_model.mixed_precision is not None
            advice = "use autocast in place of mixed_precision=" if own else "wrap the model again, without it"
            raise ValueError(f"ddp_model already has a communication hook, {name}, and takes only one: {advice}")
        if state.handle is not None:
            raise ValueError("ddp_model already has a hook of pycomm's: remove() its handle first")
        return state
    return None


def _install(
    ddp_model: DistributedDataParallel,
    names: Mapping[str, torch.Tensor],
    communicator: Communicator,
    settings: HookSettings,
) -> HookHandle:
    """Create the handle and install it in the model, on all ranks or on none."""

    def install() -> tuple[HookHandle, _Slot]:
        handle, slot = HookHandle(ddp_model, names, communicator, settings), _slot_of(ddp_model)
        if slot is None:
            slot = _Slot(ddp_model.process_group)
            add_communication_hook(ddp_model, slot, _pycomm_hook)
        return handle, slot

    made, slot = agreed(communicator.channel.all_gather_bytes, attempt(install), "register")
    slot.handle = made
    made._slot = slot
    return made


class HookHandle:
    """Handle of pycomm's communication hook in a DistributedDataParallel. Created by :func:`pycomm.ddp.register`.

    Attributes:
        communicator: communicator that averages gradients.
        method: compression method.
    """

    _slot: _Slot | None = None

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        names: Mapping[str, torch.Tensor],
        communicator: Communicator,
        settings: HookSettings,
    ) -> None:
        # Weakly: the model holds its hook where the garbage collector does not see it.
        self._model = weakref.ref(ddp_model)
        self._group = ddp_model.process_group
        self.communicator, self.method = communicator, settings.method
        self._params = list(names.values())  # keeps the ids valid
        by_id = {id(param): name for name, param in names.items()}
        like = next(param for param in self._params if param.requires_grad)
        self._registration = Registration([communicator], settings, like, by_id, "a sum over the ranks")
        self._comparison = PassComparison(
            *(ddp_model, names, communicator, settings, like.device, self._registration.state),
            reads_late=self._registration.on_gpu,
        )
        requires_passes = communicator.size > 1 and settings.tuning.check_replicas > 0
        self._comparison.optimizers.requires_passes = requires_passes
        self._steps = Steps(self._registration, self._comparison)
        self._watches = [self._comparison, watch_copies(ddp_model.module)]
        for bucket in zero_buckets(ddp_model):  # so that state can be loaded before the first step
            self._registration.exchanges.of(bucket.index(), bucket.parameters())

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        model = self._model()
        assert model is not None, "the hook is called by its model"
        if model.process_group is not self._group:
            raise RuntimeError("the model has another process group now: remove() this handle and register again")
        # A gradient that was not computed is one of zeros in the bucket.
        zeros_are_unused = model.find_unused_parameters or model.static_graph
        return self._steps.take(bucket, divides_by_active_ranks(model), zeros_are_unused)

    def stats(self) -> dict[str, Any]:
        """Return the counters since :func:`pycomm.ddp.register`.

        Returns:
            ``bytes_sent`` (payload bytes that this rank has handed to the transport), ``steps`` (backward
            passes that were averaged), ``wait_seconds`` (time for which communication held up
            ``backward()``; on a GPU only the host's part of it), ``nonfinite_steps`` (those that left
            compression state unchanged because of non-finite gradients), ``last_nonfinite`` (source of
            the last such gradient, the same on all ranks, or ``None``; on GPUs only compression that
            carries state knows it), ``num_buckets`` (of DistributedDataParallel), ``transport``, and the
            method's own, as in ``Reducer.stats``.
        """
        return self._registration.stats()

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to end the training together; see :meth:`pycomm.Reducer.request_stop`.

        Raises:
            ValueError: on a GPU.
        """
        if self._registration.on_gpu:
            raise ValueError("request_stop() on a GPU requires pycomm.attach() in place of pycomm.ddp.register()")
        self._comparison.requests.request_stop(str(reason))

    @property
    def stop_requested(self) -> StopRequest:
        """Request to stop that all ranks have received; see :attr:`pycomm.Reducer.stop_requested`."""
        return self._comparison.requests.stop_requested

    def paused(self) -> AbstractContextManager[None]:
        """Permit this rank to train copies of the model alone inside the context, as in the inner loop of MAML."""
        return training_alone()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that compression carries from step to step on *this* rank, to be saved by every rank.

        The format is the same as ``Reducer.state_dict``'s, with the names of ``ddp_model.module``, and each can load
        the other's state. It loads with ``torch.load(weights_only=True)``.
        """
        return self._registration.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, strict: bool = True) -> None:
        """Load state that :meth:`state_dict`, or ``Reducer.state_dict``, returned.

        Has the same arguments and errors as :meth:`pycomm.Reducer.load_state_dict`.
        """
        self._registration.load_state_dict(state, strict)

    def remove(self) -> None:
        """Return to DistributedDataParallel's own all-reduce, and release all resources. Idempotent.

        Call it on all ranks between the same steps. Residuals are lost; :meth:`state_dict` has them until then.
        :func:`pycomm.ddp.register` may be called again.
        """
        if self._slot is None:
            return
        self._slot.handle, self._slot = None, None
        for watch in self._watches:
            watch.remove()
        self._registration.close()

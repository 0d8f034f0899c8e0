"""Hugging Face Transformers: a callback that lets pycomm average the Trainer's gradients."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from pycomm.integrations.averaging import Averaging, averaging_of, library
from pycomm.torch_internals import uncompiled
from pycomm.training.cost.named import checked_method
from pycomm.training.reductions.requests import stop_on_signal

_transformers: Any = library("transformers", whose="pycomm.integrations.transformers")
_Callback: Any = _transformers.TrainerCallback

_LOG = logging.getLogger("pycomm")

_ELSEWHERE = {
    "is_deepspeed_enabled": "DeepSpeed",
    "is_fsdp_enabled": "FSDP",
    "is_fsdp_xla_enabled": "FSDP of XLA",
}
"""Attributes of the Trainer that are set if something else averages gradients, and its name."""


class PycommCallback(_Callback):
    """Callback that lets pycomm average a Trainer's gradients: ``Trainer(..., callbacks=[PycommCallback()])``.

    When training begins, the Trainer's DistributedDataParallel gets pycomm's communication hook
    (:func:`pycomm.ddp.register`); a model without a wrapper is attached (:func:`pycomm.attach`). With one process
    nothing happens. Accumulation, clipping, float16, evaluation and checkpoints are the Trainer's. The state of
    compression is saved in each checkpoint's folder, in one file per rank. ``train(resume_from_checkpoint=...)`` loads
    it, also on another number of ranks.

    Args:
        compression: as for :func:`pycomm.attach`.
        algorithm: as for :func:`pycomm.attach`.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.
        stop_on: signals, such as ``(signal.SIGTERM,)``. When any rank receives one, all ranks save a checkpoint and end
            the training at the same step.

    Attributes:
        averaging: object that averages, with ``stats()``; ``None`` before training. Its counters stay readable
            afterwards.

    Raises:
        TypeError: ``compression`` is no method.
        ValueError: (when training begins) the Trainer runs FSDP or DeepSpeed, something else averages these gradients
            already, or ranks differ.
        RuntimeError: (when training begins) the Trainer has a ``train`` of its own, or (at the next step) the callback
            was added after training had begun.
    """

    def __init__(
        self, *, compression: Any = None, algorithm: str = "auto", timeout: Any = None, stop_on: Sequence[int] = ()
    ) -> None:
        checked_method(compression)
        self._stop_on, self._signals = tuple(stop_on), contextlib.ExitStack()
        self._options = {"compression": compression, "algorithm": algorithm, "timeout": timeout}
        self._trains = False
        self.averaging: Averaging | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start averaging; load the state in the checkpoint that the Trainer resumes from."""
        training = _training()
        _refuse_other_owners(training.trainer)
        if self.averaging is not None:
            self.averaging.detach()  # of a training that ended with an exception
        self.averaging = _averaging(training.trainer, kwargs["optimizer"], self._options)
        self._trains = True
        if self._stop_on:
            self._signals.enter_context(stop_on_signal(self.averaging, *self._stop_on))
        if training.folder is not None:
            self.averaging.load(training.folder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise if the callback was added after training had begun."""
        if not self._trains:
            raise RuntimeError(
                "PycommCallback was added after training had begun, too late to average anything: pass it to "
                "Trainer(callbacks=[...]), or to add_callback before train()"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Trainer save and stop on all ranks if any rank has requested it."""
        if self.averaging is not None and self.averaging.stop_requested:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save this rank's state into the folder of the checkpoint that the Trainer has just written."""
        if self.averaging is None or self.averaging.inner is None or args.save_only_model:
            return
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_hyper_param_search:
            if state.is_world_process_zero:
                _LOG.warning(
                    "a search for hyperparameters keeps its checkpoints elsewhere: pycomm's state is not among them"
                )
        else:
            self.averaging.save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop averaging."""
        self._trains = False
        self._signals.close()
        if self.averaging is not None:
            self.averaging.detach()


class _Training(NamedTuple):
    """The Trainer whose ``train`` is running, and the folder of the checkpoint that it resumes from, if any."""

    trainer: Any
    folder: str | None


def _training() -> _Training:
    """Return the innermost training among the callers.

    Callbacks get neither the Trainer nor the folder that it resumes from. Both are local variables of
    ``Trainer.train``, which is on the stack.
    """
    code = inspect.unwrap(_transformers.Trainer.train).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError(
            "PycommCallback works with Trainer.train, which has not called it: this Trainer has its own train. "
            "Leave PycommCallback out, and call pycomm.ddp.register(model) there, once DistributedDataParallel is "
            "around the model, or pycomm.attach(optimizer, model) without one"
        )
    folder = frame.f_locals.get("resume_from_checkpoint")
    return _Training(frame.f_locals["self"], str(folder) if folder else None)


def _refuse_other_owners(trainer: Any) -> None:
    """Raise ValueError if the Trainer averages gradients by something that takes no hook."""
    for attribute, name in _ELSEWHERE.items():
        if getattr(trainer, attribute, False):
            raise ValueError(
                f"PycommCallback cannot be combined with {name}, which averages gradients itself: train without "
                f"{name}, or leave the callback out; dist.init_process_group('pycomm') carries what FSDP sends"
            )


def _averaging(trainer: Any, optimizer: Any, options: dict[str, Any]) -> Averaging:
    """Start averaging for a Trainer that has prepared its model and optimizer."""
    model, inner = trainer.model_wrapped, uncompiled(trainer.model_wrapped)
    if trainer.args.world_size == 1:
        return Averaging(None, optimizer)
    if not isinstance(inner, DistributedDataParallel) and inner is not uncompiled(trainer.model):
        raise ValueError(
            f"the Trainer has put a {type(inner).__name__} around the model, which may average gradients itself: leave "
            "PycommCallback out"
        )
    return averaging_of(
        model,
        optimizer,
        is_last=lambda: bool(trainer.accelerator.sync_gradients),
        loss_scaler=getattr(trainer.accelerator, "scaler", None),
        options=options,
        whose="PycommCallback",
    )

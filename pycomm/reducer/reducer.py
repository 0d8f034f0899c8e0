"""What ``attach`` returns: the public face of averaging, and the hooks on optimizer and module that keep it alive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pycomm import checks
from pycomm.communicator import Communicator
from pycomm.optim.attached import forget
from pycomm.reducer import clipping, norms
from pycomm.reducer.autograd_hooks import ModelHooks
from pycomm.reducer.checkpoint import gather_state, select_state
from pycomm.reducer.engine import Engine
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.passes import Passes
from pycomm.reducer.settings import Settings
from pycomm.reducer.wrappers import unwatch_constructions


class Reducer:
    """Averages gradients over the ranks while backward runs. Made by :func:`pycomm.attach`.

    It lives as long as the optimizer, or the module that was given: their hooks hold it, those of the
    parameters do not.
    """

    _detached = False
    _last_stats: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        table: ParameterTable,
        communicator: Communicator,
        settings: Settings,
    ) -> None:
        self.optimizer, self.module = table.optimizer, table.module
        self._communicator, self._settings = communicator, settings
        self._table = table
        self._engine = engine = Engine(table, communicator, settings)
        self._window, self._progress = engine.window, engine.progress
        self._passes = Passes(communicator, settings, engine)
        # One rank that compresses nothing has nothing to do.
        self._idle = communicator.size == 1 and not settings.compression.transactional and not settings.clip_local_norm
        if self._idle:
            table.admit()
            return
        try:
            self._install()
        except BaseException:
            self._uninstall()
            raise

    def _install(self) -> None:
        self._idle = False
        self._passes.hook(self._table.slots())
        self._passes.hook(self._table.admit())
        self._passes.model_hooks = ModelHooks(
            self.optimizer, self.module, self._before_step, self._progress.stepped, self
        )
        if self.module is not None and self._settings.buffers != "local":
            self._engine.buffers = BufferSync(self.module, self._settings.buffers, self._communicator)

    def _uninstall(self) -> None:
        self._passes.unhook()
        self._engine.buffers = None

    # Methods of this object, so that the hooks hold it, and not only the parts that are called.

    def _before_step(self) -> None:
        self._passes.require_averaged()

    def before_forward(self) -> None:
        """Look for new parameters, and for something else that averages these; a hook of the module calls it."""
        self._passes.before_forward()

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or will be once it is unfrozen."""
        return self._table.knows(param)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters that are averaged here, or will be once they are unfrozen."""
        return dict(self._table.named())

    def flush(self) -> None:
        """Reduce a ragged last accumulation window; before unscaling, clipping and ``step``. Collective.

        Nothing happens where no rank has gradients waiting. A rank whose window was just complete has
        nothing to flush; others may have fewer passes, or none, if :meth:`set_weight` is in use, and as
        few as each other otherwise.
        """
        self._require_attached()
        if self._idle or self._window.complete:
            self._window.complete = False
            return
        self._passes.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are this rank's alone: nothing is sent, and nothing waits for other ranks.

        For passes that are no training step of this optimizer: a saliency map, a penalty, the generator's
        pass through its discriminator (``with discriminator_reducer.paused(): generator_loss.backward()``).
        What they leave in ``.grad`` is never averaged and enters no residual. If it is still there at the
        next pass outside, or at ``optimizer.step()``, that is an error: ``zero_grad()`` first. Not
        collective: some ranks may pause, or all.

        Raises:
            RuntimeError: an accumulation window is open.
        """
        self._require_attached()
        with self._passes.paused():
            yield

    def skip_step(self) -> None:
        """Say that ``optimizer.step()`` is left out on purpose for the last averaged gradients, on all ranks.

        Only methods that carry state ask for it: what they sent of these gradients is lost then, not sent later.
        """
        self._require_attached()
        self._progress.left_out()

    def set_weight(self, num_samples: float) -> None:
        """Say, before ``backward()``, that the loss is the mean over ``num_samples`` samples, or tokens.

        From now on ``.grad`` gets the mean over the samples of all ranks, and of all passes of an
        accumulation window: the sum of n_p times g_p over the sum of n_p. So the loss of each pass is to
        be the plain mean over its own samples, not divided by the number of passes. Holds for later
        passes until it is called again. All ranks call it, at the same step at first. With
        ``average=False`` the result is that mean times the world size. A rank without samples for this
        step sets 0; its gradients, NaN or not, do not count.

        Args:
            num_samples: may be fractional.

        Raises:
            TypeError, ValueError: not a finite number, or negative; 0 inside an accumulation window, or
                the window's first passes went without. ``backward()`` raises ``ValueError``, on every
                rank, where the weights of all ranks sum to zero.
        """
        self._require_attached()
        self._passes.forget_abandoned()
        factor = self._window.weights.set(num_samples, self._window.num_passes)
        if self._idle:
            self._install()
        if factor != 1.0:
            for grad in self._table.gradients().values():
                grad.zero_() if factor == 0.0 else grad.mul_(factor)  # of no samples it may be NaN

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale the averaged gradients so that their norm, of all together and without the loss scale, is in bounds.

        Between ``backward()`` and ``step()``, as ``torch.nn.utils.clip_grad_norm_``, without reading the
        gradients a second time: norms are taken as the buckets arrive, while backward runs (from the
        second step on). Where pycomm's kernels step
        (:func:`pycomm.fuse`, :func:`pycomm.master_weights`) the factor is applied by them, and
        ``.grad`` stays as it is. With torch's GradScaler, ``unscale_`` first. All ranks get the same.

        Args:
            max_norm: the bound. error_if_nonfinite: raise where the norm is not finite; waits for a GPU.

        Returns:
            The norm before clipping: a 0-d tensor, float64, on the parameters' device.

        Raises:
            TypeError, ValueError: ``max_norm`` is no positive number.
            RuntimeError: the norm is not finite, naming a parameter; an accumulation window is open.
        """
        self._require_attached()
        max_norm = checks.positive("max_norm", max_norm)
        if self._window.is_open:
            raise RuntimeError("clip_grad_norm inside an accumulation window: call flush() first")
        self._engine.measures = True
        norm = clipping.unscaled_norm(self._table, self._settings.loss_scaler)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: see {self.name_of_not_finite()}")
        clipping.clip(self._table, norm, max_norm)
        return norm

    def settle(self) -> bool:
        """Flush a ragged window; then whether all gradients are finite, alike on all ranks. Waits for a GPU.

        Collective only where ``accumulate`` is above 1. What :class:`pycomm.LossScaler` asks.
        """
        if self._settings.accumulate > 1:
            self.flush()
        return (
            bool(torch.isfinite(norms.squared_norm(self._table.flights, self._table.slots())))
            if self._idle
            else self._engine.settle()
        )

    def name_of_not_finite(self) -> str | None:
        """Return where the first value that is not finite is, or came from; ``None`` if all are. Waits for a GPU."""
        return self._engine.name_of_not_finite()

    def stats(self) -> dict[str, Any]:
        """Counters since ``attach``.

        Returns:
            ``bytes_sent`` (payload bytes that this rank has handed to the transport), ``steps``
            (reductions), ``wait_seconds`` (how long ``backward()`` was held up by communication; on a
            GPU only the host's part of it, almost nothing),
            ``nonfinite_steps`` and ``last_nonfinite`` (steps in which compression state was left
            alone, and whose gradient was to blame), ``num_buckets``, ``transport``. With TopK and DGC
            also ``selections`` (of parameters), ``selections_missed`` (those for which the last step's
            threshold was none to go by, which costs another read) and their ratio ``miss_rate``.
        """
        if self._detached:
            return dict(self._last_stats)
        return self._engine.stats()

    def state_dict(self) -> dict[str, Any]:
        """What compression carries from step to step on *this* rank.

        Save it per rank, or all ranks' by a distributed checkpoint.

        ``["ranks"][str(rank)][parameter_name]["residual"]`` is what this rank has not sent yet (DGC's v), as
        its contribution to the average, without the loss scale: a tensor of the parameter's shape. With
        momentum correction ``["velocity"]`` is DGC's u, in the same units; PowerSGD has ``["q"]``, equal on
        all ranks. ``world_size``, ``method`` and ``steps``, how many were committed, stand beside. Loads with
        ``torch.load(weights_only=True)``; ``torch.distributed.checkpoint.save({"reducer": reducer})`` keeps
        every rank's.
        """
        self._require_attached()
        return gather_state(self._table.flights, self._settings, self._communicator, int(self._engine.committed_steps))

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]], *, strict: bool = True) -> None:
        """Take back what :meth:`state_dict` gave.

        Args:
            state: this rank's own, one with the ``ranks`` of all, or the list of all ranks'. From another
                number of ranks than there are now, residuals and velocities are handed out so that their
                sums over the ranks are kept.
            strict: whether missing and unknown parameters, and another method's state, are errors.

        Raises:
            ValueError: another rank's or world size's single dict, another method's, names or shapes
                that do not fit.
        """
        self._require_attached()
        chosen, steps = select_state(state, self._table.flights, self._settings, self._communicator, strict)
        for flight in self._table.flights:
            flight.exchange.load_state(chosen)
        self._engine.committed_steps.fill_(steps)

    def detach(self) -> None:
        """Undo ``attach``: no hooks, ``.grad`` in ordinary memory, shared memory given back. Idempotent."""
        if self._detached:
            return
        self._last_stats = self.stats()
        self._detached = True
        self._uninstall()
        for slot in self._table.slots():
            slot.leave_bucket()
        forget(self)
        unwatch_constructions(self)
        self._communicator.close(self._passes.stopped or None)
        # The shared memory goes with its last view, not when a garbage collector gets to this object.
        self._table.clear()

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")

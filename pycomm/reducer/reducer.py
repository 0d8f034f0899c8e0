"""What ``attach`` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pycomm import kernels
from pycomm.optim.attached import forget
from pycomm.optim.fused import fused_step_of
from pycomm.optim.loss_scaler import LossScaler
from pycomm.optim.master_weights import MasterWeights
from pycomm.reducer import norms
from pycomm.reducer.buckets import method_stats, nonfinite_source
from pycomm.reducer.checkpoint import gather_state, select_state
from pycomm.reducer.engine import Reduction
from pycomm.reducer.wrappers import unwatch_constructions


class Reducer(Reduction):
    """Averages gradients over the ranks while backward runs. Made by :func:`pycomm.attach`."""

    _detached = False
    _last_stats: Mapping[str, Any] = MappingProxyType({})

    def flush(self) -> None:
        """Reduce a ragged last accumulation window; before unscaling, clipping and ``step``. Collective.

        Nothing happens where no rank has gradients waiting. A rank whose window was just complete has
        nothing to flush; others may have fewer passes, or none, if :meth:`set_weight` is in use, and as
        few as each other otherwise.
        """
        self._require_attached()
        if self._idle or self._complete:
            self._complete = False
            return
        self._flush()

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
        with self._pausing():
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
        self._forget_abandoned_pass()
        factor = self._units.weights.set(num_samples, self._num_passes)
        if self._idle:
            self._install()
        if factor != 1.0:
            for grad in self._roster.gradients().values():
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
        max_norm = norms.require_max_norm("max_norm", max_norm)
        if self._num_passes > 0:
            raise RuntimeError("clip_grad_norm inside an accumulation window: call flush() first")
        self._measures = True
        fused, scaler = fused_step_of(self.optimizer), self._settings.loss_scaler
        unscaled = not isinstance(scaler, LossScaler) or scaler.is_unscaled(self.optimizer)
        if isinstance(fused, MasterWeights) and scaler is not None and not isinstance(scaler, LossScaler):
            raise RuntimeError(
                f"with a {type(scaler).__name__} the gradients of half-precision parameters stay scaled: use "
                "pycomm.LossScaler"
            )
        norm = self._squared_norm(unscaled).sqrt() / (1.0 if unscaled else scaler.get_scale())
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: see {self.name_of_not_finite()}")
        factor = norms.narrowed(norms.clip_factor(norm, max_norm), self._roster.slots())
        if fused is not None:
            fused.pending = fused.pending * (factor.float() if self._on_gpu else float(factor))
        elif self._on_gpu or float(factor) != 1.0:
            torch._foreach_mul_(list(self._roster.gradients().values()), factor)
        return norm

    def settle(self) -> bool:
        """Flush a ragged window; then whether all gradients are finite, alike on all ranks. Waits for a GPU.

        Collective only where ``accumulate`` is above 1. What :class:`pycomm.LossScaler` asks.
        """
        if self._settings.accumulate > 1:
            self.flush()
        if self._idle:
            return bool(torch.isfinite(self._squared_norm(False)))
        if self._finite is None:
            self._finite = all(bool(lane.exchange.finite()) for lane in self._roster.lanes)
        return bool(self._finite)

    def name_of_not_finite(self) -> str | None:
        """Where the first value that is not finite is, or came from; ``None`` if there is none. Waits for a GPU."""
        if self._finite is not None and not bool(self._finite):
            found = next((found for lane in self._roster.lanes if (found := lane.exchange.nonfinite_source())), None)
            if found is not None:
                return found
        name = norms.first_not_finite(self._roster.gradients())
        return None if name is None else f"parameter {name!r}"

    def _squared_norm(self, unscaled: bool) -> torch.Tensor:
        """Of ``.grad``; of what master weights step by, where they have been unscaled."""
        fused = fused_step_of(self.optimizer)
        if isinstance(fused, MasterWeights) and unscaled and self._settings.loss_scaler is not None:
            return norms.total([kernels.squared_norms(fused.unscaled()).sum()])
        return norms.squared_norm(self._roster.lanes, self._roster.slots())

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
        nonfinite_steps = int(self._nonfinite_steps.item())
        return {
            "bytes_sent": sum(lane.exchange.bytes_sent for lane in self._roster.lanes),
            "steps": self._progress.num_reductions,
            "wait_seconds": self._wait_seconds,
            "nonfinite_steps": nonfinite_steps,
            "last_nonfinite": nonfinite_source(self._roster.lanes) if nonfinite_steps > 0 else None,
            "num_buckets": len(self._roster.lanes),
            "transport": "nccl" if self._on_gpu else self._communicator.transport,
            **method_stats(self._roster.lanes),
        }

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
        return gather_state(self._roster.lanes, self._settings, self._communicator, int(self._committed_steps))

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
        chosen, steps = select_state(state, self._roster.lanes, self._settings, self._communicator, strict)
        for lane in self._roster.lanes:
            lane.exchange.load_state(chosen)
        self._committed_steps.fill_(steps)

    def detach(self) -> None:
        """Undo ``attach``: no hooks, ``.grad`` in ordinary memory, shared memory given back. Idempotent."""
        if self._detached:
            return
        self._last_stats = self.stats()
        self._detached = True
        self._uninstall()
        for slot in self._roster.slots():
            if slot.lane is not None and slot.param.grad is slot.lane.bucket.views[slot.index]:
                slot.param.grad = slot.param.grad.clone(memory_format=torch.preserve_format)
        forget(self)
        unwatch_constructions(self)
        self._communicator.close(self._stopped or None)
        # The shared memory goes with its last view, not when a garbage collector gets to this object.
        self._roster.clear()

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")

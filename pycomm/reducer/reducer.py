"""Reducer, which ``attach`` returns: the public face of averaging, kept alive by hooks on optimizer and module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pycomm import checks
from pycomm.descriptions import counted
from pycomm.optim.attached import forget
from pycomm.reducer import clipping
from pycomm.reducer.autograd_hooks import ModelHooks
from pycomm.reducer.buckets import scale_gradients
from pycomm.reducer.checkpoint import gather_state, select_state
from pycomm.reducer.description import description
from pycomm.reducer.engine import Engine
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.passes import Passes
from pycomm.reducer.progress import Progress
from pycomm.reducer.rank_flags import StopRequest
from pycomm.reducer.rank_requests import request_veto
from pycomm.reducer.reducer_hooks import ReducerHooks
from pycomm.reducer.step_trace import StepTrace
from pycomm.reducer.without_backward import WithoutBackward
from pycomm.reducer.wrappers import unwatch_constructions
from pycomm.torch_internals import current_graph_task, is_dtensor


class Reducer:
    """Reducer that averages gradients over the ranks while backward runs. Made by :func:`pycomm.attach`.

    It lives as long as the optimizer or the attached module, whose hooks refer to it (parameters' hooks do not).

    Attributes:
        optimizer, module: the attached ones; ``module`` is ``None`` if ``attach`` was given named parameters.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._detached = False
        self._last_stats: dict[str, Any] = {}
        communicator, settings = engine.communicator, engine.settings
        self._communicator, self._settings = communicator, settings
        self._table, self._window, self._progress = engine.table, engine.window, engine.progress
        self.optimizer, self.module = engine.table.optimizer, engine.table.module
        self._passes = Passes(engine)
        self._without_backward = WithoutBackward(engine, self._passes)
        _say_at_the_end(engine, "its optimizer and model are gone, or its process has ended")
        self._lone_factor = clipping.LoneFactor(engine.table)
        engine.statistics.phases.trace = StepTrace.wanted(communicator.channel.recorder.global_rank, communicator.size)
        # One rank that compresses nothing has nothing to do.
        # (With DTensors it has: gradients that are still to be summed over their mesh.)
        self._idle = communicator.size == 1 and not settings.compression.transactional and not settings.clip_local_norm
        self._idle = self._idle and not engine.policy.survives and self._table.partition is None
        self._idle = self._idle and not any(is_dtensor(param) for _, param in self._table.named())
        if self._idle:
            self._table.admit()
            return
        try:
            self._install()
        except BaseException:
            self._uninstall()
            raise

    def _install(self) -> None:
        self._idle = False
        self._passes.changes.hook(self._table.slots())
        self._passes.changes.hook(self._table.admit())
        hooks = ReducerHooks(self, self._passes, self._engine.progress, self._engine.statistics.phases)
        self._passes.model_hooks = ModelHooks(self.optimizer, self.module, hooks)
        if self.module is not None and self._settings.buffers != "local":
            self._engine.buffers = BufferSync(
                self.module, self._settings.buffers, self._communicator, self._table.ignores
            )

    def _uninstall(self) -> None:
        self._passes.unhook()
        self._engine.buffers = None

    def __repr__(self) -> str:
        if self._detached:
            return f"Reducer(detached after {counted(self._last_stats['steps'], 'reduction')})"
        return f"Reducer({description(self._engine)})"

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came; it changes with ``on_failure="shrink"``.

        The first ones have the numbers of their ranks, newcomers the next ones. This process's place among them is its
        rank now.
        """
        return self._engine.world

    def on_change(self, callback: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> None:
        """Call ``callback(old_world, new_world)`` on each rank that is left whenever :attr:`world` has changed.

        It is called at the end of the ``backward()`` in which that happened, before ``optimizer.step()``: the place
        to divide samples anew, or to scale the learning rate. Never called with ``on_failure="raise"``.
        """
        self._require_attached()
        self._engine.callbacks.append(callback)

    def stats(self) -> dict[str, Any]:
        """Return the counters since ``attach``. On any thread, also while ``backward()`` waits.

        Sends nothing and waits for no rank; on a GPU it waits for the work that it has been given.

        Returns:
            A dict. Always: ``steps``, ``bytes_sent``, ``compression_ratio``, ``num_buckets``, ``transport``,
            ``wait_seconds``, ``pack_seconds``, ``wire_seconds``, ``unpack_seconds``, ``hidden_share``, ``waits``,
            ``nonfinite_steps``, ``last_nonfinite``, ``vetoed_steps``, ``last_veto``. With error feedback also
            ``residual_norm`` and ``compression_error``; with TopK and DGC ``selections``, ``selections_missed``,
            ``miss_rate``; if ranks may be lost ``recoveries``, ``joins`` and ``late``. The reference has a table of
            what each of them means.
        """
        if self._detached:
            return dict(self._last_stats)
        return self._engine.stats()

    def reduce(self) -> None:
        """Average what is in ``.grad`` now, in place of a ``backward()``. Collective.

        For gradients that ``backward()`` did not make: ``torch.autograd.grad``, ``torch.func.grad``, evolution
        strategies, clipping by sample. Write them to ``.grad``, call this, then ``optimizer.step()``. Afterwards
        ``.grad`` is as after ``backward()``, with every method of compression and every scaler. Frozen parameters that
        have a gradient take part, if they have one on all ranks; a parameter without one counts as zeros. It ends an
        accumulation window, and counts as its last pass. Other ranks may call ``backward()`` meanwhile.

        Raises:
            RuntimeError: inside ``backward()``, or the gradients have been averaged already.
            ValueError: frozen parameters have gradients on some ranks only; on every rank.
        """
        self._require_attached()
        if current_graph_task() != -1:
            raise RuntimeError("reduce() inside backward(): call it when backward() has returned")
        if not self._idle:
            self._without_backward.reduce_written()

    def veto_step(self, reason: str = "") -> None:
        """Have this step left out on all ranks. Call it on any rank, before or during its ``backward()``.

        The averages of this step are discarded on all ranks like those that are not finite: compression keeps what it
        had. All ranks go on as usual. With a loss scaler the scaler leaves out the step. Otherwise ``.grad`` is
        ``None`` everywhere, so that ``optimizer.step()`` has nothing to do. It costs nothing unless a rank asks for it.
        :class:`pycomm.LossScaler` keeps its scale, torch's GradScaler lowers it. In an accumulation window the whole
        window is left out. ``stats()`` has ``vetoed_steps`` and ``last_veto``.

        Raises:
            RuntimeError: this step's gradients have been sent, or averaged.
            ValueError: with ``backup``; or without a ``loss_scaler`` on a GPU or with ``shard``.
        """
        self._require_attached()
        request_veto(self._engine, str(reason))
        if self._idle:
            self._install()

    def skip_batch(self) -> None:
        """Take part in this step without a batch, in place of forward and backward; ``.grad`` gets the average.

        The average is that of the ranks that have a batch, as if this rank's weight were zero. The step is the same on
        all ranks: call ``optimizer.step()`` afterwards. If no rank has a batch, ``.grad`` is ``None``. Methods that
        keep residuals weight them in this step as the gradients.

        Raises:
            RuntimeError: after ``backward()``, or in an accumulation window that has gradients already.
            ValueError: on a GPU, with ``on_failure="shrink"`` or ``full_grad=None``, unless :meth:`set_weight` is in
                use.
        """
        self._require_attached()
        if self._idle:
            self._engine.table.drop_gradients()
        else:
            self._without_backward.skip_batch()

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to end the training together. Call it on any rank and thread, or in a signal handler.

        The request travels with the next reduction, and :attr:`stop_requested` becomes true on all ranks when that
        reduction returns (on a GPU two reductions later). So all can save and leave after the same step. Nothing is
        ended by it.
        """
        self._require_attached()
        flags = self._engine.flags
        if self._idle and not flags.stop_requested:
            flags.stop_requested = StopRequest(self._engine.communicator.rank, str(reason))
        elif flags.stop is None:
            flags.stop = str(reason)

    @property
    def stop_requested(self) -> StopRequest:
        """Request to stop that all ranks have heard of: true, with ``rank`` and ``reason``; false before that."""
        return self._engine.flags.stop_requested

    @property
    def is_vetoed(self) -> bool:
        """Whether a rank has vetoed the last step; see :meth:`veto_step`."""
        return bool(self._engine.flags.heard.veto)

    def reduce_now(self) -> None:
        """Average the gradients that there are, whoever made them, unless their averages wait for a step already.

        What ``backward()`` does when it returns, for a rank whose ``.grad`` was set by hand, whose window ends early,
        or which has nothing in this step: it goes with the other ranks' ``backward()`` or ``reduce_now()``. A
        parameter without a gradient counts as zeros. Collective. :mod:`pycomm.horovod` calls it in each step.

        Raises:
            RuntimeError: a gradient was set after the others had been averaged.
        """
        self._require_attached()
        if not self._idle:
            self._without_backward.reduce_now()

    def stay_absent(self) -> int:
        """Take part in the other ranks' reductions without data, until all ranks have called this.

        Averages still divide by the number of all ranks. Gradients are dropped, and parameters remain what they are.

        Returns:
            How many reductions of the others this rank has been absent from.
        """
        self._require_attached()
        if self._idle:
            return 0
        table, count = self._engine.table, 0
        with torch.no_grad(), torch.cuda.device(table.device if table.on_gpu else -1):
            while not self._without_backward.take_part(absent=True):
                count += 1
        return count

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or will be once it is unfrozen."""
        return self._table.knows(param)

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or left alone as ``ignore`` says."""
        return self._table.covers(param)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters that are averaged here, or will be once they are unfrozen, by name."""
        self._table.await_parameters()
        return dict(self._table.named())

    def flush(self) -> None:
        """Average an accumulation window that ended early. Collective; call before unscaling, clipping and ``step``.

        Does nothing if no rank has gradients waiting. If :meth:`set_weight` is in use, the ranks may have had
        different numbers of passes: a rank whose window was complete has already sent its gradients and does
        nothing here, while ranks with fewer passes, or none, join it by this call. Otherwise all ranks must
        have had equally many.
        """
        self._require_attached()
        if not self._idle:
            self._without_backward.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep backward passes inside local to this rank: nothing is sent, and no rank is waited for.

        Use it for passes that are not a training step of this optimizer: a saliency map, a penalty, the generator's
        pass through its discriminator (``with discriminator_reducer.paused(): generator_loss.backward()``).
        Gradients that such passes leave in ``.grad`` are never averaged and enter no residual. It is an error if
        they are still there in the next pass outside, or at ``optimizer.step()``: call ``zero_grad()`` first.
        Not collective: any of the ranks may pause.

        Raises:
            RuntimeError: an accumulation window is open.
        """
        self._require_attached()
        with self._passes.paused():
            yield

    def skip_step(self) -> None:
        """Declare that ``optimizer.step()`` is left out on purpose for the last averaged gradients, on all ranks.

        Only compression methods with state require it: what they sent of these gradients is lost, not sent again.
        """
        self._require_attached()
        self._progress.skipped()

    def set_weight(self, num_samples: float) -> None:
        """Declare, before ``backward()``, that the loss is the mean over ``num_samples`` samples or tokens.

        From now on ``.grad`` gets the mean over the samples of all ranks and of all passes of an
        accumulation window: the sum of n_p g_p divided by the sum of n_p, with g_p the gradient of pass p
        and n_p its ``num_samples``. The loss of each pass must therefore be the plain mean over its own
        samples, not divided by the number of passes. The value holds for later passes until the next call.
        All ranks must make their first call in the same step. With ``average=False`` the result is that
        mean times the world size. A rank that has no samples in this step sets 0; its gradients, even NaN,
        do not count.

        Args:
            num_samples: not negative; may be fractional.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a finite number, or is negative; or, inside an accumulation
                window, it is 0 or the window began without it; or ``backup`` is in use, which it does not go with. On
                every rank, from ``backward()``: all weights are 0.
        """
        self._require_attached()
        if self._settings.backup > 0:
            raise ValueError("set_weight does not go with backup: a gradient that comes late would have no weight")
        self._passes.forget_abandoned()
        self._window.complete = False  # it is of the next pass
        factor = self._window.weights.set(num_samples, self._window.num_passes)
        if self._idle:
            self._install()
        if factor != 1.0:
            scale_gradients(self._table.slots(), factor)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale the averaged gradients so that their total norm, without the loss scale, is at most ``max_norm``.

        Call it between ``backward()`` and ``step()``, like ``torch.nn.utils.clip_grad_norm_``. The norm is
        that of what is in ``.grad`` now, however it was written. If pycomm's kernels do the step
        (:func:`pycomm.fuse`, :func:`pycomm.master_weights`), they apply the factor, and ``.grad`` stays unchanged.
        With torch's GradScaler, call ``unscale_`` first. The result is the same on all ranks: DTensors count as a
        whole, and parameters that all ranks have once (collective over the ranks that have parts).

        Args:
            max_norm: the bound, a positive number.
            error_if_nonfinite: raise RuntimeError if the norm is not finite; waits for a GPU.

        Returns:
            The norm before clipping: a 0-d float64 tensor on the parameters' device.

        Raises:
            TypeError, ValueError: ``max_norm`` is not a positive number.
            RuntimeError: the norm is not finite (a parameter is named), or an accumulation window is open.
        """
        self._require_attached()
        max_norm = checks.positive("max_norm", max_norm)
        if self._window.is_open:
            raise RuntimeError("clip_grad_norm inside an accumulation window: call flush() first")
        norm = clipping.unscaled_norm(self._table, self._settings.loss_scaler)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            where = self.name_of_not_finite() or "other ranks"
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: see {where}")
        if clipping.clip(self._table, norm, max_norm) and self._idle:
            self._lone_factor.note()
        return norm

    def settle(self) -> bool:
        """Flush an incomplete window, then return whether all gradients are finite; the same on all ranks.

        Called by :class:`pycomm.LossScaler`. Waits for a GPU. Collective only if ``accumulate`` is not 1.
        """
        if self._settings.accumulates:
            self.flush()
        return self._engine.outcome.settle(was_exchanged=not self._idle)

    def name_of_not_finite(self) -> str | None:
        """Return the location or source of the first non-finite value; ``None`` if all are finite. Waits for a GPU."""
        return self._engine.outcome.name_of_not_finite()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that compression carries from step to step on *this* rank, to be saved by every rank.

        ``["ranks"][str(rank)][parameter_name]["residual"]`` is the part of this rank's gradients that has
        not been sent yet (DGC's v), as its contribution to the average, without the loss scale: a tensor
        of the parameter's shape. With momentum correction there is also ``["velocity"]``, DGC's u, in the
        same units; with PowerSGD ``["q"]``, equal on all ranks. The other keys are ``format``,
        ``world_size``, ``method`` and ``steps``, the number of committed steps. The dict loads with
        ``torch.load(weights_only=True)``; ``torch.distributed.checkpoint.save({"reducer": reducer})``
        keeps every rank's. Of a DTensor each rank saves the state of its own part, as an ordinary tensor,
        under a key that says which: ``"up.weight[0:1/2]"`` is the second half along dimension 0.
        """
        self._require_attached()
        method, steps = self._settings.compression, int(self._engine.outcome.committed_steps)
        return gather_state(self._engine.state(), method, self._communicator, steps, self._table.labels())

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]], *, strict: bool = True) -> None:
        """Load state that :meth:`state_dict` returned.

        Args:
            state: this rank's own dict, one dict with the ``ranks`` of all, or the list of all ranks'
                dicts. If it comes from a different number of ranks, residuals and velocities are
                redistributed so that their sums over the ranks are kept. DTensors must be in as many parts as
                they were: each rank takes those of its own.
            strict: raise ValueError for missing or unknown parameters and for another method's state,
                instead of loading what fits.

        Raises:
            ValueError: a single dict is of another rank or world size, or method, names or shapes do not match.
        """
        self._require_attached()
        current, method = self._engine.state(), self._settings.compression
        chosen, steps = select_state(state, current, method, self._communicator, strict, self._table.labels())
        self._engine.load_state(chosen, steps)

    def detach(self) -> None:
        """Undo ``attach``: remove all hooks, move ``.grad`` to ordinary memory, release shared memory. Idempotent."""
        if self._detached:
            return
        self._last_stats = self.stats()
        self._detached = True
        self._lone_factor.remove()
        self._uninstall()
        self._engine.policy.stand_down()
        self._engine.comparison.replicas.state_hashes.forget()
        self._engine.statistics.waits.close()
        for slot in self._table.slots():
            slot.leave_bucket()
        if self._table.partition is not None:
            self._table.partition.move_out()
        forget(self)
        unwatch_constructions(self)
        _say_at_the_end(self._engine, "detach")
        self._engine.policy.close(self._passes.stopped or _farewell(self._progress, "detach"))
        self._communicator.close(self._passes.stopped or None)
        if self._table.partition is not None:
            self._table.partition.release()
        # Cleared now, so that shared memory is released with its last view and not when this object is collected.
        self._table.clear()

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")


def _say_at_the_end(engine: Engine, how: str) -> None:
    """Have ranks that wait for this one told that it has ended its training, and after which step."""
    for lane in engine.lanes:
        lane.channel.farewell = functools.partial(_farewell, engine.progress, how)  # which keeps nothing else alive


def _farewell(progress: Progress, how: str) -> str:
    """Return what a rank says to those that wait for it when it ends."""
    return f"it has ended its training ({how}) after step {progress.num_reductions}"

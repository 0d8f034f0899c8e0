"""Reducer, the public object that ``attach`` returns; hooks on the optimizer and module keep it alive."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pycomm import checks
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression
from pycomm.compression.dense import method_text
from pycomm.compression.saved_state import gather_state, select_state
from pycomm.descriptions import counted, size_text, tensors_text
from pycomm.optim.attached import forget
from pycomm.torch_internals import current_graph_task, is_dtensor
from pycomm.training.reducer import clipping
from pycomm.training.reducer.buckets import scale_gradients
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.passes import Passes
from pycomm.training.reducer.without_backward import WithoutBackward, request_veto
from pycomm.training.reductions.phase import Phase, StepState
from pycomm.training.reductions.requests import StopRequest

_LOG = logging.getLogger("pycomm")


def _description(engine: Engine) -> str:
    """Return the ranks, parameters and method, for ``repr``. A single rank needs no buckets."""
    settings, slots, buckets = engine.settings, engine.table.slots(), engine.table.buckets
    transport = "nccl" if engine.table.on_gpu else engine.communicator.transport
    size = size_text(sum(sent.bucket.flat.nbytes for sent in buckets))
    sorted_ = f"{counted(len(slots), 'parameter')} in {counted(len(buckets), 'bucket')} of {size} in all"
    parameters = sorted_ if buckets else tensors_text(slot.local for slot in slots)
    parts = [counted(len(engine.world), "rank"), transport, parameters, method_text(settings.compression)]
    if settings.shard is not None:
        parts.append(f"shard={settings.shard}")
    if settings.survive is not None:
        parts.append(f"survive={settings.survive}")
    return ", ".join(parts)


class Reducer:
    """Average gradients over the ranks while backward runs. Created by :func:`pycomm.attach`.

    Hooks keep it alive as long as the optimizer or the attached module.

    Attributes:
        optimizer, module: the attached ones; ``module`` is ``None`` if ``attach`` was given named parameters.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_stats: dict[str, Any] = {}
        self._communicator = engine.communicator
        self._settings = engine.settings
        self._table, self._window, self._state = engine.table, engine.window, engine.step_state
        self.optimizer, self.module = engine.table.optimizer, engine.table.module
        passes = self._passes = Passes(engine)
        self._without_backward = WithoutBackward(engine, passes)
        _set_farewell(engine, "its optimizer and model are gone, or its process has ended")
        self._lone_factor = clipping.LoneFactor(engine.table)
        self._idle = _has_nothing_to_do(engine)
        if self._idle:
            self._table.admit()
            return
        try:
            self._install()
        except BaseException:
            self._passes.unhook()
            engine.release()
            raise

    def _install(self) -> None:
        self._idle = False
        self._passes.changes.hook(self._table.slots())
        self._passes.changes.hook(self._table.admit())
        self._passes.hook_model(owner=self)
        self._engine.comparison.after_step()

    def __repr__(self) -> str:
        if self._is_detached:
            return f"Reducer(detached after {counted(self._last_stats['steps'], 'reduction')})"
        return f"Reducer({_description(self._engine)})"

    @property
    def world(self) -> tuple[int, ...]:
        """Numbers of the ranks that take part, indexed by rank; a newcomer gets a new number."""
        return self._engine.world

    def on_change(self, callback: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> None:
        """Call ``callback(old_world, new_world)`` on each remaining rank when :attr:`world` has changed.

        It runs at the end of that ``backward()``, before ``optimizer.step()``, where samples can be redistributed and
        the learning rate scaled. Never called without ``survive``.
        """
        self._require_attached()
        self._engine.callbacks.append(callback)

    def stats(self) -> dict[str, Any]:
        """Return the counters since ``attach``, as a dict. On any thread; sends nothing, waits for no rank.

        Returns:
            ``steps``, ``bytes_sent``, ``compression_ratio``, ``num_buckets``, ``transport``, ``registered_bytes``,
            ``symmetric_bytes``, ``wait_seconds``, ``pack_seconds``, ``wire_seconds``, ``unpack_seconds``,
            ``hidden_share``, ``waits``, ``nonfinite_steps``, ``last_nonfinite``, ``vetoed_steps``, ``last_veto``. Error
            feedback: ``residual_norm``, ``compression_error``; TopK, DGC: ``selections``, ``selections_missed``,
            ``miss_rate``; "auto": ``auto``; ``survive``: ``recoveries``, ``joins``; ``shard``: ``step_shares``.
        """
        if self._is_detached:
            return dict(self._last_stats)
        return self._engine.stats()

    def reduce(self) -> None:
        """Average what is in ``.grad`` now, in place of a ``backward()``. Collective.

        For gradients that ``backward()`` did not compute: ``torch.autograd.grad``, ``torch.func.grad``, evolution
        strategies, per-sample clipping. Write them to ``.grad``, call this, then ``optimizer.step()``. It ends an
        accumulation window. Other ranks may call ``backward()`` meanwhile. A parameter without a gradient counts as
        zeros. Frozen parameters take part if they have a gradient on all ranks.

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
        """Skip this step on all ranks. Call it on any rank, before or during its ``backward()``.

        The averages are discarded like non-finite ones, and compression's state stays as it was. A loss scaler skips
        the step. torch's GradScaler then lowers its scale; :class:`pycomm.LossScaler` keeps it, except on a GPU, where
        the host does not wait for other ranks' vetoes. Without a scaler ``.grad`` is ``None`` on all ranks. An
        accumulation window is skipped as a whole. Unused, this costs nothing.

        Raises:
            RuntimeError: this step's gradients have been sent, or averaged.
            ValueError: without a ``loss_scaler`` on a GPU or with ``shard``.
        """
        self._require_attached()
        request_veto(self._engine, str(reason))
        if self._idle:
            self._install()

    def skip_batch(self) -> None:
        """Take part in this step without a batch, in place of forward and backward.

        ``.grad`` gets the average over the ranks that have a batch, or ``None`` if no rank has one. Call
        ``optimizer.step()`` afterwards, as on all ranks. Methods that keep residuals weight them like the gradients.

        Raises:
            RuntimeError: after ``backward()``, or in an accumulation window that has gradients already.
            ValueError: on a GPU, with ``survive``, unless :meth:`set_weight` is in use.
        """
        self._require_attached()
        if self._idle:
            self._engine.table.drop_gradients()
        else:
            self._without_backward.skip_batch()

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to end the training together. Call it on any rank and thread, or in a signal handler.

        The request travels with the next reduction. When that returns, :attr:`stop_requested` is true on all ranks (on
        a GPU two reductions later), so that all can save and exit after the same step. Nothing stops automatically.
        """
        self._require_attached()
        self._engine.comparison.requests.request_stop(str(reason), self._communicator.rank if self._idle else None)

    @property
    def stop_requested(self) -> StopRequest:
        """Request to stop that all ranks have received, with ``rank`` and ``reason``; false without one."""
        return self._engine.comparison.requests.stop_requested

    @property
    def is_vetoed(self) -> bool:
        """Whether a rank has vetoed the last step; see :meth:`veto_step`."""
        return bool(self._engine.comparison.fingerprint.verdict.vetoes)

    def reduce_now(self) -> None:
        """Average the present gradients, unless their averages already wait for a step. Collective.

        For a rank whose ``.grad`` was set by hand, whose window ends early, or which has no gradients in this step,
        while other ranks call ``backward()``. A parameter without a gradient counts as zeros.

        Raises:
            RuntimeError: a gradient was set after the others had been averaged.
        """
        self._require_attached()
        if not self._idle:
            self._without_backward.reduce_now()

    def stay_absent(self) -> int:
        """Take part in the other ranks' reductions without data, until all ranks have called this.

        Averages still divide by the number of all ranks. Returns the number of reductions. ValueError with ``shard``.
        """
        self._require_attached()
        self._without_backward.require_whole_steps()
        count = 0
        with torch.no_grad(), torch.cuda.device(self._table.device if self._table.on_gpu else -1):
            while not self._idle and not self._without_backward.take_part(absent=True):
                count += 1
        return count

    @property
    def attached(self) -> AttachedTraining:
        """Internal interface for the rest of pycomm. Raises RuntimeError once this Reducer is detached."""
        self._require_attached()
        return AttachedTraining(self._engine, self._passes)

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is averaged here, or will be once it is unfrozen."""
        return self._table.knows(param)

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or left alone as ``ignore`` says."""
        return self._table.covers(param)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters that are averaged here, or will be once unfrozen, by name without wrappers' parts."""
        return dict(self._table.named())

    def flush(self) -> None:
        """Average an accumulation window that ended early. Collective; call before unscaling, clipping and ``step``.

        Does nothing if no rank has gradients waiting. All ranks must have had the same number of passes, unless
        :meth:`set_weight` is in use. In that case a rank whose window is complete does nothing here, and ranks with
        fewer passes, or none, join its reduction by this call.
        """
        self._require_attached()
        if not self._idle:
            self._without_backward.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep backward passes inside local to this rank: nothing is sent, and no rank is waited for.

        For passes that are not a training step of this optimizer: a saliency map, a penalty, a generator's pass through
        its discriminator (``with discriminator_reducer.paused(): generator_loss.backward()``). Their gradients are
        never averaged. It is an error if they are still in ``.grad`` in the next pass outside, or at
        ``optimizer.step()``: call ``zero_grad()`` first. Not collective.

        Raises:
            RuntimeError: an accumulation window is open.
        """
        self._require_attached()
        with self._passes.paused():
            yield

    def skip_step(self) -> None:
        """Declare that ``optimizer.step()`` is skipped on all ranks, so that its gradients are not sent again.

        Required only by compression methods with state.
        """
        self._require_attached()
        self._state.leaves_out_step()

    def set_weight(self, num_samples: float) -> None:
        """Declare, before ``backward()``, that the loss is the mean over ``num_samples`` samples or tokens.

        From now on ``.grad`` gets the mean over the samples of all ranks and passes: the sum of n_p g_p divided by the
        sum of n_p, with g_p the gradient of pass p. So each pass's loss must be the mean over its own samples: with
        weights, the loss must not be divided by the number of passes, as it must without. The value holds until the
        next call. All ranks make their first call in the same step, or take part in it by :meth:`skip_batch` or
        :meth:`flush`. With ``average=False`` the result is that mean times the world size. A rank without samples sets
        0; its gradients do not count, even NaN. ``num_samples`` may be fractional.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a finite number, or is negative; inside an accumulation
                window it is 0, or the window began without it. From ``backward()``, on every rank: all weights are 0.
        """
        self._require_attached()
        self._passes.forget_lost()
        self._state.loop_begins()  # the weight belongs to the next pass
        is_first = not self._window.weights.in_use
        factor = self._window.weights.set(num_samples, self._state.passes)
        if is_first and self._settings.accumulates:
            why = "with weights, the loss must not be divided by the number of passes, as .grad is a mean over samples"
            _LOG.warning("set_weight() with accumulate=%s: %s", self._settings.passes, why)
        if self._idle:
            self._install()
        if factor != 1.0:
            scale_gradients(self._table.slots(), factor)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale the averaged gradients so that their total norm, without the loss scale, is at most ``max_norm``.

        Call it between ``backward()`` and ``step()``, like ``torch.nn.utils.clip_grad_norm_``; with torch's GradScaler
        after ``unscale_``. The norm is of what is in ``.grad`` now. If pycomm's kernels do the step, they apply the
        factor: until then do not change ``.grad``. The result is the same on all ranks; DTensors count as a whole.

        Returns:
            The norm before clipping: a 0-d float64 tensor on the parameters' device. ``error_if_nonfinite`` waits for
            a GPU.

        Raises:
            TypeError, ValueError: ``max_norm`` is not a positive number.
            RuntimeError: a window is open; or the norm is not finite, if asked for.
        """
        self._require_attached()
        max_norm = checks.positive("max_norm", max_norm)
        self._passes.forget_lost()
        if self._state.is_open:
            raise RuntimeError("clip_grad_norm inside an accumulation window: call flush() first")
        norm = clipping.unscaled_norm(self._table, self._settings)
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

        ``["ranks"][str(rank)][parameter_name]`` has tensors of the parameter's shape, as this rank's contribution to
        the average, without the loss scale: ``"residual"``, what has not been sent yet (DGC's v), and ``"velocity"``
        (DGC's u); with PowerSGD ``"q"``, equal on all ranks. The other keys are ``format``, ``world_size``, ``method``
        and ``steps``. It loads with ``torch.load(weights_only=True)``. ``torch.distributed.checkpoint`` keeps every
        rank's. The key of a DTensor's part says which: ``"up.weight[0:1/2]"`` is the second half along dimension 0.
        """
        self._require_attached()
        method, steps = self._settings.compression, int(self._engine.reduction.committed)
        return gather_state(self._engine.state(), method, self._communicator, steps, self._table.labels())

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]], *, strict: bool = True) -> None:
        """Load state that :meth:`state_dict` returned.

        Args:
            state: this rank's own dict, one dict with the ``ranks`` of all, or the list of all ranks' dicts. From
                another number of ranks, residuals and velocities are redistributed so that their sums are kept.
                DTensors must be in as many parts as they were.
            strict: raise ValueError for missing or unknown parameters and for another method's state.

        Raises:
            ValueError: a single dict is of another rank or world size, or method, names or shapes do not match.
        """
        self._require_attached()
        current, method = self._engine.state(), self._settings.compression
        chosen, steps = select_state(state, current, method, self._communicator, strict, self._table.labels())
        self._engine.load_state(chosen, steps)

    def detach(self) -> None:
        """Undo ``attach``: remove all hooks, copy ``.grad`` to ordinary memory, release shared memory. Idempotent."""
        if self._is_detached:
            return
        self._last_stats = self.stats()
        self._state.closes()
        self._lone_factor.remove()
        self._passes.unhook()
        self._engine.release()
        for slot in self._table.slots():
            slot.leave_bucket()
        partition = self._table.partition
        if partition is not None:
            partition.move_out()
        forget(self)
        _set_farewell(self._engine, "detach")
        self._engine.members.close(self._state.reason or _farewell(self._state, "detach"))
        self._communicator.close(self._state.reason or None)
        if partition is not None:
            partition.release()
        # Cleared now, so that shared memory is released with its last view, not when this object is collected.
        self._table.clear()

    @property
    def _is_detached(self) -> bool:
        return self._state.phase is Phase.CLOSED

    def _require_attached(self) -> None:
        if self._is_detached:
            raise RuntimeError("this Reducer is detached")


def _has_nothing_to_do(engine: Engine) -> bool:
    """Return whether this is a single rank without compression, clipping or DTensors, so that gradients stay as is."""
    settings, table = engine.settings, engine.table
    if engine.communicator.size > 1 or engine.members.survives or table.partition is not None:
        return False
    return not settings.compression.transactional and not any(is_dtensor(param) for _, param in table.named())


def _set_farewell(engine: Engine, how: str) -> None:
    """Set the message to ranks that still wait for this one after it has ended its training."""
    for lane in engine.lanes:
        lane.channel.farewell = functools.partial(_farewell, engine.step_state, how)  # keeps nothing else alive


def _farewell(state: StepState, how: str) -> str:
    """Return the message of a rank that ends its training to those that wait for it."""
    return f"it has ended its training ({how}) after step {state.reductions}"


@dataclass(frozen=True)
class AttachedTraining:
    """Internal interface to a Reducer's training, for checkpoints and integrations; see ``Reducer.attached``."""

    _engine: Engine
    _passes: Passes

    @property
    def communicator(self) -> Communicator:
        return self._engine.communicator

    @property
    def method(self) -> Compression:
        return self._engine.settings.compression

    @property
    def loss_scaler(self) -> Any:
        """Loss scaler that ``attach`` was given, or ``None``."""
        return self._engine.settings.loss_scaler

    @property
    def survives(self) -> bool:
        return self._engine.settings.survive is not None

    @property
    def has_own_values(self) -> bool:
        """Whether parameters or optimizer state may differ between ranks on purpose."""
        table = self._engine.table
        return bool(table.ignored or table.rank_local or table.ignored.keeps_state)

    @property
    def is_window_open(self) -> bool:
        """Whether an accumulation window has gradients that are not averaged yet."""
        self._passes.forget_lost()
        return self._engine.step_state.is_open

    def name_of_ignored(self, param: torch.Tensor) -> str | None:
        """Return the name of ``param`` if ``ignore`` covers it."""
        return self._engine.table.ignored.name_of(param)

    def refuse_gradient(self, param: torch.Tensor, problem: str) -> NoReturn:
        """Raise RuntimeError, on every rank, for a step that would use the gradient of ``param``."""
        self._passes.refuse_gradient(param, problem)

    def compare_replicas(self) -> None:
        """Raise an error on every rank if the ranks' parameters differ. Collective."""
        self._engine.comparison.compare_replicas()

    def check_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if ``Reducer.load_state_dict`` would not accept these ``states`` of all ranks."""
        labels = self._engine.table.labels()
        select_state(list(states), self._engine.state(), self.method, self.communicator, True, labels)

"""Attendance: which ranks take part, and what they have come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pycomm.descriptions import counted
from pycomm.reducer.description import description
from pycomm.reducer.engine import Engine
from pycomm.reducer.rank_flags import StopRequest
from pycomm.reducer.rank_requests import request_veto
from pycomm.reducer.without_backward import WithoutBackward
from pycomm.torch_internals import current_graph_task


class Attendance:
    """The part of :class:`pycomm.Reducer` that is about which ranks take part, and what they have come to."""

    _detached = False
    _last_stats: Mapping[str, Any] = MappingProxyType({})
    _without_backward: WithoutBackward
    _idle: bool

    def _install(self) -> None: ...

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
        if self._engine.survival is not None:
            self._engine.survival.on_change(callback)

    def stats(self) -> dict[str, Any]:
        """Return the counters since ``attach``. On any thread, also while ``backward()`` waits.

        Sends nothing and waits for no rank; on a GPU it waits for the work that it has been given.

        Returns:
            ``bytes_sent`` (payload bytes that this rank has handed to the transport), ``steps``
            (reductions), ``wait_seconds`` (time for which communication held up ``backward()``; on a GPU
            only the host's part of it, which is close to zero), ``nonfinite_steps`` (steps that left
            compression state unchanged because of non-finite gradients), ``last_nonfinite`` (source of
            the last such gradient, parameter and rank, the same on all ranks; ``None`` if there was none, or,
            on GPUs without stateful compression, always), ``num_buckets`` and ``transport``. With TopK and
            DGC also ``selections`` (of parameters), ``selections_missed`` (those for which the last step's
            threshold was unusable, which costs another read) and their ratio ``miss_rate``.

            ``pack_seconds`` and ``wire_seconds``: time of the communication thread for packing (with
            compression: encoding, and decoding) and in collectives, waits for other ranks in them
            included; ``unpack_seconds``: for handing out gradients at the end of ``backward()``, part of
            ``wait_seconds``; ``hidden_share``: the share of the first two that ``backward()`` did not
            wait for, or ``None``. On a GPU these are 0 and ``None``. ``compression_ratio``: bytes of the
            gradients over ``bytes_sent``. With error feedback also ``residual_norm``, of all that this
            rank has not sent yet, and ``compression_error``, of one step: norm of what was left out over
            that of what there was to send. Only a call that comes at least 10 reductions after the last one
            that looked at them does so: it reads the residuals, and has the next reduction measured, which
            reads its gradients twice more. In between both stay as they are.

            With ``on_failure="shrink"`` also ``recoveries``, a list of dicts: ``step`` (number of reductions before
            it), ``seconds`` (from the failure on this rank until the ranks that are left could go on), ``left``
            (what became of the others, by their numbers) and ``world``, as it was afterwards. With
            ``backup`` also ``late``, the number of steps that went on without gradients of this rank.

            ``waits`` says who holds up the others. ``["by_rank"][r]`` is what rank r of :attr:`world` has cost them:
            ``seconds`` in all, the ``longest`` time in one reduction, in seconds, and ``times``, the number of
            reductions at which r was the last to have all its gradients. What counts is by how much r was later than
            the middle one of the ranks (of two, than the other). ``["now"]`` is ``None``, or this rank's present wait:
            ``since`` when, as of ``time.time()``, for how many ``seconds``, and for which ``ranks``; ``()`` if all are
            there and only data is under way, or if it is not known. It is known on one host, without any message.
            ``by_rank`` is known there, and with ``on_failure="shrink"`` everywhere, as ranks tell each other at the end
            of each step; otherwise, and on GPUs, where the host runs ahead of the gradients, it is empty.
            A rank that is waited for ten times as long as is usual, and at least a second, is named in the log of
            the first rank, at most once a minute. While ranks wait, also for one that never comes, the first of them
            names it in its log within ten seconds, and then each minute; on several hosts too, but not on GPUs.
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
        if self._idle:
            return
        window, table = self._engine.window, self._engine.table
        there = any(slot.owner.grad is not None for slot in table.slots())
        if there and not window.is_open and not self._engine.progress.is_used:
            self._engine.require_all_averaged()
        else:
            self._without_backward.take_part(absent=False)

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

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")

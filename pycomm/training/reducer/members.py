"""Steps that survive the loss of ranks and admit newcomers (``attach(..., survive=pycomm.Survive())``).

Each step ends with an exchange, the commit. It returns once every rank has all results, and only then are they handed
out. After a failed operation no rank uses the old memory or connections again. The remaining ranks agree on who they
are (``training.elastic``), meet again, move compression's state into buckets that no lost rank has mapped, and reduce
the step again from the gradients that backward made. Backward itself is not repeated.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pycomm import kernels
from pycomm.agreement import agreed
from pycomm.collectives import broadcasting
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import shared_parts
from pycomm.collectives.transport.authentication import secret
from pycomm.collectives.transport.choice import version
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.compression.base import State
from pycomm.compression.saved_state import CONTRIBUTIONS
from pycomm.errors import CommError, DamageError, attempt
from pycomm.torch_internals import Store, is_dtensor
from pycomm.training.elastic.join_requests import JoinListener
from pycomm.training.elastic.liveness import this_process
from pycomm.training.elastic.membership import Decision, Membership, reconvene
from pycomm.training.reducer.buckets import SentBucket, open_lanes, state_of
from pycomm.training.reducer.engine import Engine, FixedMembers, Grads, Launch
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options
from pycomm.training.reductions.phase import Role
from pycomm.untrusted import ANYTHING, ListOf, parse
from pycomm.worker import Work

_LOG = logging.getLogger("pycomm")

World = tuple[int, ...]


class Survival:
    """Commit, recovery and admission of ranks that may be lost and may gain newcomers.

    Args:
        communicator: the ranks' communicator, which is moved when they change.

    Attributes:
        recoveries, joins: one dict per event; see ``Reducer.stats``.
        newcomers: ranks whose first step the present one is.
        invited: number of the newcomer's request that the last commit has announced; 0 for none.
        arrivals: times at which ranks had all their gradients of the last step, in seconds relative to its commit.
    """

    def __init__(
        self,
        membership: Membership,
        communicator: Communicator,
        table: ParameterTable,
        settings: Options,
        listener: JoinListener,
    ) -> None:
        self.membership, self.invited = membership, 0
        self._listener = listener
        self.newcomers: set[int] = set()
        self._communicator, self._table, self._settings = communicator, table, settings
        self.recoveries: list[dict[str, Any]] = []
        self.joins: list[dict[str, Any]] = []
        self._has_left = False
        self.arrivals: dict[int, float] = {}

    def stats(self) -> dict[str, Any]:
        return {"recoveries": list(self.recoveries), "joins": list(self.joins)}

    def commit(self, microseconds_here: int = 0) -> None:
        """Return once all ranks have the results of this step. Called on the communication thread, after all results.

        The first rank announces a waiting newcomer, if there is one. Each rank sends how long ago it had all its
        gradients, 0 if unknown.
        """
        words = np.zeros(1 + self._communicator.size, np.int64)
        words[1 + self._communicator.rank] = microseconds_here
        if self.membership.is_first and (waiting := self._listener.waiting()) is not None:
            words[0] = waiting.number
        with self._communicator.channel.skip_checks():
            self._communicator.all_reduce(words, "max")
        self.invited = int(words[0])
        here = zip(self.membership.world, words[1:].tolist(), strict=True)
        self.arrivals = {rank: -1e-6 * microseconds for rank, microseconds in here if microseconds > 0}

    # Losing ranks.

    def leave(self, reason: str) -> None:
        """Announce to the others that this rank no longer takes part; only the first reason counts."""
        if not self._has_left:
            self._has_left = True
            self.membership.leave(reason)

    def close(self, reason: str) -> None:
        """Leave, and release the membership."""
        self._listener.close()
        self.leave(reason)
        self.membership.close()

    def run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job``; leave if it fails on this rank alone, as others would mistake the next job for it."""
        try:
            job()
        except (CommError, ValueError):  # all ranks raise the latter together
            raise
        except BaseException as error:
            try:
                self.leave(f"failed: {error}")
            finally:
                self._communicator.close(f"it failed: {error}")
            raise

    def recover(self, error: CommError, num_committed: int, complete: Callable[[], None]) -> tuple[bool, Any]:
        """Continue with the remaining ranks. Collective among them.

        Args:
            complete: hands out the results of the present step, if another rank has committed it.

        Returns:
            Whether ``complete`` was called, and the new lanes.

        Raises:
            CommError: this rank is excluded or damaged, or too few remain.
        """
        if isinstance(error, DamageError) and not error.spares(self.membership.me):
            if error.ranks:
                self.leave("is damaged")
                self._communicator.close(str(error))
            raise error
        start, old = time.monotonic(), self.membership.world
        self.invited = 0  # equal on all ranks; the first rank announces the newcomer again
        found = reconvene(
            self.membership,
            self._communicator,
            error,
            num_committed,
            catch_up=lambda _: complete(),
            open_again=lambda: open_lanes(self._communicator, self._settings, self._table.on_gpu),
            nobody_waits=isinstance(error, DamageError),  # slower ranks must still find the damage themselves
        )
        is_complete = found.committed > num_committed
        self._table.rebuild(found.opened, self._settings, adopt=is_complete)
        self._note(old, found.decision, num_committed, time.monotonic() - start)
        return is_complete, found.opened

    # Gaining ranks.

    def let_in(self, engine: Engine) -> list[Communicator]:
        """Admit the announced newcomer; return the new lanes. Collective, including the newcomer.

        Raises:
            CommError: it did not connect, or a rank was lost meanwhile.
            ValueError: its state does not fit.
        """
        start = time.monotonic()
        number, self.invited = self.invited, 0
        self._listener.skip_to(number)
        place = self.membership.admit(self._communicator, number, self._listener.process_of(number))
        try:
            if self.membership.is_first:
                self._listener.answer(number, self.membership.invitation())
            self._communicator.move(place)
            lanes = open_lanes(self._communicator, self._settings, self._table.on_gpu)
            self.membership.confirm(self._communicator)
            self._table.rebuild(lanes, self._settings, adopt=False)
            share_state(engine, newcomer=False)
        except BaseException:
            self.membership.dismiss()
            raise
        self.note_join(engine.step_state.reductions, time.monotonic() - start)
        return lanes

    def note_join(self, step: int, seconds: float) -> None:
        """Record and log that the newest rank has joined."""
        newcomer = self.membership.world[-1]
        self.newcomers.add(newcomer)
        self.joins.append({"seconds": seconds, "step": step, "rank": newcomer, "world": self.membership.world})
        if self.membership.is_first:
            _LOG.warning("rank %d has come: %d ranks go on at step %d", newcomer, len(self.membership.world), step)

    def num_newcomers(self) -> int:
        """Return the number of newcomers, which take part in the present step without gradients."""
        return len(self.newcomers.intersection(self.membership.world))

    def _note(self, old: World, decision: Decision, step: int, seconds: float) -> None:
        left = {rank: decision.gone.get(rank, "was lost while the others met") for rank in old}
        for rank in self.membership.world:
            del left[rank]
        self.recoveries.append({"seconds": seconds, "step": step, "left": left, "world": self.membership.world})
        if self.membership.is_first:
            fates = ", ".join(f"rank {rank} {fate}" for rank, fate in left.items())
            count = len(self.membership.world)
            _LOG.warning("%s: %d ranks go on at step %d, after %.2f s", fates, count, step, seconds)


class SurvivingMembers(FixedMembers):
    """Ranks that may be lost and may gain newcomers; ``survival`` recovers and admits."""

    survives = True

    def __init__(self, survival: Survival) -> None:
        self.survival = survival
        self._commit_work: Work | GpuWork | None = None

    @property
    def world(self) -> tuple[int, ...]:
        return self.survival.membership.world

    def launching(self, sent: SentBucket) -> None:
        """Drop the last step's kept gradients, not earlier, so that autograd reuses memory bucket by bucket."""
        for slot in sent.slots:
            slot.kept = None

    def contributed(self, sent: SentBucket, grads: Grads) -> Grads:
        """Keep ``grads`` and return them; a gradient that lies in the bucket itself is copied."""
        for i, (slot, grad) in enumerate(zip(sent.slots, grads, strict=True)):
            if grad is not None and sent.bucket.holds(i, grad):
                slot.spare = torch.empty_like(grad) if slot.spare is None else slot.spare
                grad = slot.spare.copy_(grad)
            slot.kept = grad
        return grads

    def launched(self, engine: Engine) -> None:
        """Launch the exchange that ends the step."""
        if self._commit_work is None:
            self._commit_work = engine.submit(engine.communicator, self._commit_job(engine))

    def _commit_job(self, engine: Engine) -> Callable[[], None]:
        works = engine.works()

        def job() -> None:
            for work in works:
                work.wait()  # works of other lanes may still run; raises if this one failed
            engine.share_source()  # before the commit: a rank may be lost in it
            is_known = engine.step_state.role is not Role.NEW and not engine.table.on_gpu  # where the host runs ahead
            self.survival.commit(engine.statistics.waits.microseconds_here() if is_known else 0)

        return job

    def submit(self, job: Callable[[], None], launch: Launch) -> Work | GpuWork:
        """Launch ``job``; this rank leaves if it fails."""
        return launch(functools.partial(self.survival.run_or_leave, job))

    def receive(self, engine: Engine, admit_new: Callable[[], None]) -> Mapping[int, float]:
        """Wait for all results and hand them out; reduce the step again if ranks are lost meanwhile."""
        while True:
            try:
                engine.await_all(self._wait, admit_new)
            except CommError as error:
                if not self.recover(engine, error):
                    self._launch_again(engine)
                    continue
            else:
                engine.hand_out()
            self.survival.newcomers.clear()
            engine.window.num_idle = 0
            arrivals, self.survival.arrivals = self.survival.arrivals, {}
            return arrivals

    def _wait(self) -> None:
        assert self._commit_work is not None
        self._commit_work.wait()

    def ended(self, engine: Engine) -> None:
        self._commit_work = None
        if engine.step_state.role is Role.NEW:
            engine.window.weights.forget_passes()

    # Losing ranks.

    def recover(self, engine: Engine, error: CommError) -> bool:
        """Continue with the remaining ranks; return whether this step counts and has been handed out."""
        works = [*engine.works(), self._commit_work]
        was_complete, lanes = self.survival.recover(error, engine.step_state.reductions, engine.hand_out)
        self._continue_over(engine, lanes)
        for work in works:
            if isinstance(work, Work):
                work.forget_trace()  # otherwise the memory of the old world would stay mapped until it is collected
        return was_complete

    def _continue_over(self, engine: Engine, lanes: Sequence[Communicator]) -> None:
        """Continue over ``lanes``, between the ranks of the new world."""
        engine.window.num_idle = self.survival.num_newcomers()
        self._commit_work = None
        engine.restart(lanes)

    def _launch_again(self, engine: Engine) -> None:
        """Launch all buckets again with their kept gradients."""
        if engine.window.weights.in_use:
            engine.window.weights.sum_again()
        if engine.buffers is not None:
            engine.buffers.restore()
        for sent in engine.table.buckets:
            engine.launch(sent, [slot.kept for slot in sent.slots])
        engine.launch_rest()

    def admit_newcomer(self, engine: Engine) -> None:
        """Admit the newcomer that the last commit has announced, if any. Collective in that case; between two steps."""
        if self.survival.invited == 0:
            return
        try:
            self._continue_over(engine, self.survival.let_in(engine))
        except (RuntimeError, ValueError) as error:  # CommError and the store's errors are RuntimeErrors
            what = f"the newcomer was not let in: {error}"
            self.recover(engine, CommError.during("join", what, rank=engine.communicator.rank))

    def enter(self, engine: Engine) -> None:
        """Take part in the present step without gradients: a newcomer's first pass only receives averages."""
        engine.step_state.reduces(Role.NEW)
        engine.expect_gradients()
        engine.window.num_idle = self.survival.num_newcomers()
        engine.window.fix_scales(with_next=True)
        for sent in engine.table.buckets:
            engine.launch(sent, [None] * len(sent.slots))
        engine.launch_rest()

    def leave(self, reason: str) -> None:
        self.survival.leave(reason)

    def close(self, reason: str) -> None:
        self.survival.close(reason)

    def stats(self) -> dict[str, Any]:
        return self.survival.stats()


def require_survivable(table: ParameterTable) -> None:
    """Raise TypeError or ValueError if these gradients cannot be kept and moved when ranks are lost."""
    if table.on_gpu:
        raise ValueError("survive requires gradients in CPU memory, and these parameters are on a GPU")
    secret()  # raises its error here, where all ranks learn of it
    for name, param in table.named():
        if is_dtensor(param):
            raise TypeError(
                f"parameter {name!r} is a DTensor, which survive does not support: a lost rank takes its part of the "
                "parameter with it"
            )


_indices = itertools.count()
"""Numbers of the attaches with ``survive``: the n-th of a newcomer joins the n-th of the others."""


def next_index() -> int:
    """Return the number of the attach with ``survive`` that begins."""
    return next(_indices)


def listener_of(
    membership: Membership, store: Store, index: int | str, lines: Sequence[tuple[str, str]]
) -> JoinListener:
    """Return the listener for newcomers, which must have ``lines`` in common with the ranks."""
    return JoinListener(store, index, lines, str(this_process()["host"]) if membership.is_on_one_host else "")


def members_of(communicator: Communicator, table: ParameterTable, settings: Options) -> SurvivingMembers:
    """Return the initial members: the ranks of ``communicator``. Collective."""
    assert settings.survive is not None
    membership = Membership.found(communicator, settings.survive.min_ranks)
    listener = listener_of(membership, membership.store, next_index(), lines_of(settings, table))
    return SurvivingMembers(Survival(membership, communicator, table, settings, listener))


def lines_of(settings: Options, table: ParameterTable) -> list[tuple[str, str]]:
    """Return what a newcomer must have in common with the ranks, as kinds and texts."""
    names = dict(table.named())
    parameters = [
        f"{name}: {broadcasting.signature(p)}{'' if p.requires_grad else ' frozen'}" for name, p in names.items()
    ]
    sizes = broadcasting.group_sizes(table.optimizer, table.ignored.covers)
    order = broadcasting.names_in_order(table.optimizer, names, table.ignored.covers)
    return [
        ("the version of pycomm", version()),
        ("the optimizer", type(table.optimizer).__name__),
        ("the master weights", str(bool(table.stepper.masters()))),
        *(("a setting", line) for line in settings.lines()),
        *(("a parameter", line) for line in parameters),
        *(("an optimizer parameter group", size) for size in sizes),
        *(("the order of the optimizer's parameters", name) for name in order),
    ]


def plain_state(engine: Engine) -> dict[str, Any]:
    """Return the plain values that a newcomer receives in addition to parameters and optimizer state.

    Numbers, strings, tensors and containers of these; of the compression state, only what is equal on all ranks.
    """
    state, scaler, weights = engine.step_state, engine.settings.loss_scaler, engine.window.weights
    return {
        "progress": [state.reductions, state.steps, int(engine.reduction.committed)],
        "scaler": scaler.state_dict() if hasattr(scaler, "state_dict") else None,
        "objects": {name: each.state_dict() for name, each in sorted(_objects_of(engine).items())},
        "compression": {
            name: {key: tensor for key, tensor in entry.items() if key not in CONTRIBUTIONS}
            for name, entry in state_of(engine.table.buckets).items()
        },
        "weighted": weights.in_use,
    }


def _objects_of(engine: Engine) -> Mapping[str, Any]:
    survive = engine.settings.survive
    return (survive and survive.carry) or {}


def _take(engine: Engine, plain: Mapping[str, Any]) -> None:
    """Load a result of :func:`plain_state` from another rank, except compression state, as there are no buckets yet."""
    reductions, steps, committed = plain["progress"]
    engine.step_state.resumes(reductions, steps)
    engine.reduction.committed.fill_(committed)
    if plain["scaler"] is not None:
        engine.settings.loss_scaler.load_state_dict(plain["scaler"])
    for name, each in _objects_of(engine).items():
        each.load_state_dict(plain["objects"][name])
    if plain["weighted"]:
        engine.window.weights.set(0, 0)


@torch.no_grad()
def share_state(engine: Engine, newcomer: bool) -> State:
    """Send rank 0's state to a newcomer, and compare the state of all ranks, the newcomer among them. Collective.

    ``newcomer``: whether this rank is the newcomer, which gets compression's state; others get an empty dict.

    Raises:
        ValueError: the optimizer state does not fit a newcomer, or the ranks' states differ; on every rank.
    """
    table, communicator = engine.table, engine.communicator
    optimizer, stepper = table.optimizer, table.stepper
    params = broadcasting.shared_parameters(optimizer, table.ignored.covers)
    tensors: list[torch.Tensor] = []
    nodes = [*broadcasting.state_nodes(optimizer, params, tensors), broadcasting.encode(plain_state(engine), tensors)]
    mine = json.dumps(nodes).encode() if communicator.rank == 0 else b""
    nodes = parse(communicator.channel.all_gather_bytes(mine)[0], ListOf(ANYTHING), "the state of rank 0")

    def restructured() -> tuple[Any, list[torch.Tensor]]:
        if not newcomer:
            return {}, tensors
        found = broadcasting.restructure_state(optimizer, params, nodes[:-1])
        return broadcasting.decode(nodes[-1], plain_state(engine), torch.empty(0), found), found

    plain, tensors = agreed(communicator.channel.all_gather_bytes, attempt(restructured), "take the state of rank 0")
    everything = dict(table.named()) | table.module_tensors()
    masters = stepper.masters(table.ignored.covers)
    parts = [*shared_parts(list(everything.values())), *masters, *tensors]
    broadcasting.broadcast_parts(communicator, [part.detach() for part in parts], 0, writes=newcomer)
    if newcomer:
        stepper.restore()
        _take(engine, plain)
    _compare(communicator, [*shared_parts([p for _, p in table.named()]), *masters, *tensors])
    return plain["compression"] if newcomer else {}


def _compare(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError, on every rank, if the hashes of ``tensors`` differ between ranks."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
    mine = kernels.hashes(flat).numpy().tobytes() if flat else b""
    everyones = communicator.channel.all_gather_bytes(mine)
    different = [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if different:
        raise ValueError(f"the state of rank {different[0]} differs from rank 0's")

"""Parameter server: some ranks hold the parameters; the others compute gradients, each at its own speed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from pycomm.checks import bounded, positive
from pycomm.collectives.transport import rendezvous
from pycomm.compression.base import Compression
from pycomm.compression.dense import method_text
from pycomm.descriptions import counted, settings_text, tensors_text
from pycomm.optim.attached import refuse_second_average
from pycomm.optim.fused import RULES, require_fusable
from pycomm.optim.parameters import checked_optimizer
from pycomm.training.asynchronous.arguments import checked_per_rank
from pycomm.training.asynchronous.buffers import MeetingBuffers, ServerBuffers
from pycomm.training.asynchronous.core import Core, Piece, ShardOptimizer, flat_parts, shard_dtype
from pycomm.training.asynchronous.loop import WorkerParameters
from pycomm.training.asynchronous.modes import Compensator, Mode
from pycomm.training.asynchronous.packing import Packer, Unpackers
from pycomm.training.asynchronous.server_meeting import ServerMeeting
from pycomm.training.asynchronous.serving import Serving
from pycomm.training.asynchronous.settings import (
    ServerFiles,
    ServerSettings,
    checked_parameters,
    checked_settings,
    lines_of,
    shards_of,
    state_spec_of,
)
from pycomm.training.asynchronous.wire import SharedMemory
from pycomm.training.asynchronous.worker import ServerLink
from pycomm.training.reductions.fields import Source
from pycomm.training.reductions.record import Record


def parameter_server(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    servers: int = 1,
    mode: Mode | str = "async",
    compression: Compression | str | None = None,
    checkpoint: str | Path | None = None,
    buffers: str = "local",
    per_rank: Iterable[str] = (),
    timeout: timedelta | float | None = None,
) -> ParameterServer:
    """Train with a parameter server: ranks 0 to ``servers - 1`` hold and step the parameters, the others are workers.

    Call it on every rank, with equal arguments and equal models. A worker calls ``pull()``, ``loss.backward()`` and
    ``push()``, or runs its step inside ``with server.step():``; it never steps its own optimizer. A serving rank calls
    ``close()``, which serves until every worker has closed. A process that starts later becomes another worker: it
    requires no process group, but ``MASTER_ADDR``, ``MASTER_PORT`` and ``WORLD_SIZE`` in its environment, as torchrun
    sets them. With the ``RANK`` of a process that has died, it takes that process's place.

    Args:
        optimizer: steps on the servers, by pycomm's kernels where :func:`pycomm.fuse` supports its class. From then
            on, a serving rank's optimizer holds the parameters of its shard only.
        model: its parameters must all belong to the optimizer, be of one dtype and in CPU memory. For float16 and
            bfloat16 parameters, the servers hold and step float32 ones, and workers get them rounded.
        servers: number of serving ranks. Each holds an equal part of the parameters' bytes. Parameters themselves are
            cut only if the optimizer is known to update each element independently.
        mode: which gradients make an update, and which workers wait: :class:`pycomm.Async`,
            :class:`pycomm.StaleSynchronous` or :class:`pycomm.Sync`. "async" and "sync" are short for the first and the
            last without options.
        compression: method, or its name, by which gradients travel; over the connection even on one host. Residuals
            stay with the worker. For each worker, a server requires the memory of the method's state and a bucket, 8
            bytes per parameter for most methods. Parameters are then cut only at their borders.
        checkpoint: folder in which servers save their state every minute, when workers come or go, and at the end. A
            restarted server continues from there, and workers wait for it. The log says how many pushes came after the
            last checkpoint, and are lost. All ranks must name the same folder.
        buffers: as for :func:`local_sgd`. For "average" and "broadcast" workers push them, too; what they pull, and
            rank 0 has after ``close()``, is made of what each worker has pushed last. For "local" a worker compares
            them in pushes 1, 2, 4, 8, ... with what they were at the beginning.
        per_rank: names of buffers that stay each rank's own, or patterns ("*.running_mean").
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        RuntimeError: there is neither a process group nor the environment of torchrun.
        TypeError, ValueError: on every rank: an argument is wrong; arguments, or names, shapes, dtypes or values of
            parameters differ between ranks; a serving rank's optimizer has a replaced ``step``, as after an earlier
            ``parameter_server``; or a server cannot open one of its files, or it is damaged (the error names it).
        CommError: a rank did not come.
    """
    return traced(**locals())


def traced(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    trace: str | Path | None = None,
    per_rank: Iterable[str] = (),
    timeout: timedelta | float | None = None,
    **options: Any,
) -> ParameterServer:
    """Do the same as :func:`parameter_server`, and write traces. For tests and debugging.

    Args:
        optimizer, model, per_rank, timeout, options: as for :func:`parameter_server`.
        trace: file to which a server writes the order of events. The server's number is added to the name.
    """
    meeting, lines, problem = ServerMeeting(timeout), list[str](), None
    record = Record(Source({}, module=lambda: model))
    files: ServerFiles | None = None
    try:
        optimizer = checked_optimizer(optimizer, model, "parameter_server")
        settings = checked_settings(meeting.size, meeting.timeout, trace=trace, **options)
        named = checked_parameters(optimizer, model)
        refuse_second_average(named, "parameter_server()")
        if settings.compression is not None:
            settings.compression.check(optimizer)
        own = checked_per_rank(per_rank, None, model)
        buffers = MeetingBuffers(model, settings.buffers, None, own, "parameter_server")
        described = [] if settings.buffers == "local" else buffers.take(copies=False)[1]
        lines = [*lines_of(settings, optimizer, named), f"per_rank={own.patterns}", *described]
        shards = shards_of(settings, optimizer, list(named.values()))
        if 0 <= meeting.rank < settings.servers:
            if type(optimizer) in RULES:  # the server will fuse it
                require_fusable(optimizer)
            dtype = next(iter(named.values())).dtype
            wanted = state_spec_of(settings, optimizer, shards[meeting.rank], dtype)
            files = ServerFiles(settings, meeting.rank, wanted)
    except Exception as error:  # a user's object may raise anything
        problem = error
    try:
        meeting.compare(lines, record, problem)
        return ParameterServer(meeting, settings, optimizer, model, named, shards, files, buffers, record)
    except BaseException:
        if files is not None:
            files.close()
        raise


class ParameterServer:
    """Handle of :func:`parameter_server`, on servers and workers.

    Attributes:
        is_worker: whether this rank is a worker; otherwise it serves.
    """

    def __init__(
        self,
        meeting: ServerMeeting,
        settings: ServerSettings,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        named: dict[str, torch.Tensor],
        shards: list[list[Piece]],
        files: ServerFiles | None,
        buffers: MeetingBuffers,
        record: Record,
    ) -> None:
        self._meeting, self._settings, self._optimizer = meeting, settings, optimizer
        self._params, self._names, self._shards = list(named.values()), list(named), shards
        self.is_worker, self._files = files is None, files
        self._links: list[ServerLink] = []
        self._has_pulled = self._is_closed = False
        self._num_steps = 0
        self._last_stats: dict[str, Any] = {}
        self._buffers, self._digests = buffers, buffers.digests()
        self._num_buffer_bytes = 0 if settings.buffers == "local" else len(buffers.flat())
        if self.is_worker:
            self._trained = WorkerParameters(model, optimizer, named, record)
            self._open_links()
        else:
            self._core, self._memory = self._make_core()

    def __repr__(self) -> str:
        servers, mode = self._settings.servers, self._settings.mode
        me = f"worker {self._meeting.worker}" if self.is_worker else f"server {self._meeting.rank}"
        if self._is_closed:
            return f"ParameterServer({me}, closed)"
        params, method = tensors_text(self._params), method_text(self._settings.compression)
        return f"ParameterServer({me}, {counted(servers, 'server')}, {params}, mode={settings_text(mode)}, {method})"

    # Workers.

    def _open_links(self) -> None:
        meeting, settings = self._meeting, self._settings
        for server, pieces in enumerate(self._shards):
            folder = "" if settings.checkpoint is None else str(settings.checkpoint / f"server-{server}")
            packer = None
            if settings.compression is not None:
                packer = Packer([self._params[piece.index] for piece in pieces], settings.compression, meeting.worker)
            flat = self._buffers.flat() if self._num_buffer_bytes and server == 0 else None
            link = ServerLink(server, meeting, pieces, self._params, settings.timeout, folder, packer, flat)
            link.open()
            self._links.append(link)

    def pull(self) -> None:
        """Overwrite the model's parameters with the servers', and buffers that travel, as soon as the mode permits.

        Raises:
            RuntimeError: this rank serves, or has closed.
            ValueError: the module or the optimizer has other parameters now.
            CommError: a server has ended or does not answer.
        """
        self._require_worker("pull")
        self._trained.require_unchanged()
        for link in self._links:
            link.ask_to_pull()
        left = list(self._links)
        while left:  # the first to answer first, as a server that has answered waits until this worker has read
            by_descriptor = {link.fileno(): link for link in left}
            for descriptor in wait(list(by_descriptor), self._settings.timeout) or list(by_descriptor):
                assert isinstance(descriptor, int)
                by_descriptor[descriptor].pull()
                left.remove(by_descriptor[descriptor])
        if self._links[0].buffers is not None:
            self._buffers.write(self._links[0].buffers)
        self._has_pulled = True

    def push(self, samples: float = 1.0) -> None:
        """Send the gradients in ``.grad`` to the servers. The update may come after this returns.

        A parameter without a gradient has a gradient of zero, if another one has a gradient.

        Args:
            samples: weight of this gradient in an update by the mean of several.

        Raises:
            ValueError: nothing was pulled since the last push; ``samples`` is not a positive number; a gradient is
                sparse or not finite (it is named); the module or the optimizer has other parameters now, or buffers of
                another size; or a number of this worker's parameter groups was changed, which the servers do not see.
                Nothing was pushed then, to any server.
            RuntimeError, CommError: as from :meth:`pull`; or no parameter has a gradient. Nothing was pushed then.
        """
        self._require_worker("push")
        samples = bounded("samples", samples, "a positive, finite number", lambda n: 0 < n < math.inf)
        if not self._has_pulled:
            raise ValueError("push() before pull(): the servers could not know what the gradient belongs to")
        self._trained.require_as_met()
        flat, size = self._buffers.flat() if self._num_buffer_bytes else None, self._num_buffer_bytes
        if flat is not None and len(flat) != size:
            raise ValueError(f"the buffers have {len(flat)} bytes, and had {size}: nothing was pushed")
        if self._settings.buffers == "local" and self._num_steps & (self._num_steps + 1) == 0:
            self._buffers.compare([self._digests, self._buffers.digests()], "this worker and the servers")
        self._load()
        for link in self._links:
            link.push(samples, flat if link is self._links[0] else None)
        self._has_pulled = False
        self._num_steps += 1

    def _load(self) -> None:
        """Prepare a push to all servers; prepare none before an error."""
        gradients = [p.grad for p in self._params]
        if all(gradient is None for gradient in gradients):  # zeros would let momentum and weight decay step
            raise RuntimeError(
                "no parameter has a gradient from a backward() since the pull: nothing was pushed. Was a "
                "copy of the model trained, or zero_grad() called after backward()? To leave a batch out, leave out "
                "its whole server.step(), or pull() again without a push()"
            )
        named = list(zip(self._names, gradients, strict=True))
        for name, gradient in named:
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name!r} is sparse: servers take dense ones")
        finite = [link.load(gradients) for link in self._links]
        if all(finite):
            return
        for link in self._links:
            link.unload()
        bad = next((name for name, g in named if g is not None and not torch.isfinite(g).all()), None)
        method = self._settings.compression
        what = f"gradients overflow in {method}" if bad is None else f"the gradient of {bad!r} is not finite"
        raise ValueError(f"{what}: nothing was pushed")

    @contextlib.contextmanager
    def step(self, samples: float = 1.0) -> Iterator[None]:
        """Pull, clear the gradients, run the block, and push its gradients. Nothing is pushed if the block raises.

        Raises:
            RuntimeError, ValueError, CommError: as from :meth:`pull` and :meth:`push`.
        """
        self.pull()
        for p in self._params:
            p.grad = None
        yield
        self.push(samples)

    def stats(self) -> dict[str, Any]:
        """Return counters.

        Returns:
            On a worker: its ``steps`` (pushes), ``bytes_sent`` and ``wait_seconds``, and ``servers``, a list of each
            server's counters. On a serving rank: ``updates``, ``pushes``, ``dropped`` (gradients that came too late in
            mode "sync"), ``duplicates``, ``lost`` (pushes that came after the checkpoint from which the server has
            restarted), ``staleness`` (number of gradients by their age in updates, as text) and ``workers`` (their
            numbers).
        """
        if self._is_closed:
            return dict(self._last_stats)
        if not self.is_worker:
            return {}
        return {
            "steps": self._num_steps,
            "bytes_sent": sum(link.bytes_sent for link in self._links),
            "wait_seconds": sum(link.seconds for link in self._links),
            "servers": [link.stats() for link in self._links],
        }

    def schedule(self, scheduler: Any, *, samples: float | None = None) -> None:
        """Step ``scheduler``, of this rank's optimizer, on the servers. Call it before ``close()`` on every rank.

        Args:
            scheduler: a torch schedule, or an object with its ``step``, ``state_dict`` and ``load_state_dict``. On
                a worker, whose optimizer never steps, it is not stepped.
            samples: step after every ``samples`` samples, as given to :meth:`push`; after each update if ``None``.

        Raises:
            ValueError: ``samples`` is not a positive number.
        """
        if samples is not None:
            samples = positive("samples", samples)
        if self.is_worker:
            self._trained.remember_numbers()  # the scheduler's constructor has changed them
        else:
            self._core.shard.schedule(scheduler, samples)

    def _require_worker(self, what: str) -> None:
        if not self.is_worker:
            raise RuntimeError(f"{what}() on rank {self._meeting.rank}, which serves: call close() there")
        if self._is_closed:
            raise RuntimeError(f"{what}() after close()")

    # Servers.

    def _make_core(self) -> tuple[Core, SharedMemory]:
        pieces, settings = self._shards[self._meeting.rank], self._settings
        wire, size = self._params[0].dtype, sum(piece.size for piece in pieces)
        dtype, unpackers = shard_dtype(wire), None
        if settings.compression is not None:
            unpackers = Unpackers([self._params[piece.index] for piece in pieces], settings.compression, dtype)
        memory = SharedMemory(max(1, size) * dtype.itemsize)
        shard = ShardOptimizer(self._optimizer, pieces, memory.tensor(dtype)[:size])
        rules, compensator = settings.mode.rules(), Compensator(settings.mode)
        buffers = ServerBuffers(self._buffers) if self._num_buffer_bytes and self._meeting.rank == 0 else None
        return Core(shard, rules, compensator, wire, unpackers, settings.of_updates(), buffers), memory

    def _serve(self) -> None:
        settings, meeting, core, files = self._settings, self._meeting, self._core, self._files
        assert files is not None
        with contextlib.ExitStack() as opened:
            opened.callback(files.close)
            with meeting.reporting(meeting.rank, meeting.size - settings.servers):
                files.begin(core)
                listener = meeting.open_listener()
                opened.callback(listener.close)
                expected = set(core.mode.workers if meeting.is_late else range(settings.servers, meeting.size))
                serving = Serving(
                    *(core, self._memory, listener, rendezvous.host_identity(), expected),
                    *(settings.timeout, meeting.rank, files.checkpoint, files.trace),
                )
            opened.callback(serving.close)
            meeting.publish_address(meeting.rank, listener)
            try:
                with meeting.reporting(meeting.rank, len(expected), "cannot go on", serving.close):
                    serving.run()
            finally:
                self._last_stats = serving.stats()
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Write this server's shard to the model, whose cut parameters are not views of it."""
        pieces = self._shards[self._meeting.rank]
        values = torch.split(self._core.shard.memory, [piece.size for piece in pieces])
        with flat_parts(self._params, pieces) as targets:
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        if self._core.buffers is not None:
            self._buffers.write(self._core.buffers.at(self._core.shard.num_updates))

    def close(self) -> None:
        """End this worker; on a serving rank, serve until all workers have ended. Idempotent."""
        if self._is_closed:
            return
        try:
            if self.is_worker:
                self._last_stats = self.stats()
                self._trained.close()
                for link in self._links:
                    link.close()
            else:
                self._serve()
        finally:
            self._is_closed = True
            for link in self._links:  # after an error, so that the other servers do not wait for this worker
                link.abandon()
            self._buffers.close()
            if not self.is_worker:
                self._memory.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

"""WorkerGroup of ``bench.asynchronous``: rank 0 serves, the others work."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from bench.harness.learning_rate import learning_rate_rule
from bench.harness.ranks import join_group
from pycomm import kernels
from pycomm.tools.cli.demo.model import ByteGPT, Corpus, loss_of, random_starts, read_corpus, windows

OURS, GLOO, REDUCE = "pycomm, push and pull", "Gloo, send and recv", "pycomm, all_reduce in empty"
MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "ssp, bound 100": {"mode": pycomm.StaleSynchronous(100)},
    "softsync 2": {"mode": pycomm.Sync(quorum=2)},
    "sync, backup 1": {"mode": pycomm.Sync(backup=1)},
    "sync": {"mode": "sync"},
}


@dataclass(frozen=True)
class Way:
    """Way of training: with ``lr``, and ``local_sgd`` if it has options for it."""

    lr: float
    local: Mapping[str, Any] | None = None
    is_alone: bool = False


WAYS = {
    "attach": Way(12e-3),
    "local SGD, 100": Way(16e-3, {"every": 100}),
    "DiLoCo, 100": Way(16e-3, {"every": 100, "outer": pycomm.Nesterov(0.8, 0.5)}),
    "one rank alone": Way(12e-3, is_alone=True),
}
_BATCH, _CONTEXT = 32, 64  # of what is trained
_MODEL_WIDTH, _MODEL_LAYERS = 32, 1
_WINDOWS = 2048  # of text that is not trained on
_WIDTH = 1000
_TURNS = 4  # of an exchange in one turn
_STEPS, _PAUSE = 40, 0.02


class ServerRank:
    """One rank of the bench."""

    def __init__(self, port: int, megabytes: int) -> None:
        self.rank, self._size = join_group(port)
        if self.rank == 0:  # whose updates the workers wait for, and leave it their cores meanwhile
            kernels.set_num_threads(os.cpu_count())
        self._count = megabytes * 1_000_000 // 4
        self._buffer = torch.ones(self._count)
        self._communicator = pycomm.Communicator()
        self._shared = self._communicator.empty(self._count, torch.float32)
        self._shared.zero_()

    def exchange(self, way: str) -> float:
        """Return the seconds of one exchange, on average over a few; 0 on the server."""
        dist.barrier()
        if way == OURS:
            return self._push_and_pull()
        start = time.perf_counter()
        for _ in range(_TURNS):
            if way == REDUCE:
                self._communicator.all_reduce(self._shared)
            elif self.rank == 0:
                self._serve_gloo()
            else:
                dist.send(self._buffer, 0)
                dist.recv(self._buffer, 0)
        return (time.perf_counter() - start) / _TURNS

    def _serve_gloo(self) -> None:
        workers = range(1, self._size)
        for worker in workers:
            dist.recv(self._buffer, worker)
        works: list[Any] = [dist.isend(self._buffer, worker) for worker in workers]
        for work in works:
            work.wait()

    def _push_and_pull(self) -> float:
        model = nn.Linear(_WIDTH, self._count // _WIDTH, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 1e-3), model)
        seconds = 0.0
        if server.is_worker:
            model.weight.grad = torch.ones_like(model.weight)
            server.pull()
            server.push()
            server.pull()  # all memory has been touched
            start = time.perf_counter()
            for _ in range(_TURNS):
                server.push()
                server.pull()
            seconds = (time.perf_counter() - start) / _TURNS
            expected = -1e-3 * server.stats()["servers"][0]["updates"]
            assert abs(model.weight[0, 0].item() - expected) < 1e-3 * self._size * _TURNS
        server.close()
        return seconds

    def rate(self, mode: str, factor: int) -> float:
        """Return a worker's steps a second, where the last rank sleeps ``factor`` times as long; 0 on the server."""
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 1e-3), model, **MODES[mode])
        rate = 0.0
        if server.is_worker:
            is_slow = self.rank == self._size - 1
            steps = max(1, _STEPS // factor) if is_slow else _STEPS
            start = time.perf_counter()
            for _ in range(steps):
                with server.step():
                    time.sleep(_PAUSE * (factor if is_slow else 1))
                    model(torch.ones(1, 8)).sum().backward()
            rate = steps / (time.perf_counter() - start)
        server.close()
        return rate

    def train(self, way: str, steps: int, seed: int) -> tuple[float, int]:
        """Return the loss of a language model that was trained in this way, and the bytes that this rank has sent."""
        chosen, corpus = WAYS[way], read_corpus()
        torch.manual_seed(seed)
        model = ByteGPT(_MODEL_WIDTH, _MODEL_LAYERS, _CONTEXT, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr, betas=(0.9, 0.99), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_rule(steps))
        handle: Any = None
        if chosen.local is not None:
            handle = pycomm.local_sgd(optimizer, model, **chosen.local)
        elif not chosen.is_alone:
            handle = pycomm.attach(optimizer, model)
        starts = random_starts(corpus.train, _CONTEXT, (steps, self._size, _BATCH), seed)
        for step in range(steps):
            inputs, targets = windows(corpus.train, starts[step, self.rank], _CONTEXT)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        if chosen.local is not None:
            handle.meet()
        num_bytes = 0 if handle is None else int(handle.stats()["bytes_sent"])
        if handle is not None:
            handle.detach()
        return self._validate(model, corpus), num_bytes

    def _validate(self, model: torch.nn.Module, corpus: Corpus) -> float:
        """Return the mean loss of this rank's model over windows of text that was not trained on."""
        starts = random_starts(corpus.validation, _CONTEXT, (_WINDOWS,), 1)
        with torch.no_grad():
            parts = [windows(corpus.validation, part, _CONTEXT) for part in torch.split(starts, 64)]
            return sum(float(loss_of(model(x), y)) * len(x) for x, y in parts) / _WINDOWS

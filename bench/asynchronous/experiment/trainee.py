"""WorkerGroup of the experiment: workers, and a server at rank 0 where there is one."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from bench.asynchronous.experiment.methods import METHODS, SLOWNESS, Method, Outcome, Run
from bench.harness.ranks import join_group
from pycomm.tools.cli.demo.model import ByteGPT, loss_of, random_starts, read_corpus, windows
from pycomm.training.asynchronous.local_averager import LocalAverager

BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 8, 64, 64, 2, 2
_WINDOWS, _SEED = 256, 1


class Trainee:
    """One rank. ``has_server``: rank 0 serves, and the others work."""

    def __init__(self, port: int, has_server: bool) -> None:
        self.rank, self._size = join_group(port)
        self._worker = self.rank - has_server
        self._num_workers = self._size - has_server
        self._corpus = read_corpus()

    def train(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Train as :class:`Run` says; return an :class:`Outcome`. Both as dicts."""
        run = Run(**settings)
        method = METHODS[run.method]
        torch.manual_seed(run.seed)
        model = ByteGPT(WIDTH, LAYERS, CONTEXT, HEADS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.99))
        if method.served is not None:
            outcome, kept = self._train_served(run, method, model, optimizer)
        else:
            outcome, kept = self._train_together(run, method, model, optimizer)
        outcome.points = [(at, self._validate(model, values)) for at, values in kept]
        return asdict(outcome)

    # What a worker does.

    def _compute(self, run: Run, step: int, model: torch.nn.Module) -> None:
        """Compute the gradients of a step, in the time that it takes on this worker."""
        begun = time.perf_counter()
        seed = run.seed + 1000 * self._worker + 100_000 * step
        inputs, targets = windows(
            self._corpus.train, random_starts(self._corpus.train, CONTEXT, (BATCH,), seed), CONTEXT
        )
        loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        is_slow = run.scenario == "slow" and self._worker == self._num_workers - 1
        left = run.pace * (SLOWNESS if is_slow else 1) - (time.perf_counter() - begun)
        time.sleep(max(0.0, left))

    def _stay_away(self, run: Run, begun: float, is_gone: bool) -> bool:
        """Sleep through the middle third, once, if this worker is the one that goes; return whether it has gone."""
        now = time.perf_counter() - begun
        if is_gone or run.scenario != "away" or self._worker < self._num_workers - 1 or now < run.seconds / 3:
            return is_gone
        time.sleep(max(0.0, run.seconds * 2 / 3 - now))
        return True

    def _train_served(
        self, run: Run, method: Method, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Outcome, list[tuple[float, list[torch.Tensor]]]]:
        assert method.served is not None
        server = pycomm.parameter_server(optimizer, model, timeout=120, **method.served)
        outcome, kept = Outcome(), list[tuple[float, list[torch.Tensor]]]()
        if server.is_worker:
            server.pull()
            begun, is_gone, step = time.perf_counter(), False, 0
            while (now := time.perf_counter() - begun) < run.seconds:
                is_gone = self._stay_away(run, begun, is_gone)
                with server.step():
                    if self._worker == 0 and now >= run.seconds / run.points * len(kept):
                        kept.append((time.perf_counter() - begun, _copies(model)))
                    self._compute(run, step, model)
                step += 1
                outcome.times.append(time.perf_counter() - begun)
            outcome.bytes_sent = server.stats()["bytes_sent"]
            server.pull()
            if self._worker == 0:
                kept.append((time.perf_counter() - begun, _copies(model)))
        server.close()
        return outcome, kept

    def _train_together(
        self, run: Run, method: Method, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Outcome, list[tuple[float, list[torch.Tensor]]]]:
        assert method.attach is not None
        handle = method.attach(optimizer, model)
        outcome, kept = Outcome(), list[tuple[float, list[torch.Tensor]]]()
        num_steps = run.steps_in_step()
        dist.barrier()
        begun, is_gone, step = time.perf_counter(), False, 0
        while True:
            now = time.perf_counter() - begun
            share = step / num_steps  # of the training
            if share * run.points >= len(kept) and (self._worker == 0 or method.is_mixed):
                kept.append((now, _center(handle, model)))
            if share >= 1.0:
                break
            is_gone = self._stay_away(run, begun, is_gone)
            optimizer.zero_grad()
            self._compute(run, step, model)
            optimizer.step()
            step += 1
            outcome.times.append(time.perf_counter() - begun)
        outcome.bytes_sent = int(handle.stats()["bytes_sent"])
        handle.detach()
        dist.barrier()
        if method.is_mixed:
            for _, values in kept:
                for value in values:
                    dist.all_reduce(value)
                    value /= self._size
        return outcome, kept if self._worker == 0 else []

    def _validate(self, model: torch.nn.Module, values: list[torch.Tensor]) -> float:
        """Return the mean loss over windows of text that was not trained on, the same in every call."""
        for p, value in zip(model.parameters(), values, strict=True):
            p.data = value
        starts = random_starts(self._corpus.validation, CONTEXT, (_WINDOWS,), _SEED)
        with torch.no_grad():
            parts = [windows(self._corpus.validation, part, CONTEXT) for part in torch.split(starts, 64)]
            return sum(float(loss_of(model(x), y)) * len(x) for x, y in parts) / _WINDOWS


def _copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _center(handle: Any, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what the ranks have in common; where they have nothing, or all, this rank's parameters."""
    if not isinstance(handle, LocalAverager):
        return _copies(model)
    anchors = handle.state_dict()["anchors"]
    return [anchors[name] for name, _ in model.named_parameters()]

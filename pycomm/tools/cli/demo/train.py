"""Program of each rank: trains a model by every method in turns, on this host and then over the slow link."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import signal
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.compression import Compression
from pycomm.schedule.network import Link, Network
from pycomm.tools.cli.demo import network
from pycomm.tools.cli.demo.model import ByteGPT, Corpus, loss_of, random_starts, read_corpus, windows
from pycomm.tools.cli.demo.results import Death, Results, RunOutcome, smoothed
from pycomm.tools.cli.demo.settings import HEAD_WIDTH, HOST_METHODS, LINK_METHODS, MOMENTUM, DemoMethod, DemoSettings
from pycomm.tools.launching import PATIENCE, Send
from pycomm.tools.launching.reporting import Progress
from pycomm.training.cost.planning import SimulatedLink
from pycomm.training.cost.pricing import rehearse

_HOST_SHARE = 0.3  # of the seconds
_WARM_UP_STEPS = 3
_TURNS = 8
_LATENCY = 100e-6  # of the simulated link
_DEATH_STEPS = 120
_VALIDATION_WINDOWS = 256
_VALIDATION_BATCH = 32
_VALIDATION_SEED = 2**31


def make_model(settings: DemoSettings) -> ByteGPT:
    """Return the untrained model, the same on all ranks."""
    torch.manual_seed(settings.seed)
    return ByteGPT(settings.width, settings.layers, settings.context, settings.width // HEAD_WIDTH)


def train(settings: DemoSettings, send: Send) -> None:
    """Train on this host, then over the slow link, and report the results. Collective."""
    corpus, untrained = read_corpus(), make_model(settings)
    initial_loss = validate(untrained, corpus, settings.context)
    host_seconds = _HOST_SHARE * settings.seconds
    send = send if dist.get_rank() == 0 else lambda _message: None
    host = DemoPart(HOST_METHODS, untrained, corpus, settings, host_seconds, 0.0, send).train()
    if settings.hosts:
        _move_to_own_host(settings)
        logging.getLogger("pycomm").setLevel(logging.ERROR)  # no warning that these hosts are one machine
    link = DemoPart(
        LINK_METHODS, untrained, corpus, settings, settings.seconds - host_seconds, host_seconds, send
    ).train()
    send(Progress(round(settings.seconds), round(settings.seconds)))
    send(Results(sum(p.numel() for p in untrained.parameters()), initial_loss, host, link))


class DemoPart:
    """Part of the demo. Its runs take turns in the same processes, so that other load affects all of them equally.

    Every run gets the same seconds, so the number of its steps depends on its speed. Step ``i`` of every run sees the
    same text, a different one on each rank.
    """

    def __init__(
        self,
        methods: Sequence[DemoMethod],
        untrained: nn.Module,
        corpus: Corpus,
        settings: DemoSettings,
        seconds: float,
        before: float,
        send: Send,
    ) -> None:
        self._corpus, self._settings, self._before, self._send = corpus, settings, before, send
        self._share = seconds / len(methods)
        over_link = methods is LINK_METHODS
        self._counts_bytes = over_link and bool(settings.hosts)
        self._trainees = [Trainee(copy.deepcopy(untrained), method, sgd=over_link) for method in methods]
        self._outcomes = [RunOutcome(method.label, wire_bytes=0.0 if over_link else None) for method in methods]
        self._simulated = [0.0] * len(methods)
        if over_link and not settings.hosts:
            for number, method in enumerate(methods):
                self._simulated[number], self._outcomes[number].wire_bytes = _simulate(method, untrained, settings)

    def train(self) -> list[RunOutcome]:
        """Train and return the outcomes. Collective."""
        for turn in range(1 + _TURNS):
            numbers = range(len(self._trainees))
            for number in numbers if turn % 2 == 0 else reversed(numbers):
                if self._take_turn(number):
                    self._report(self._outcomes[number])
        for trainee, outcome in zip(self._trainees, self._outcomes, strict=True):
            trainee.close()
            outcome.validation_loss = validate(trainee.model, self._corpus, self._settings.context)
            outcome.difference = first_difference(trainee.model)
        return self._outcomes

    def _take_turn(self, number: int) -> bool:
        """Take as many steps as fit in one turn; return ``False`` if the run has used up its seconds."""
        outcome = self._outcomes[number]
        steps = _WARM_UP_STEPS
        if outcome.turns:
            if len(outcome.turns) > 1 and outcome.seconds[-1] - sum(outcome.turns[0]) >= self._share:
                return False
            steps = max(1, round(self._share / _TURNS / statistics.median(outcome.turns[-1])))
        dist.barrier()  # else the first step would also wait for work of the previous turn
        sent = network.bytes_sent() if self._counts_bytes else 0
        taken = [self._step(number, len(outcome.losses) + i) for i in range(steps)]
        dist.barrier()  # a rank's queue may not be empty when its step ends
        sent = network.bytes_sent() - sent if self._counts_bytes else 0
        table = torch.tensor(taken, dtype=torch.float64).T.contiguous()
        dist.all_reduce(table[0], dist.ReduceOp.MAX)
        dist.all_reduce(table[1])
        before = len(outcome.losses)
        outcome.turns.append([seconds + self._simulated[number] for seconds in table[0].tolist()])
        outcome.losses += (table[1] / dist.get_world_size()).tolist()
        if self._counts_bytes and outcome.wire_bytes is not None:
            outcome.wire_bytes += (sent / steps - outcome.wire_bytes) * steps / (before + steps)
        return True

    def _step(self, number: int, step: int) -> tuple[float, float]:
        settings = self._settings
        seed = (settings.seed << 40) + (step << 16) + dist.get_rank()
        starts = random_starts(self._corpus.train, settings.context, (settings.batch,), seed)
        return self._trainees[number].step(*windows(self._corpus.train, starts, settings.context))

    def _report(self, last: RunOutcome) -> None:
        used = sum(min(self._share, outcome.seconds[-1]) for outcome in self._outcomes if outcome.turns)
        total = round(self._settings.seconds)
        done = min(total - 1, round(self._before + used))  # only the end of the demo reports the total
        self._send(Progress(done, total, {f"loss of {last.label}": float(smoothed(last.losses)[-1])}))


def _move_to_own_host(settings: DemoSettings) -> None:
    """Leave the process group of this host, and join one over the slow link."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    network.move_to(settings.hosts[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = network.DEVICE
    store = TCPStore(network.address(0), network.PORT, size, rank == 0, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _simulate(method: DemoMethod, model: nn.Module, settings: DemoSettings) -> tuple[float, float]:
    """Return the simulated seconds of a step's communication on the slow link, and its bytes."""
    link = Link(alpha=_LATENCY, beta=8e-6 / settings.megabits, gamma=0.0)
    network = Network(name="slow link", within_host=link, between_hosts=link, per_host=1)
    simulated = SimulatedLink(settings.ranks, network)
    costs = rehearse(compression_of(method), list(model.parameters()), settings.ranks)
    return sum(simulated.seconds(operation) for operation in costs.operations), float(costs.num_bytes(settings.ranks))


def validate(model: nn.Module, corpus: Corpus, context: int) -> float:
    """Return the mean loss over fixed windows of the validation text, divided among the ranks. Collective."""
    starts = random_starts(corpus.validation, context, (_VALIDATION_WINDOWS,), _VALIDATION_SEED)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for batch in torch.split(starts[dist.get_rank() :: dist.get_world_size()], _VALIDATION_BATCH):
            inputs, targets = windows(corpus.validation, batch, context)
            total += loss_of(model(inputs), targets, reduction="sum")
    dist.all_reduce(total)
    return total.item() / (_VALIDATION_WINDOWS * context)


def train_with_a_death(settings: DemoSettings, send: Send) -> None:
    """Train; half-way, kill the last rank in the middle of a backward pass. Collective among the others."""
    corpus, model = read_corpus(), make_model(settings)
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        logging.getLogger("pycomm").setLevel(logging.ERROR)  # rank 0 logs the death
    optimizer = make_optimizer(model, None)
    reducer = pycomm.attach(
        optimizer, model, survive=pycomm.Survive(), tuning=pycomm.Tuning(check_replicas=10, timeout=PATIENCE)
    )
    seconds, losses = [], []
    for step in range(1, _DEATH_STEPS + 1):
        if rank == size - 1 and step == _DEATH_STEPS // 2:
            middle = list(model.parameters())[len(list(model.parameters())) // 2]
            middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        starts = random_starts(
            corpus.train, settings.context, (settings.batch,), (settings.seed << 40) + (step << 16) + rank
        )
        inputs, targets = windows(corpus.train, starts, settings.context)
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            send(Progress(step, _DEATH_STEPS, {"loss": losses[-1], "ranks": len(reducer.world)}))
    if tuple(reducer.world) != tuple(range(size - 1)):
        raise RuntimeError(f"the ranks that go on are {reducer.world}, wanted all of {size} but the last")
    if rank == 0:
        send(Death(size, _DEATH_STEPS // 2, seconds, losses))


_ADAM_RATE, _SGD_RATE = 1e-3, 0.01
_RAMP_STEPS = 10


def make_optimizer(model: nn.Module, momentum: float | None) -> torch.optim.Optimizer:
    """Return AdamW, or SGD with ``momentum``."""
    if momentum is None:
        return torch.optim.AdamW(model.parameters(), lr=_ADAM_RATE, betas=(0.9, 0.99), fused=True)
    return torch.optim.SGD(model.parameters(), lr=_SGD_RATE, momentum=momentum, fused=True)


def compression_of(method: DemoMethod) -> Compression:
    """Return pycomm's equivalent of the method's compression."""
    if method.dgc is not None:
        return pycomm.DGC(method.dgc, momentum=MOMENTUM)
    return pycomm.FP16() if method.fp16_hook else pycomm.NoCompression()


def _ramp(step: int) -> float:
    return min(1.0, (step + 1) / _RAMP_STEPS)


class Trainee:
    """Trains ``model`` by ``method``, with SGD if ``sgd``, else with AdamW."""

    def __init__(self, model: nn.Module, method: DemoMethod, sgd: bool) -> None:
        self.model, self._forward = model, model
        compression = compression_of(method)
        momentum = 0.0 if isinstance(compression, pycomm.DGC) else MOMENTUM  # DGC applies momentum itself
        self._optimizer = make_optimizer(model, momentum if sgd else None)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, _ramp)
        self._reducer: pycomm.Reducer | None = None
        if method.ddp:
            # DDP at its best: its default copies every gradient once more.
            self._forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if method.fp16_hook:
                self._forward.register_comm_hook(None, fp16_compress_hook)
        else:
            self._reducer = pycomm.attach(
                self._optimizer,
                model,
                compression=compression,
                shard=method.shard,
                tuning=pycomm.Tuning(timeout=PATIENCE),
            )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Do an ordinary training step; return its seconds and its loss."""
        start = time.perf_counter()
        loss = loss_of(self._forward(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start, loss.item()

    def close(self) -> None:
        """Stop averaging."""
        if self._reducer is not None:
            self._reducer.detach()
        self._forward, self._reducer = self.model, None


def first_difference(model: nn.Module) -> str | None:
    """Name the first parameter or buffer that is not bitwise equal on all ranks, or return ``None``. Collective."""
    state = model.state_dict()
    digests = [hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest() for tensor in state.values()]
    mine = torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for i, name in enumerate(state):
        for rank, theirs in enumerate(everyone):
            if not torch.equal(theirs[i], everyone[0][i]):
                return f"{name!r} differs between ranks 0 and {rank}"
    return None

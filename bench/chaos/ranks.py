"""Ranks of ``bench.chaos``: they train, report every step, and carry out the faults that they are ordered."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import faulthandler
import functools
import hashlib
import logging
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import pycomm
from bench.chaos.faults import Fault, Trap, allow_memory, lay
from pycomm.collectives.transport import rendezvous
from pycomm.compression import Compression
from pycomm.tools.launching import Pipe

_CLONE_NEWNET = 0x40000000

METHODS: dict[str, Compression | None] = {
    "dense": None,
    "topk": pycomm.TopK(0.05),
    "dgc": pycomm.DGC(0.05, momentum=0.9),
    "powersgd": pycomm.PowerSGD(2),
}


@dataclass(frozen=True)
class Setup:
    """Settings of a rank.

    Attributes:
        rank: its place among the first ranks; -1 for a newcomer.
        size: of the first ranks.
        address: "host:port" of the store.
        method: of compression.
        host: letter of the host that it says it is on; empty for none.
        namespace: of the network that it really is in; empty for this process's.
        pause: seconds of a step in which it does nothing.
        local_steps: steps that it takes alone before each average of parameters; 0: gradients are averaged.
        seed: of the model and its samples.
        timeout: of pycomm's operations.
    """

    rank: int
    size: int
    address: str
    method: str = "dense"
    host: str = ""
    namespace: str = ""
    pause: float = 0.002
    timeout: float = 10.0
    local_steps: int = 0
    seed: int = 0


class Steps:
    """Number of the current step, which newcomers get from present ranks."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def model_of(seed: int) -> nn.Sequential:
    """Return the model, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def batch(number: int, step: int, seed: int = 0, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` samples of the rank with that ``number`` in a step."""
    # torch seeds its generator with 32 bits: they have to come from all three numbers.
    mixed = random.Random(f"{seed}/{step}/{number}").getrandbits(32)
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(mixed))
    return x, torch.sin(2 * x[:, :5])


def vitals() -> dict[str, int]:
    """Return how much this process holds of everything that could leak."""
    with open("/proc/self/maps") as file:
        maps = sum("memfd:pycomm" in line for line in file)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    counts = {"descriptors": len(os.listdir("/proc/self/fd")), "mappings": maps, "bytes": resident}
    return {**counts, "threads": len(os.listdir("/proc/self/task"))}


def serve(_: int, pipe: Pipe, setup: Setup) -> None:
    """Run as a rank until ordered to end."""
    faulthandler.register(signal.SIGUSR1)
    logging.getLogger("pycomm").setLevel(logging.ERROR)
    lock = threading.Lock()

    def tell(*message: Any) -> None:
        with lock:
            pipe.send(message)

    try:
        _enter(setup)
        trap = Trap(lambda when: tell("fault", when, steps.number))
        lay(trap, tell)
        steps = Steps()
        (Averager if setup.local_steps else Trainee)(setup, steps, trap, tell).run(pipe)
        tell("ended", "")
    except BaseException as error:
        allow_memory()
        with contextlib.suppress(OSError):
            tell("ended", f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def enter_namespace(name: str) -> None:
    """Let this thread, and what it starts, use the network namespace called ``name``, or at the path ``name``."""
    with open(name if name.startswith("/") else f"/run/netns/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


def _enter(setup: Setup) -> None:
    """Be where ``setup`` says, in its group if it is one of the first ranks."""
    torch.set_num_threads(1)
    if setup.namespace:
        enter_namespace(setup.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if setup.namespace else "lo"
    if setup.host:
        real = rendezvous.host_identity()
        rendezvous.host_identity = lambda: f"{setup.host}{real}"
        os.environ["PYCOMM_SECRET"] = "what ranks of different hosts know"
    if setup.rank >= 0:
        host, _, port = setup.address.rpartition(":")
        patience = timedelta(seconds=60)
        store = TCPStore(host, int(port), is_master=False, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=patience)


class Trainee:
    """Training of one rank."""

    def __init__(self, setup: Setup, steps: Steps, trap: Trap, tell: Any) -> None:
        self._setup, self._steps, self._trap, self._tell = setup, steps, trap, tell
        self.model = model_of(setup.seed)
        momentum = 0.0 if setup.method == "dgc" else 0.9
        rate = 1.0 if setup.local_steps else 0.02
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum=0.0 if setup.local_steps else momentum)
        attach = pycomm.attach if setup.rank >= 0 else functools.partial(pycomm.join, setup.address)
        self.reducer = attach(
            self.optimizer,
            self.model,
            compression=METHODS[setup.method],
            survive=pycomm.Survive(carry={"steps": steps}),
            tuning=pycomm.Tuning(bucket_mb=0.006, timeout=setup.timeout),
        )
        self.number = setup.rank if setup.rank >= 0 else self.reducer.world[-1]
        self._last = -1
        self._faults: list[tuple[int, Fault]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self._trap.pass_by("step"))
        self._tell("ready", self.number, self.reducer.world)

    def run(self, orders: Pipe) -> None:
        """Train, and do what is ordered."""
        while self._last < 0 or self._steps.number < self._last:
            self._obey(orders)
            self._step()
            if not self._setup.local_steps:
                time.sleep(self._setup.pause)
        x, y = batch(0, 0, seed=-1, count=2000)
        with torch.no_grad():
            self._tell("loss", nn.functional.mse_loss(self.model(x), y).item())
        self.reducer.detach()

    def _obey(self, orders: Pipe) -> None:
        while orders.poll():
            order, argument = orders.recv()
            if order == "fault":
                self._faults.append((self._steps.number + argument.after, argument))
            elif order == "vitals":
                self._tell("vitals", vitals())
            else:
                self._last = argument
        for due, fault in list(self._faults):
            if due <= self._steps.number:
                self._trap.set(fault)
                self._faults.remove((due, fault))

    def _step(self) -> None:
        self._tell("begun", self._steps.number)
        with self._trapped():
            self.optimizer.zero_grad()
            self._backward()
            self.optimizer.step()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()
        self._tell("ended step", self._steps.number, time.monotonic(), digest[:16], self.reducer.world, self._seconds())
        self._steps.number += 1

    def _backward(self) -> None:
        x, y = batch(self.number, self._steps.number, self._setup.seed)
        nn.functional.mse_loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]

    def _seconds(self) -> list[float]:
        return [recovery["seconds"] for recovery in self.reducer.stats()["recoveries"]]

    @contextlib.contextmanager
    def _trapped(self) -> Any:
        """Put the trap in the layers in which the fault is to happen."""
        modules, params = list(self.model), list(self.model.parameters())
        module, param = self._trap.layer("forward", len(modules)), self._trap.layer("hook", len(params))
        handles: list[Any] = []
        if module is not None:
            handles.append(modules[module].register_forward_pre_hook(lambda *_: self._trap.pass_by("forward")))
        if param is not None:
            hook: Any = params[param].register_hook
            handles.append(hook(lambda _: self._trap.pass_by("hook")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Averager(Trainee):
    """Rank that trains alone most of the time.

    Its gradients are how far its own steps have taken it from the parameters that all ranks had: a step of SGD with
    rate 1 by their average makes the parameters the average of the ranks' own.
    """

    _has_worked = False

    def _backward(self) -> None:
        local = copy.deepcopy(self.model)
        own = torch.optim.SGD(local.parameters(), 0.02)
        if self._setup.rank >= 0 or self._has_worked:  # a newcomer's first pass only gets averages
            for i in range(self._setup.local_steps):
                x, y = batch(self.number, self._steps.number * self._setup.local_steps + i, self._setup.seed)
                own.zero_grad()
                nn.functional.mse_loss(local(x), y).backward()  # type: ignore[no-untyped-call]
                own.step()
                time.sleep(self._setup.pause)
        self._has_worked = True
        pairs = zip(self.model.parameters(), local.parameters(), strict=True)
        moved: Any = torch.stack([(mine * (mine - its).detach()).sum() for mine, its in pairs]).sum()
        moved.backward()

"""Cores of servers, and folders in which they have left two checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from pycomm.training.asynchronous.core import Core, ShardOptimizer, cut
from pycomm.training.asynchronous.modes import Compensator, StaleSynchronous, Sync, checked_mode
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint

SIZE = 8
MODES = {"async": "async", "ssp": StaleSynchronous(1), "softsync": Sync(quorum=2), "sync": "sync"}


def core_of(mode: str, settings: str = "", size: int = SIZE) -> Core:
    torch.manual_seed(0)
    model = nn.Linear(size // 2 - 1, 2).double()
    pieces = cut([size - 2, 2], 1, anywhere=True)[0]
    shard = ShardOptimizer(torch.optim.Adam(model.parameters(), 0.01), pieces, torch.zeros(size, dtype=torch.float64))
    chosen = checked_mode(MODES[mode])
    return Core(shard, chosen.rules(), Compensator(chosen), torch.float64, settings=settings)


def restored(mode: str, folder: Path) -> Core:
    """Return the core of a server that has restarted from ``folder``."""
    core = core_of(mode)
    ServerCheckpoint(folder, core.state_spec()).load(core)
    return core


def begun(mode: str, folder: Path) -> list[str]:
    """Let two workers push, and write two checkpoints; return the states.

    In the second one, a gradient was collected that is not applied yet, if the mode averages several.
    """
    core, states = core_of(mode), list[str]()
    checkpoint = ServerCheckpoint(folder, core.state_spec())
    for worker in (1, 2):
        core.join(worker, f"life {worker}")
    for number, workers in ((1, (1, 2)), (2, (1,))):
        for worker in workers:
            core.pull(worker)
            core.push(worker, number, 1.0 + worker, torch.randn(SIZE, dtype=torch.float64))
        checkpoint.write(core)
        states.append(str(core.state()))
    return states


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())

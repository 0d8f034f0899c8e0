"""Ranks of tests/transport/test_several_hosts.py: one process each, started inside a network namespace.

    python -m tests.several_hosts

Each prints what it found as one line of JSON.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm

COUNT = 1_000_000
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def bytes_of_a_sum(communicator: pycomm.Communicator) -> int:
    """Bytes that left this host for one all-reduce, by its interface's counter."""
    x = communicator.empty(COUNT).fill_(communicator.rank + 1.0)
    dist.barrier()
    before = int(_COUNTER.read_text())
    communicator.all_reduce(x)
    dist.barrier()
    size = communicator.size
    assert bool((x == size * (size + 1) / 2).all())
    return int(_COUNTER.read_text()) - before


def trained(rank: int) -> list[float]:
    """Train for some steps; the parameters' sums must be equal on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(bucket_mb=1.5, timeout=30))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 400, generator=generator)).square().mean().backward()
        optimizer.step()
    assert reducer.stats()["transport"] == "hierarchical"
    reducer.detach()
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with pycomm.Communicator(timeout=30) as communicator:
        found = {"transport": communicator.transport, "bytes": bytes_of_a_sum(communicator)}
    found["sums"] = trained(dist.get_rank())
    print(json.dumps(found), flush=True)
    dist.barrier()  # else a rank's output could be lost while others end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

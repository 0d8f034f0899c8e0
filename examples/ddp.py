"""DistributedDataParallel over pycomm: an ordinary script, except for the backend's name and the import.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo      # the same over Gloo, to compare

A perceptron learns to distinguish ten noisy pictures, which the script makes. With GPUs, each rank takes one.
several_hosts.md in this folder has the commands for several hosts.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pycomm  # registers the backend (from torch 2.14 on, torch finds it); used here for its counters, too

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 8192, 784, 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="pycomm", help="name of a backend of torch.distributed (default pycomm)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step (default 64)")
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers (default 1024)")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help=f"of all ranks (default {NUM_SAMPLES})")
    return parser.parse_args()


def make_data(count: int) -> TensorDataset:
    """Noisy copies of one random picture per class; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    return TensorDataset(pictures[labels] + 4.0 * torch.randn(count, NUM_FEATURES, generator=generator), labels)


def make_model(width: int) -> nn.Sequential:
    hidden = [nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(arguments.width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = make_data(arguments.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, arguments.batch, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total, start = torch.zeros((), device=device), time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]  # gradients are averaged over the ranks
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size() / len(loader)
        speed = sampler.total_size / (time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {mean:.4f}  {speed:.0f} samples/s", flush=True)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group(arguments.backend)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        train(arguments, device)
        if dist.get_rank() == 0 and arguments.backend == "pycomm":
            print("  ".join(f"{name} {value}" for name, value in pycomm.backend.stats().items()))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

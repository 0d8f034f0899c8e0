"""FSDP2 over pycomm: an ordinary script, except for the backend's name and the import.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py --backend gloo    # the same over Gloo, to compare

A small transformer learns to continue sequences that count in steps. Every rank keeps its shard of each parameter and
of the optimizer's state. With GPUs, each rank takes one. several_hosts.md in this folder has the commands for several
hosts.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import pycomm  # registers the backend (from torch 2.14 on, torch finds it); used here for its counters, too

VOCABULARY, LENGTH = 64, 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="pycomm", help="name of a backend of torch.distributed (default pycomm)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step (default 16)")
    parser.add_argument("--width", type=int, default=256, help="of the model, a multiple of 4 (default 256)")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


class Model(nn.Module):
    """Decoder of a language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        hidden = self.tokens(x) + self.places[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


def shard(model: Model, device: torch.device) -> None:
    """Shard each layer, and the rest of the model, over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        # Gathered parameters and gradients are in memory that all ranks of the host reach. Requires torch 2.9.
        if isinstance(module, FSDPModule) and hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)


def sequences(count: int, generator: torch.Generator) -> torch.Tensor:
    """Count in steps of 1 to 7, from anywhere."""
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 8, (count, 1), generator=generator)
    return (start + step * torch.arange(LENGTH + 1)) % VOCABULARY


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model(arguments.width, arguments.layers).to(device)
    shard(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    every = max(1, arguments.steps // 4)
    total, start = torch.zeros((), device=device), time.perf_counter()
    for step in range(1, arguments.steps + 1):
        batch = sequences(arguments.batch, generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach()
        if step % every == 0:
            dist.all_reduce(total)
            mean = total.item() / dist.get_world_size() / every
            speed = every * arguments.batch * dist.get_world_size() / (time.perf_counter() - start)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {mean:.4f}  {speed:.0f} samples/s", flush=True)
            total, start = torch.zeros((), device=device), time.perf_counter()


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

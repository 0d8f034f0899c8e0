"""Intra-operator parallelism: one fully connected layer of 100 million parameters over the ranks, P / N on each.

    torchrun --nproc-per-node 4 examples/split_layer.py
    torchrun --nproc-per-node 2 examples/split_layer.py --width 4096 --style rows

Every rank computes with its own columns (or rows) of the weights. The script prints the memory of each rank's part, and
how far output and gradients differ from the whole layer in one process.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import pycomm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=10_000, help="in and out: width^2 parameters (default 10000)")
    parser.add_argument("--batch", type=int, default=32, help="samples (default 32)")
    parser.add_argument("--style", choices=("columns", "rows"), default="columns")
    return parser.parse_args()


def run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the output, the gradient of the input, and the seconds that both took."""
    x = x.clone().requires_grad_()
    start = time.perf_counter()
    y: torch.Tensor = layer(x)
    y.square().mean().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    assert x.grad is not None
    return y.detach(), x.grad, seconds


def part_of(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return what this rank holds of a parameter or gradient."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def compare(arguments: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same layer and batch on every rank
    layer = nn.Linear(arguments.width, arguments.width)
    model = nn.Sequential(layer)
    x = torch.randn(arguments.batch, arguments.width)
    whole_y, whole_dx, whole_seconds = run(model, x)
    assert layer.weight.grad is not None
    dim = 0 if arguments.style == "columns" else 1  # torch's weights are [out, in]
    whole_dw = layer.weight.grad.tensor_split(ranks, dim)[rank].clone()
    count = sum(parameter.numel() for parameter in model.parameters())
    model.zero_grad()

    pycomm.parallel.split(model, pycomm.parallel.mesh(tp=ranks), {"0": arguments.style})
    y, dx, _ = run(model, x)  # the first time, to warm up
    assert part_of(layer.weight.grad).shape == whole_dw.shape
    far = [distance(*pair) for pair in ((y, whole_y), (dx, whole_dx), (part_of(layer.weight.grad), whole_dw))]
    model.zero_grad()
    seconds = run(model, x)[2]
    held = sum(part_of(parameter).numel() for parameter in model.parameters())
    if rank == 0:
        print(
            f"one fully connected layer: {count:,} parameters, {4 * count / 1e6:.0f} MB, {whole_seconds:.3f} s a step"
        )
    for turn in range(ranks):
        dist.barrier()
        if turn == rank:
            print(f"rank {rank}: {held:,} parameters, {4 * held / 1e6:.0f} MB, {seconds:.3f} s a step", flush=True)
    dist.barrier()
    if rank == 0:
        print("distance from one process: output {:.1e}, gradient of x {:.1e}, of the weights {:.1e}".format(*far))


def main() -> None:
    arguments = parse()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("pycomm")
    try:
        compare(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

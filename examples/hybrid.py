"""Data, tensor and pipeline parallelism at once, with compressed gradients between the replicas.

    torchrun --nproc-per-node 8 examples/hybrid.py                            # 2 replicas x 2 stages x 2 parts
    torchrun --nproc-per-node 4 examples/hybrid.py --dp 2 --pp 2 --tp 1       # two pairs, each with half of the batch
    torchrun --nproc-per-node 4 examples/hybrid.py --dp 2 --pp 1 --tp 2 --compression dgc

A deep perceptron learns to distinguish ten noisy pictures. Four lines are about devices: the mesh, the pipeline, the
split and the averaging. The rest is an ordinary script.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import pycomm

NUM_FEATURES, NUM_CLASSES = 784, 10
COMPRESSION = {"none": None, "fp16": pycomm.FP16(), "dgc": pycomm.DGC(0.01), "topk": pycomm.TopK(0.01)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("pp", "stages"), ("dp", "replicas"), ("tp", "parts of each layer")):
        parser.add_argument(f"--{name}", type=int, default=2, help=f"{what} (default 2)")
    parser.add_argument("--compression", choices=COMPRESSION, default="none", help="of gradients (default none)")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a replica's batch (default 4)")
    parser.add_argument("--batch", type=int, default=256, help="samples of all replicas together (default 256)")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers (default 512)")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def make_stages(count: int, width: int) -> list[nn.Module]:
    """Return the stages of the model, the same on every rank: blocks of two layers, and a classifier in the last."""
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for number in range(count):
        inputs = NUM_FEATURES if number == 0 else width
        block = nn.Sequential(nn.Linear(inputs, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        stages.append(block)
    stages[-1].append(nn.Linear(width, NUM_CLASSES))  # type: ignore[operator]
    return stages


def train(arguments: argparse.Namespace) -> None:
    mesh = pycomm.parallel.mesh(pp=arguments.pp, dp=arguments.dp, tp=arguments.tp)
    pipeline = pycomm.parallel.Pipeline(
        make_stages(arguments.pp, arguments.width),
        mesh,
        "one_f_one_b",
        microbatches=arguments.microbatches,
        loss=nn.functional.cross_entropy,
    )
    pycomm.parallel.split(pipeline.module, mesh, {"*.0": "columns", "*.2": "rows"})
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05, momentum=0.9)
    reducer = pycomm.attach(
        optimizer, pipeline.module, process_group=mesh["dp"], compression=COMPRESSION[arguments.compression]
    )
    replica, replicas = mesh["dp"].get_local_rank(), arguments.dp
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        labels = torch.randint(NUM_CLASSES, (arguments.batch,), generator=generator)
        x = pictures[labels] + 2.0 * torch.randn(arguments.batch, NUM_FEATURES, generator=generator)
        optimizer.zero_grad()
        loss = pipeline.step(x.tensor_split(replicas)[replica], target=labels.tensor_split(replicas)[replica])
        reducer.clip_grad_norm(1.0)  # of the whole model
        optimizer.step()
        if loss is not None and replica == 0 and mesh["tp"].get_local_rank() == 0 and step % 10 == 0:
            speed = step * arguments.batch / (time.perf_counter() - start)
            print(f"step {step}  loss {loss.item():.4f}  {speed:.0f} samples/s\n", end="", flush=True)
    stats = reducer.stats()
    sent = stats["bytes_sent"] / stats["steps"] / 1e3
    print(f"rank {dist.get_rank()}: {sent:.0f} KB sent per step\n", end="", flush=True)  # in one write


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

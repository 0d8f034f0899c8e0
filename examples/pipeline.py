"""Inter-operator parallelism: the layers of a model in stages on several ranks, pipelined in microbatches.

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --schedule zero_bubble_v --microbatches 8
    python examples/pipeline.py --show one_f_one_b --ranks 4           # only the table, its check and simulated time

A deep perceptron learns to distinguish ten noisy pictures. Each rank keeps only the layers of its own stages. The first
lines need no ranks. They show that the table is correct (every microbatch passes every stage in order, and no two ranks
wait for each other), and a simulation in which a backward takes twice as long as a forward.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.schedule import pipeline as tables

NUM_FEATURES, NUM_CLASSES = 784, 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=tables.names(), default="one_f_one_b", help="default one_f_one_b")
    parser.add_argument("--show", choices=tables.names(), help="show this schedule, and run nothing")
    parser.add_argument("--ranks", type=int, default=4, help="for --show (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a batch (default 8)")
    parser.add_argument("--batch", type=int, default=256, help="samples per step (default 256)")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def show(table: tables.Pipeline) -> None:
    """Print what is known before anything runs."""
    proof = tables.verify(table)
    price = tables.simulate(table, forward=1.0, backward=1.0 if table.splits_weights else 2.0, weights=1.0)
    print(f"{table.name}: {table.num_stages} stages on {table.num_ranks} ranks, {table.num_microbatches} microbatches")
    print(f"proven; microbatches held at once, by rank: {proof.peak_activations.tolist()}")
    print(f"simulated: {price.seconds:.0f} forwards' time, bubble {100 * price.bubble:.0f} %")


def make_layers(width: int, count: int) -> list[nn.Module]:
    """Return the layers of the model, the same on every rank."""
    torch.manual_seed(0)
    widths = [NUM_FEATURES, *[width] * (count - 1), NUM_CLASSES]
    return [
        nn.Sequential(nn.Linear(*sizes), nn.ReLU() if number < count - 1 else nn.Identity())
        for number, sizes in enumerate(pairwise(widths))
    ]


def stages_of(layers: list[nn.Module], num_stages: int) -> list[nn.Module]:
    """Return the layers in ``num_stages`` stages, as even as possible."""
    bounds = [len(layers) * number // num_stages for number in range(num_stages + 1)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(bounds)]


def train(arguments: argparse.Namespace) -> None:
    table = tables.by_name(arguments.schedule, dist.get_world_size(), arguments.microbatches)
    if dist.get_rank() == 0:
        show(table)
    stages = stages_of(make_layers(arguments.width, arguments.layers), table.num_stages)
    pipeline = pycomm.parallel.Pipeline(stages, None, table, loss=nn.functional.cross_entropy)
    del stages  # the pipeline keeps this rank's
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05, momentum=0.9)
    count = sum(parameter.numel() for parameter in pipeline.module.parameters())
    own = list(pipeline.stages)
    print(f"rank {dist.get_rank()}: stages {own}, {count:,} parameters\n", end="", flush=True)  # in one write
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        labels = torch.randint(NUM_CLASSES, (arguments.batch,), generator=generator)
        x = pictures[labels] + 2.0 * torch.randn(arguments.batch, NUM_FEATURES, generator=generator)
        optimizer.zero_grad()
        loss = pipeline.step(x, target=labels)  # on the rank with the last stage
        optimizer.step()
        if loss is not None and step % 10 == 0:
            speed = step * arguments.batch / (time.perf_counter() - start)
            print(f"step {step}  loss {loss.item():.4f}  {speed:.0f} samples/s\n", end="", flush=True)


def main() -> None:
    arguments = parse()
    if arguments.show:
        table = tables.by_name(arguments.show, arguments.ranks, arguments.microbatches)
        show(table)
        print(tables.picture(table))
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("pycomm")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Training that goes on when a rank dies, and takes in a new one: no restart, no checkpoint, no repeated step.

    python examples/survive_and_join.py

The script starts three ranks itself, because torchrun ends all of them when one dies. Rank 2 kills itself, ranks 0 and
1 finish its step without it, and a new process joins them as rank 3.
"""

import argparse
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_port
from torch import nn

import pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--port", type=int, default=29500, help="of rank 0, where ranks meet (default 29500)")
parser.add_argument("--join", action="store_true", help="be the process that comes later")
arguments = parser.parse_args()
train_data, test_data = load_digits()


def train() -> None:
    torch.set_num_threads(1)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    survive = pycomm.Survive(carry={"scheduler": scheduler})  # a new rank gets its state from the others
    if arguments.join:
        reducer = pycomm.join(f"127.0.0.1:{arguments.port}", optimizer, model, survive=survive)
    else:
        dist.init_process_group("gloo")
        reducer = pycomm.attach(optimizer, model, survive=survive)
    me = reducer.world[-1] if arguments.join else dist.get_rank()

    def report(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        if me == 0:
            print(f"step {scheduler.last_epoch}: ranks {old} -> {new}, accuracy {accuracy(model, test_data):.3f}")

    reducer.on_change(report)
    x, y = train_data.tensors
    left = 100  # steps that all make together once the new rank has come
    while left > 0:
        step = scheduler.last_epoch
        if (me, step) == (2, 30):
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:96]
        share = batch[reducer.world.index(me) :: len(reducer.world)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[share]), y[share])
        loss.backward()  # the average over the ranks that are left
        optimizer.step()
        scheduler.step()
        left -= 3 in reducer.world
    reducer.detach()
    if me == 0:
        print(f"step {scheduler.last_epoch}: ranks {reducer.world}, accuracy {accuracy(model, test_data):.3f}")


def start_ranks() -> None:
    """Start three ranks, and a new process when rank 2 has died."""
    need_port(arguments.port)
    command = [sys.executable, __file__, "--port", str(arguments.port)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port), "WORLD_SIZE": "3"}
    ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(3)]
    ranks[2].wait()
    ranks.append(subprocess.Popen([*command, "--join"]))
    sys.exit([rank.wait() for rank in ranks] != [0, 0, -signal.SIGKILL, 0])


if __name__ == "__main__":
    train() if arguments.join or "RANK" in os.environ else start_ranks()

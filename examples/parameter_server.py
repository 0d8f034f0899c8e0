"""A parameter server: rank 0 holds and steps the parameters, and each worker trains at its own pace.

    torchrun --nproc-per-node 3 examples/parameter_server.py
    torchrun --nproc-per-node 3 examples/parameter_server.py --mode sync    # each update waits for all workers

The last worker pauses after each gradient. In mode "async" the others do not wait for it, and push more gradients.
"""

import argparse
import time

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn

import pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mode", choices=["async", "sync"], default="async", help="default async")
parser.add_argument("--seconds", type=float, default=2.0, help="of training (default 2)")
parser.add_argument("--pause", type=float, default=0.05, help="seconds that the last worker pauses (default 0.05)")
arguments = parser.parse_args()
need_ranks(3)
train_data, test_data = load_digits()
x, y = train_data.tensors

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
pause = arguments.pause if rank == dist.get_world_size() - 1 else 0.0
model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
server = pycomm.parameter_server(optimizer, model, servers=1, mode=arguments.mode)
if server.is_worker:
    torch.manual_seed(rank)  # each worker draws its own samples
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        drawn = torch.randint(len(x), (32,))
        with server.step():  # pulls the parameters, and pushes the gradients at the end
            nn.functional.cross_entropy(model(x[drawn]), y[drawn]).backward()
        time.sleep(pause)
    print(f"worker {rank} pushed {server.stats()['steps']} gradients\n", end="")  # in one piece, as two do
server.close()  # on the server: serves until all workers have closed
if not server.is_worker:
    stats = server.stats()
    print(f"{stats['updates']} updates, gradients by their age in updates: {stats['staleness']}")
    print(f"accuracy {accuracy(model, test_data):.3f}")
dist.destroy_process_group()

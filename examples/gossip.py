"""Gossip (D-PSGD): after each step, a rank averages its parameters with one neighbor instead of all ranks.

    torchrun --nproc-per-node 4 examples/gossip.py
    torchrun --nproc-per-node 4 examples/gossip.py --topology ring

The bytes that a rank sends do not grow with the number of ranks. Ranks differ until the last average.
"""

import argparse

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--topology", choices=["exponential", "ring", "random"], default="exponential")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()
need_ranks(2)
train_data, test_data = load_digits()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gossip = pycomm.gossip(optimizer, model, topology=arguments.topology)
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=16, sampler=sampler)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # ends with the average
own = accuracy(model, test_data)
gossip.average()  # now all ranks have the mean
if dist.get_rank() == 0:
    stats = gossip.stats()
    print(f"accuracy {own:.3f} of rank 0, {accuracy(model, test_data):.3f} of the ranks' mean")
    print(f"{stats['bytes_sent'] / stats['mixings'] / 1e3:.0f} kB sent per step and rank")
gossip.detach()
dist.destroy_process_group()

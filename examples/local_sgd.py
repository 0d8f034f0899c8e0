"""Local SGD and DiLoCo: each rank trains by its own gradients, and parameters are averaged every 20 steps.

    torchrun --nproc-per-node 2 examples/local_sgd.py
    torchrun --nproc-per-node 2 examples/local_sgd.py --diloco    # an outer optimizer applies the mean

The last line compares the bytes with what averaging gradients in every step would send.
"""

import argparse

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--diloco", action="store_true", help="step by the averaged change, with Nesterov momentum")
parser.add_argument("--every", type=int, default=20, help="steps between averages (default 20)")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()
need_ranks(2)
train_data, test_data = load_digits()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = make_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = pycomm.Nesterov(0.7, 0.5) if arguments.diloco else None
averager = pycomm.local_sgd(optimizer, model, every=arguments.every, outer=outer)
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=16, sampler=sampler)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # every 20th ends with an average
averager.meet()  # ranks differ between averages
if dist.get_rank() == 0:
    stats = averager.stats()
    sent, gradients = stats["bytes_sent"], 4 * sum(p.numel() for p in model.parameters()) * stats["steps"]
    print(f"accuracy {accuracy(model, test_data):.3f} after {stats['steps']} steps")
    print(f"{sent / 1e6:.1f} MB sent in {stats['meetings']} averages; gradients are {gradients / 1e6:.1f} MB")
averager.detach()
dist.destroy_process_group()

"""Gradient compression (DGC) between two hosts: 1 % of the gradients is sent, and the rest is added to later steps.

    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 1 examples/two_hosts.py  # on 10.0.0.1
    torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 1 examples/two_hosts.py  # on the other
    torchrun --nproc-per-node 2 examples/two_hosts.py                                      # to try it on one machine

On both hosts, GLOO_SOCKET_IFNAME names the interface that leads to the other one (`ip -brief address` lists them). The
last line names the transport: "torch" between hosts, "hierarchical" with several ranks on each, "shared_memory" on one.
"""

import argparse

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ratio", type=float, default=0.01, help="share of the gradients that is sent (default 0.01)")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()
need_ranks(2)
train_data, test_data = load_digits()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: DGC applies it
method = pycomm.DGC(arguments.ratio, momentum=0.9, warmup_steps=50)
reducer = pycomm.attach(optimizer, model, compression=method)
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
for epoch in range(arguments.epochs):
    before = reducer.stats()["bytes_sent"]
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    sent = (reducer.stats()["bytes_sent"] - before) / len(loader)
    if dist.get_rank() == 0:
        print(
            f"epoch {epoch}: accuracy {accuracy(model, test_data):.3f}, {sent / 1e3:.1f} kB sent per step", flush=True
        )
if dist.get_rank() == 0:
    uncompressed = 4 * sum(p.numel() for p in model.parameters())
    print(f"{uncompressed / 1e3:.1f} kB per step without compression, transport {reducer.stats()['transport']}")
dist.destroy_process_group()

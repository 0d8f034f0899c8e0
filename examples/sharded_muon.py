"""Muon divided among the ranks: each rank orthogonalizes its own matrices only, and keeps only their momentum.

    torchrun --nproc-per-node 2 examples/sharded_muon.py

Muon takes matrices. AdamW steps the biases and the output layer, divided in the same way.
"""

import sys

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

if not hasattr(torch.optim, "Muon"):
    sys.exit(f"examples/sharded_muon.py needs torch 2.9, not {torch.__version__}: pip install 'torch>=2.9'")
need_ranks(2)
train_data, test_data = load_digits()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = make_net(hidden=3)
head = model[-1]
matrices = [p for p in model.parameters() if p.dim() == 2 and p is not head.weight]
others = [p for p in model.parameters() if p.dim() != 2 or p is head.weight]
muon = torch.optim.Muon(matrices, lr=0.02)
adamw = torch.optim.AdamW(others, lr=2e-3)
reducer = pycomm.attach(muon, model, shard="optimizer")
pycomm.attach(adamw, model, shard="optimizer")
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # gradients of both optimizers are averaged while it runs
        muon.step()
        adamw.step()
if dist.get_rank() == 0:
    whole, kept = sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if muon.state.get(p))
    print(f"accuracy {accuracy(model, test_data):.3f}")
    print(f"rank 0 of {dist.get_world_size()} keeps the momentum of {kept / whole:.0%} of the elements")
dist.destroy_process_group()

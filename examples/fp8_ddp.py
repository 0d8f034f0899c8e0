"""FP8 gradients inside DistributedDataParallel: the wrapper stays, and pycomm is its communication hook.

    torchrun --nproc-per-node 2 examples/fp8_ddp.py

A gradient takes one byte per element instead of four. What rounding leaves out is added to the next step.
"""

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

need_ranks(2)
train_data, test_data = load_digits()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(make_net())
handle = pycomm.ddp.register(model, compression=pycomm.FP8())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # the hook averages each bucket while backward runs
        optimizer.step()
if dist.get_rank() == 0:
    stats = handle.stats()
    sent = stats["bytes_sent"] / stats["steps"] / sum(p.numel() for p in model.parameters())
    print(f"accuracy {accuracy(model.module, test_data):.3f}")
    print(f"{sent:.2f} bytes sent per parameter and step over {stats['transport']}")
handle.remove()
dist.destroy_process_group()

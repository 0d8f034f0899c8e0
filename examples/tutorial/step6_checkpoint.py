"""Step 6 of docs/tutorial.md: checkpoints."""

import sys
import time

import torch
import torch.distributed as dist
from shapes import Net, accuracy, make_data
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
train_data, test_data = make_data()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)  # DGC applies the momentum
reducer = pycomm.attach(optimizer, model, compression=pycomm.DGC(0.01, momentum=0.9, warmup_steps=64))
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=64 // dist.get_world_size(), sampler=sampler)
try:
    first = pycomm.load("checkpoints", reducer)["epoch"]
    if dist.get_rank() == 0:
        print(f"go on with epoch {first}")
except FileNotFoundError:
    first = 0
for epoch in range(first, int(sys.argv[1])):
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    pycomm.save("checkpoints", reducer, epoch=epoch + 1)
    ms = 1000 * (time.perf_counter() - start) / len(loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy(model, test_data):.2f}, {ms:.1f} ms per step")
if dist.get_rank() == 0:
    stats = reducer.stats()
    print(f"{stats['bytes_sent'] / stats['steps'] / 1e6:.2f} MB sent per step over {stats['transport']}")
dist.destroy_process_group()

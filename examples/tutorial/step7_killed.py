"""Step 7 of docs/tutorial.md: a rank is killed, and the other continues."""

import os
import signal
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
reducer = pycomm.attach(optimizer, model, survive=pycomm.Survive())
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=64 // dist.get_world_size(), sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    for step, (x, y) in enumerate(loader):
        if (dist.get_rank(), epoch, step) == (1, 1, 10):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    ms = 1000 * (time.perf_counter() - start) / len(loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy(model, test_data):.2f}, {ms:.1f} ms per step, ranks {reducer.world}")
if dist.get_rank() == 0:
    stats = reducer.stats()
    print(f"{stats['bytes_sent'] / stats['steps'] / 1e6:.2f} MB sent per step over {stats['transport']}")
dist.destroy_process_group()

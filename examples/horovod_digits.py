"""A script for Horovod that runs on pycomm: only the import of `hvd` has changed.

    torchrun --nproc-per-node 2 examples/horovod_digits.py
    mpirun -np 2 python examples/horovod_digits.py    # or horovodrun, or srun: it starts as before

It was `import horovod.torch as hvd`. MPI and Horovod need not be installed.
"""

import torch
from common import accuracy, load_digits, make_net
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import pycomm.horovod as hvd

train_data, test_data = load_digits()

hvd.init()
torch.set_num_threads(1)
model = make_net()
sgd = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
named = model.named_parameters()
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=hvd.Compression.fp16)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean.item():.4f}, accuracy {accuracy(model, test_data):.3f}", flush=True)
hvd.shutdown()

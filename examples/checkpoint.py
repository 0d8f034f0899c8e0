"""Checkpoints: training that was stopped goes on from the last step, on the same number of ranks or another.

    torchrun --standalone --nproc-per-node 2 examples/checkpoint.py --stop-at 60      # SIGTERM to one rank: all save
    torchrun --standalone --nproc-per-node 3 examples/checkpoint.py                   # goes on, on three ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/checkpoint.py --folder other --fail-at 60
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # on each host, else torch lets no host come later
    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/checkpoint.py --folder /shared/run    # hosts may leave and join; all see this folder

With --fail-at, rank 0 kills itself, and torchrun starts all ranks again. On the same number of ranks, the last line
shows the same loss to the last digit, however often the training was interrupted. Remove the folder to begin again.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from common import accuracy, load_digits, make_net, need_ranks
from torch import nn

import pycomm
from pycomm.tools.launching import store_of_start

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of checkpoints (default checkpoints)")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--fail-at", type=int, help="step at which rank 0 kills itself, if training begins with step 0")
parser.add_argument("--stop-at", type=int, help="step at which the last rank gets SIGTERM, as from a batch system")
arguments = parser.parse_args()
need_ranks(1)
train_data, test_data = load_digits()
x, y = train_data.tensors

torch.set_num_threads(1)
store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
# torchrun's store keeps the addresses of ranks that have died: each start has its own part of it.
dist.init_process_group("gloo", store=store_of_start(store, rank, size), rank=rank, world_size=size)
model = make_net().insert(2, nn.Dropout(0.1))
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
reducer = pycomm.attach(optimizer, model, compression=pycomm.TopK(0.1))
try:
    start = pycomm.load(arguments.folder, reducer, scheduler=scheduler)["step"]
    if rank == 0:
        print(f"resumed after step {start} on {size} ranks", flush=True)
except FileNotFoundError:
    start = 0
pycomm.stop_on_signal(reducer, signal.SIGTERM)  # if one rank gets it, all leave after the same step
step = start
while step < arguments.steps and not reducer.stop_requested:
    if rank == 0 and start == 0 and step == arguments.fail_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == size - 1 and step == arguments.stop_at:
        os.kill(os.getpid(), signal.SIGTERM)
    batch = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[
        :64
    ]  # the same for any number of ranks
    share = batch[rank::size]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[share]), y[share])
    reducer.set_weight(len(share))  # every sample counts the same
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    pycomm.save(arguments.folder, reducer, step=step, scheduler=scheduler)  # threads write it
if rank == 0:
    if reducer.stop_requested:
        print(f"stopped: {reducer.stop_requested.reason} on rank {reducer.stop_requested.rank}")
    end = nn.functional.cross_entropy(model.eval()(x), y).item()
    print(f"{step} steps  loss {end!r}  accuracy {accuracy(model, test_data):.3f}", flush=True)
reducer.detach()
dist.destroy_process_group()

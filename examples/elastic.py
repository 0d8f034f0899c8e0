"""Training that continues when a process dies: torchrun starts all ranks again, and they load the last checkpoint.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py --fail-at 60    # rank 0 kills itself
    torchrun --standalone --nproc-per-node=2 examples/elastic.py --stop-at 60    # SIGTERM to one rank stops all
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # on each host, else torch lets no host come later
    torchrun --nnodes 1:4 --nproc-per-node=2 --max-restarts=3 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/elastic.py --folder /shared/run    # hosts may leave and join; all see this folder

A perceptron with dropout learns to distinguish ten noisy pictures. Each step takes the same samples with any number of
ranks: the ranks divide the batch. With the same number of ranks, the last line shows the same loss to the last digit,
however often the training was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.tools.launching import store_of_start

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 4096, 256, 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of checkpoints (default checkpoints)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, of all ranks (default 64)")
    parser.add_argument("--every", type=int, default=1, help="steps between two checkpoints (default 1)")
    parser.add_argument("--fail-at", type=int, help="step at which rank 0 kills itself, once")
    parser.add_argument("--stop-at", type=int, help="step at which the last rank gets SIGTERM, as from a batch system")
    parser.add_argument("--compression", choices=["none", "topk"], default="topk", help="default topk")
    return parser.parse_args()


class Sampler:
    """Sampler that saves its position; the batches of an epoch follow from the epoch's number."""

    def __init__(self, num_samples: int, batch: int) -> None:
        self._num_samples, self._batch = num_samples, batch
        self.epoch = self.position = 0

    def share(self, rank: int, size: int) -> torch.Tensor:
        """Return the samples of this rank in the next batch."""
        if self.position + self._batch > self._num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(self.epoch))
        batch = order[self.position : self.position + self._batch]
        self.position += self._batch
        return batch[rank::size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Progress:
    """Highest step that the training has ever reached, to count repeated steps, and the number of restarts.

    Agents of torchrun on several hosts each count their own restarts, so their numbers differ.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.json"
        self.reached, self.repeated, self.restarts = 0, 0, -1
        if self._path.exists():
            self.reached, self.repeated, self.restarts = json.loads(self._path.read_text())

    def resume(self, step: int) -> None:
        self.repeated += max(0, self.reached - step)
        self.restarts += 1

    def note(self, step: int) -> None:
        self.reached = max(self.reached, step)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps([self.reached, self.repeated, self.restarts]))
        beside.replace(self._path)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of one random picture per class; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    return pictures[labels] + 3.0 * torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator), labels


def resume(folder: Path, reducer: pycomm.Reducer, **more: Any) -> int:
    """Load the last checkpoint, if there is one; return the number of completed steps."""
    try:
        return int(pycomm.load(folder, reducer, **more)["step"])
    except FileNotFoundError:
        return 0


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    random.seed(rank)
    x, y = (part.to(device) for part in make_data())
    layers = [nn.Linear(NUM_FEATURES, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, NUM_CLASSES)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    compression = pycomm.TopK(0.1) if arguments.compression == "topk" else None
    reducer = pycomm.attach(optimizer, model, compression=compression)
    sampler = Sampler(NUM_SAMPLES, arguments.batch)
    start = resume(arguments.folder, reducer, scheduler=scheduler, sampler=sampler)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(arguments.folder)
    progress.resume(start)
    if rank == 0:
        progress.note(start)
    if start > 0:
        say(f"resumed after step {start}, having been as far as {progress.reached}, on {size} ranks")
    pycomm.stop_on_signal(reducer, signal.SIGTERM)  # if one rank gets it, all leave after the same step
    saved, step = None, start - 1
    for step in range(start, arguments.steps):
        send_signals(arguments, step, progress)
        share = sampler.share(rank, size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[share]), y[share])
        reducer.set_weight(len(share))  # every sample counts the same
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        if rank == 0:
            progress.note(step + 1)
        stopped = reducer.stop_requested
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps or stopped:
            saved = pycomm.save(arguments.folder, reducer, step=step + 1, scheduler=scheduler, sampler=sampler)
        if stopped:
            say(f"stopped: {stopped.reason} on rank {stopped.rank}")
            break
    if saved is not None:
        saved.wait()
    report(model.eval(), x, y, step + 1, progress)
    reducer.detach()


def send_signals(arguments: argparse.Namespace, step: int, progress: Progress) -> None:
    """Send this process the signals of `--fail-at` and `--stop-at`."""
    if dist.get_rank() == 0 and progress.restarts == 0 and step == arguments.fail_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == dist.get_world_size() - 1 and step == arguments.stop_at:
        os.kill(os.getpid(), signal.SIGTERM)


@torch.no_grad()
def report(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, progress: Progress) -> None:
    loss = nn.functional.cross_entropy(model(x), y).item()
    say(f"{steps} steps  loss {loss!r}  {progress.restarts} restarts  {progress.repeated} steps repeated")


def say(line: str) -> None:
    """Print a line on rank 0, in one piece."""
    if dist.get_rank() == 0:
        print(f"{line}\n", end="", flush=True)


def join(backend: str) -> None:
    """Make the process group, in a part of torchrun's store that no other start uses.

    All starts have the same store. Otherwise Gloo would find the addresses of dead ranks there and try to reach them.
    """
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = store_of_start(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Loss of each method that ``compression="auto"`` may choose, as a multiple of the loss with dense gradients.

    python -m bench.training.losses [--steps 200] [--json FILE]

The byte-level GPT of ``pycomm demo``, 2 layers of width 192, on the standard library's source text; two ranks of one
thread, 4 windows of 16 bytes per rank and step, by AdamW and by SGD with momentum. All get the same text and initial
weights; DGC applies SGD's momentum itself, after a warm-up of a quarter of the steps unless it is said to have none.
After each training, both ranks must have the same parameters. The figures are no times: with one version of torch,
one of Python, whose source text it is, and one kind of processor they are the same in each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from bench.harness.arguments import plain_parser, positive
from bench.harness.ranks import WorkerGroup, join_group
from bench.harness.results import headline, write_json
from pycomm.tools.cli.demo.model import ByteGPT, loss_of, random_starts, read_corpus, windows
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous
from pycomm.training.cost.auto import Auto

WIDTH, LAYERS, CONTEXT, BATCH, MOMENTUM = 192, 2, 16, 4, 0.9
_HEADS, _RAMP_STEPS, _WINDOWS, _WINDOWS_SEED = 3, 10, 512, 2**31
OPTIMIZERS = ("AdamW", "SGD")


def methods(optimizer: str, steps: int) -> dict[str, Any]:
    """Return the methods that are trained with ``optimizer``: auto's candidates, and others that auto leaves out."""
    found: dict[str, Any] = {**Auto().methods(), "powersgd(4)": pycomm.PowerSGD(4), "topk(1%)": pycomm.TopK(0.01)}
    if optimizer == "SGD":
        found["dgc"] = Auto(momentum=MOMENTUM, warmup_steps=steps // 4).methods()["dgc"]
        found["dgc without warm-up"] = pycomm.DGC(Auto().ratio, MOMENTUM)
        found["dgc(0.1%)"] = pycomm.DGC(0.001, MOMENTUM, warmup_steps=steps // 4)
    return found


class LossRank:
    """One rank."""

    def __init__(self, port: int) -> None:
        self._rank, _ = join_group(port)
        torch.set_num_threads(1)
        self._corpus = read_corpus()

    def train(self, optimizer: str, name: str, steps: int) -> float:
        """Train by a method; return the loss on text that was not trained on."""
        torch.manual_seed(0)
        model, method = ByteGPT(WIDTH, LAYERS, CONTEXT, _HEADS), methods(optimizer, steps)[name]
        made = self._made(optimizer, model, 0.0 if isinstance(method, pycomm.DGC) else MOMENTUM)
        ramp = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / _RAMP_STEPS))
        reducer = pycomm.attach(made, model, compression=method)
        for step in range(steps):
            starts = random_starts(self._corpus.train, CONTEXT, (BATCH,), (step << 16) + self._rank)
            inputs, targets = windows(self._corpus.train, starts, CONTEXT)
            made.zero_grad()
            loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            made.step()
            ramp.step()
        reducer.detach()
        mine = torch.cat([param.detach().flatten() for param in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(mine, first):
            raise AssertionError("the ranks' parameters differ")
        with torch.no_grad():
            starts = random_starts(self._corpus.validation, CONTEXT, (_WINDOWS,), _WINDOWS_SEED)
            inputs, targets = windows(self._corpus.validation, starts, CONTEXT)
            return float(loss_of(model(inputs), targets))

    @staticmethod
    def _made(optimizer: str, model: torch.nn.Module, momentum: float) -> torch.optim.Optimizer:
        if optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))

    def close(self) -> None:
        dist.destroy_process_group()


def main() -> None:
    parser = plain_parser("bench.training.losses", __doc__)
    parser.add_argument("--steps", type=positive, default=200, help="of each training (default 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    arguments = parser.parse_args()
    print(headline(), flush=True)
    losses: dict[str, dict[str, float]] = {}
    with rendezvous() as port, WorkerGroup("losses", "bench.training.losses:LossRank", 2, {"port": port}) as ranks:
        for optimizer in OPTIMIZERS:
            names = methods(optimizer, arguments.steps)
            losses[optimizer] = {name: ranks.call("train", optimizer, name, arguments.steps)[0] for name in names}
            dense = losses[optimizer]["dense"]
            ratios = {name: 100 * (loss / dense - 1) for name, loss in losses[optimizer].items()}
            rows = [[name, f"{losses[optimizer][name]:.3f}", f"{ratio:+.1f} %"] for name, ratio in ratios.items()]
            print_table([optimizer, "loss", "against dense"], rows)
    write_json(arguments.json, "training.losses", {"steps": arguments.steps}, {"losses": losses})


if __name__ == "__main__":
    main()

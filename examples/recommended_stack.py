"""The recommended stack: synchronous SGD with what papers on large-scale training recommend, in one script.

    python examples/recommended_stack.py                              # three ranks on this host, by pycomm.launch
    torchrun --nproc-per-node 3 examples/recommended_stack.py         # the same
    python examples/recommended_stack.py --without dgc float16        # without two ingredients
    python examples/recommended_stack.py --plain                      # DistributedDataParallel and SGD, tuned equally
    python examples/recommended_stack.py --all                        # every ingredient left out in turn

The ingredients, each of which can be left out:

- dgc       deep gradient compression: the largest 1 % of what has accumulated, with momentum correction and warm-up
- float16   half-precision parameters and gradients
- masters   float32 originals of them, which the optimizer steps; without them there is no loss scale either
- scaling   a loss scale, so that half-precision gradients do not underflow
- lars      steps in proportion to each layer's norm, for large batches
- warmup    a learning rate that rises over the first tenth of the run
- blocks    all-reduce of dense data by binary blocks, for numbers of ranks that are not a power of two

A perceptron of 176,650 parameters learns scikit-learn's digits, 1,797 pictures of 8 x 8 pixels. Every combination runs
in seconds. docs/recommended_stack.md says what each ingredient gains on slow links, and which do not combine well. The
learning rates below come from there: the same search for each combination.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

import pycomm
from pycomm.tools.launching import progress

Samples = tuple[torch.Tensor, torch.Tensor]

INGREDIENTS = ("dgc", "float16", "masters", "scaling", "lars", "warmup", "blocks")
RATES = {
    "plain DDP": 0.4,
    "the stack": 0.4,
    "without dgc": 0.8,
    "without float16": 0.4,
    "without scaling": 0.4,
    "without masters, scaling": 0.4,
    "without lars": 0.8,
    "without warmup": 0.4,
    "without blocks": 0.4,
    "without blocks, dgc": 0.8,
    "without dgc, lars": 0.4,
}
WIDTH, BATCH, EPOCHS = 384, 96, 8
NUM_TEST, NUM_VALIDATION = 360, 287
MOMENTUM, WEIGHT_DECAY, TRUST, DENSITY = 0.9, 5e-4, 0.05, 0.01


@dataclass(frozen=True)
class Recipe:
    """What a training is made of.

    Attributes:
        without: ingredients that are left out.
        plain: none of them, but DistributedDataParallel, and SGD with momentum in float32.
        algorithm: of dense all-reduces, with "blocks".
    """

    without: frozenset[str] = frozenset()
    plain: bool = False
    algorithm: str = "binary_blocks"

    @property
    def name(self) -> str:
        if self.plain:
            return "plain DDP"
        return f"without {', '.join(sorted(self.without))}" if self.without else "the stack"

    def has(self, ingredient: str) -> bool:
        return not self.plain and ingredient not in self.without

    @property
    def rate(self) -> float:
        """Return the learning rate that the search chose; the whole stack's for combinations that it did not try."""
        return RATES.get(self.name, RATES["the stack"])


_LEFT_OUT = ("", "dgc", "float16", "scaling", "masters scaling", "lars", "warmup", "blocks", "dgc blocks", "dgc lars")
RECIPES = [Recipe(plain=True), *(Recipe(frozenset(names.split())) for names in _LEFT_OUT)]
"""What is compared: plain DDP, the stack, and what is left of it without one ingredient, and some pairs."""


class Training:
    """One training on all ranks of the default process group. Collective."""

    def __init__(self, recipe: Recipe, samples: Samples, rate: float, seed: int, epochs: int = EPOCHS) -> None:
        torch.manual_seed(seed)
        self._samples, self._seed, self._epochs = samples, seed, epochs
        self._share = BATCH // dist.get_world_size()
        self._half = recipe.has("float16")
        self.model: nn.Module = make_model().to(torch.float16 if self._half else torch.float32)
        optimizer = make_optimizer(self.model, recipe, rate)
        self.optimizer = optimizer
        self.scaler = pycomm.LossScaler(enabled=self._half and recipe.has("scaling"))
        steps = self.num_steps
        warmup = round(0.1 * steps) if recipe.plain or recipe.has("warmup") else 0
        self._schedule = make_schedule(optimizer, warmup, steps)
        self.reducer: pycomm.Reducer | None = None
        if recipe.plain:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            return
        if self._half and recipe.has("masters"):
            pycomm.master_weights(optimizer)
        self.reducer = pycomm.attach(
            optimizer,
            self.model,
            compression=make_compression(recipe, steps),
            loss_scaler=self.scaler,
            tuning=pycomm.Tuning(algorithm=recipe.algorithm if recipe.has("blocks") else "native"),
        )

    @property
    def num_steps(self) -> int:
        return self._epochs * (len(self._samples[1]) // BATCH)

    def epochs(self) -> Iterator[int]:
        """Train; after each epoch, yield the number of completed epochs."""
        generator = torch.Generator().manual_seed(self._seed)
        for epoch in range(1, self._epochs + 1):
            for x, y in self._batches(generator):
                self._step(x, y)
            yield epoch

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._outputs(x), y)
        self.scaler.scale(loss).backward()  # gradients are averaged over the ranks now
        skipped = self.scaler.skipped_steps
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.skipped_steps == skipped:
            self._schedule.step()

    def close(self) -> None:
        """Stop averaging."""
        if self.reducer is not None:
            self.reducer.detach()

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """Return mean loss and accuracy; all ranks get the same, because their models are equal."""
        x, y = samples
        out = self._outputs(x)
        loss = float(nn.functional.cross_entropy(out, y))
        return loss if math.isfinite(loss) else math.inf, float((out.argmax(1) == y).double().mean())

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.half() if self._half else x).float()  # type: ignore[no-any-return]

    def _batches(self, generator: torch.Generator) -> Iterator[Samples]:
        """Yield this rank's shares of an epoch's global batches, which are the same for the same seed."""
        x, y = self._samples
        begin = dist.get_rank() * self._share
        for chosen in torch.split(torch.randperm(len(y), generator=generator), BATCH):
            if len(chosen) == BATCH:
                mine = chosen[begin : begin + self._share]
                yield x[mine], y[mine]


def make_model() -> nn.Sequential:
    hidden = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def make_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> LRScheduler:
    decay = LambdaLR(optimizer, lambda step: (1 - min(1.0, step / (steps - warmup))) ** 2)
    # A SequentialLR whose first scheduler has no step would be late by one.
    return SequentialLR(optimizer, [pycomm.optim.WarmupLR(optimizer, warmup), decay], [warmup]) if warmup else decay


def make_optimizer(model: nn.Module, recipe: Recipe, rate: float) -> torch.optim.Optimizer:
    """Return an optimizer; without momentum if DGC applies it."""
    momentum = 0.0 if recipe.has("dgc") else MOMENTUM
    if not recipe.has("lars"):
        return torch.optim.SGD(model.parameters(), rate, momentum, weight_decay=WEIGHT_DECAY)
    # DGC's output includes momentum: it is 1 / (1 - momentum) times as large, and LARS divides by its norm.
    trust = TRUST / (1 - MOMENTUM) if recipe.has("dgc") else TRUST
    return pycomm.LARS(model.parameters(), rate, momentum, WEIGHT_DECAY, trust)


def make_compression(recipe: Recipe, steps: int) -> pycomm.compression.Compression:
    if recipe.has("dgc"):
        return pycomm.DGC(DENSITY, MOMENTUM, warmup_steps=steps // 4)
    # Means of half-precision gradients are made in float32; without FP16() they are sent so between hosts, too.
    return pycomm.FP16() if recipe.has("float16") else pycomm.NoCompression()


def load_data() -> dict[str, Samples]:
    """Return "tuning" and "validation", "train" (both of them) and "test": the same on every rank."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, y = torch.as_tensor(x, dtype=torch.float32) / 16, torch.as_tensor(y, dtype=torch.int64)
    train, test = train_test_split(range(len(y)), test_size=NUM_TEST, stratify=y, random_state=0)
    tuning, validation = train_test_split(train, test_size=NUM_VALIDATION, stratify=y[train], random_state=0)
    parts = {"tuning": tuning, "validation": validation, "train": train, "test": test}
    return {name: (x[part], y[part]) for name, part in parts.items()}


def outcome(training: Training, data: dict[str, Samples]) -> dict[str, float]:
    """Return the results of this rank, and stop averaging."""
    whole = 4 * training.num_steps * sum(p.numel() for p in training.model.parameters())
    sent = whole if training.reducer is None else training.reducer.stats()["bytes_sent"]
    training.close()
    loss, accuracy = training.evaluate(data["test"])
    return {
        "loss": training.evaluate(data["train"])[0],
        "test_loss": loss,
        "accuracy": accuracy,
        "steps": training.num_steps,
        "skipped": training.scaler.skipped_steps,
        "payload": sent,
    }


def run(recipes: list[Recipe], seeds: int, epochs: int, rate: float | None) -> None:
    """Train by each of the recipes and print a line for each, on rank 0."""
    data, done = load_data(), 0
    if dist.get_rank() == 0:
        print(f"{'':34} {'training loss':>13} {'test accuracy':>13} {'step':>9} {'sent per step':>13}")
    for recipe in recipes:
        found = []
        for seed in range(seeds):
            training = Training(recipe, data["train"], recipe.rate if rate is None else rate, seed, epochs)
            dist.barrier()
            begin = time.perf_counter()
            for _ in training.epochs():
                pass
            dist.barrier()
            found.append({"seconds": time.perf_counter() - begin, **outcome(training, data)})
            done += 1
            progress(done, len(recipes) * seeds)
        mean = {key: sum(each[key] for each in found) / seeds for key in found[0]}
        if dist.get_rank() == 0:
            step, sent = 1e3 * mean["seconds"] / mean["steps"], mean["payload"] / mean["steps"] / 1e3
            figures = f"{mean['loss']:13.4f} {mean['accuracy']:13.2%} {step:6.1f} ms {sent:10.1f} KB"
            skipped = f"  {mean['skipped']:.1f} steps skipped" if mean["skipped"] else ""
            print(f"{recipe.name:34} {figures}{skipped}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without", nargs="+", choices=INGREDIENTS, default=[], help="ingredients to leave out")
    which.add_argument("--plain", action="store_true", help="DistributedDataParallel and SGD, nothing else")
    which.add_argument("--all", action="store_true", help="the stack, each ingredient left out in turn, and plain DDP")
    parser.add_argument("--algorithm", default="binary_blocks", help='or "hierarchical(3,2)": 3 hosts of 2 ranks')
    parser.add_argument("--rate", type=float, help="learning rate (default: what the search chose)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"(default {EPOCHS})")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind (default 1)")
    parser.add_argument("--ranks", type=int, default=3, help="processes to start where torchrun did not (default 3)")
    arguments = parser.parse_args()
    for name in ("epochs", "seeds", "ranks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: {getattr(arguments, name)}, wanted at least 1")
    if "masters" in arguments.without and not {"scaling", "float16"} & set(arguments.without):
        parser.error("--without masters: pycomm unscales no half-precision gradients; leave out scaling as well")
    if BATCH % int(os.environ.get("WORLD_SIZE", arguments.ranks)):
        parser.error(f"--ranks: wanted a divisor of the batch, which is {BATCH}")
    return arguments


def main() -> None:
    if find_spec("sklearn") is None:
        sys.exit("examples/recommended_stack.py needs scikit-learn: pip install scikit-learn")
    arguments = parse()
    recipes = RECIPES if arguments.all else [Recipe(frozenset(arguments.without), arguments.plain, arguments.algorithm)]
    call = recipes, arguments.seeds, arguments.epochs, arguments.rate
    if "RANK" in os.environ:  # torchrun has started this one
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        run(*call)
        dist.destroy_process_group()
    else:
        pycomm.launch(run, arguments.ranks, call, output=0, threads=1)


if __name__ == "__main__":
    main()

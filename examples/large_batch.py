"""Large batches: the recipe of "four-minute ImageNet" on scikit-learn's digits, against tuned Nesterov.

    torchrun --nproc-per-node 2 examples/large_batch.py [--quick]
    python examples/large_batch.py --ranks 2                       # the same, started by torchrun's own launcher

The recipe (Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"), piece by piece:

- float16 parameters and gradients, float32 master weights, loss scaling: master_weights, LossScaler
- LARS on the masters; no weight decay on biases and norm parameters: LARS, whose default leaves these out
- gradients fused into buckets, averaged while backward runs: attach (this model fits into one bucket)
- an all-reduce that suits the network: pycomm.Tuning(algorithm="auto") reads the file of `pycomm plan calibrate`
  that PYCOMM_NETWORK names; "hierarchical(4,8)" means four hosts of eight ranks
- gradual warm-up, then polynomial decay: WarmupLR, and torch's LambdaLR

The baseline is SGD with Nesterov momentum in float32; the shape of the schedule, momentum, weight decay, epochs and
batches are the same. At every batch size both get the same search over learning rates and warm-ups, by the
loss on validation samples. The best setting then trains on all training samples, with other seeds. Two rows are not
tuned and say so: the baseline with linear scaling of the small batch's learning rate, and the recipe's settings in
float32. Digits are a small problem, 1,797 pictures of 8 x 8 pixels: results may differ elsewhere.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

import pycomm

Samples = tuple[torch.Tensor, torch.Tensor]

NUM_TEST, NUM_VALIDATION = 360, 287
NUM_TUNING = 1797 - NUM_TEST - NUM_VALIDATION  # for the search; the final training uses all but the test samples
MOMENTUM, WEIGHT_DECAY, START, POWER = 0.9, 5e-4, 0.1, 2.0
TRUST = 0.05  # by hand, of 0.02, 0.05 and 0.1; 0.001 is too small, as biases and norms have the same rates


@dataclass(frozen=True)
class Way:
    """An optimizer, a precision, and the learning rates to try."""

    name: str
    lars: bool
    half: bool
    rates: tuple[float, ...]


NESTEROV = Way("Nesterov, float32", lars=False, half=False, rates=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4))
RECIPE = Way("LARS, float16", lars=True, half=True, rates=(0.02, 0.04, 0.08, 0.16, 0.32, 0.64))
RECIPE_FLOAT32 = replace(RECIPE, name="LARS, float32", half=False)


@dataclass(frozen=True)
class Setting:
    way: Way
    batch: int
    rate: float
    warmup: float  # part of the run

    def num_steps(self, samples: Samples, epochs: int) -> int:
        return epochs * math.ceil(len(samples[1]) / self.batch)


@dataclass(frozen=True)
class Plan:
    reference: int = 64  # the small batch
    batches: tuple[int, ...] = (192, 384)
    epochs: int = 10
    first_rate: int = 0  # index of each way's first rate; earlier ones are left out
    warmups: tuple[float, ...] = (0.1, 0.25)
    tuning_seeds: int = 3
    seeds: int = 5

    def search(self, way: Way, batch: int) -> list[Setting]:
        return [Setting(way, batch, *choice) for choice in product(way.rates[self.first_rate :], self.warmups)]


QUICK = Plan(128, (256,), epochs=6, first_rate=3, warmups=(0.1,), tuning_seeds=1, seeds=2)


class Data(NamedTuple):
    tuning: Samples
    validation: Samples
    train: Samples  # both of them
    test: Samples


def load_data() -> Data:
    """The same on every rank."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, y = torch.as_tensor(x, dtype=torch.float32) / 16, torch.as_tensor(y, dtype=torch.int64)
    train, test = train_test_split(range(len(y)), test_size=NUM_TEST, stratify=y, random_state=0)
    tuning, validation = train_test_split(train, test_size=NUM_VALIDATION, stratify=y[train], random_state=0)
    return Data(*((x[part], y[part]) for part in (tuning, validation, train, test)))


def make_model() -> nn.Sequential:
    hidden = [nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def make_optimizer(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    if setting.way.lars:
        return pycomm.LARS(model.parameters(), setting.rate, MOMENTUM, WEIGHT_DECAY, TRUST)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others}]
    return torch.optim.SGD(groups, setting.rate, MOMENTUM, nesterov=True)


def make_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> SequentialLR:
    decay = LambdaLR(optimizer, lambda step: (1 - min(1.0, step / (steps - warmup))) ** POWER)
    rise = pycomm.optim.WarmupLR(optimizer, warmup, start_factor=START)
    return SequentialLR(optimizer, [rise, decay], [warmup])


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).float()  # type: ignore[no-any-return]


def global_batches(samples: Samples, size: int, epochs: int, seed: int) -> Iterator[Samples]:
    """In the seed's order, the same on every rank. A last batch with fewer samples than ranks is left out."""
    x, y = samples
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(y), generator=generator), size):
            if len(chosen) >= dist.get_world_size():
                yield x[chosen], y[chosen]


def train(setting: Setting, samples: Samples, epochs: int, seed: int) -> tuple[nn.Module, int]:
    """The model, and how many steps were skipped because a gradient overflowed."""
    torch.manual_seed(seed)
    half = setting.way.half
    model = make_model().to(torch.float16 if half else torch.float32)
    optimizer = make_optimizer(model, setting)
    if half:
        pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(enabled=half)
    reducer = pycomm.attach(optimizer, model, loss_scaler=scaler, tuning=pycomm.Tuning(algorithm="auto"))
    steps = setting.num_steps(samples, epochs)
    schedule = make_schedule(optimizer, round(setting.warmup * steps), steps)
    for batch in global_batches(samples, setting.batch, epochs, seed):
        shard = pycomm.optim.shard_batch(
            batch
        )  # the last batch is smaller, and may be odd: every sample counts the same
        x, y = shard.data
        reducer.set_weight(shard.num_samples)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(outputs(model, x), y)).backward()
        skipped = scaler.skipped_steps
        scaler.step(optimizer)
        scaler.update()
        if scaler.skipped_steps == skipped:
            schedule.step()
    reducer.detach()
    return model, scaler.skipped_steps


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, communicator: pycomm.Communicator) -> tuple[float, float]:
    """Mean loss and accuracy, with the same bits on every rank, because the next decisions depend on them."""
    x, y = pycomm.optim.shard_batch(samples).data
    out = outputs(model, x)
    loss = nn.functional.cross_entropy(out, y, reduction="sum")
    sums = torch.stack([loss.double(), (out.argmax(1) == y).sum().double()])
    communicator.all_reduce(sums)
    return float(sums[0]) / len(samples[1]), float(sums[1]) / len(samples[1])


@dataclass
class Result:
    accuracies: list[float] = field(default_factory=list)  # by seed
    losses: list[float] = field(default_factory=list)
    skipped: int = 0


class Table:
    """Measures rows, and prints each on rank 0 when it is ready."""

    def __init__(self, data: Data, plan: Plan, communicator: pycomm.Communicator) -> None:
        self._data, self._plan, self._communicator = data, plan, communicator
        self.say(f"{'batch':>5} {'steps':>5}  {'':18} {'lr':>6} {'warm-up':>7}  test accuracy   training loss")

    def say(self, line: str) -> None:
        if self._communicator.rank == 0:
            print(line, flush=True)

    def tuned(self, way: Way, batch: int) -> tuple[Setting, Result]:
        settings = self._plan.search(way, batch)
        chosen = min(settings, key=self._validation_loss)
        beyond = "; no lr tried beyond" if chosen.rate in (settings[0].rate, settings[-1].rate) else ""
        return chosen, self.row(chosen, f"tuned{beyond}")

    def _validation_loss(self, setting: Setting) -> float:
        seeds = range(1000, 1000 + self._plan.tuning_seeds)
        models = [train(setting, self._data.tuning, self._plan.epochs, seed)[0] for seed in seeds]
        loss = mean(evaluate(model, self._data.validation, self._communicator)[0] for model in models)
        return loss if math.isfinite(loss) else math.inf

    def row(self, setting: Setting, remark: str) -> Result:
        result = Result()
        for seed in range(self._plan.seeds):
            model, skipped = train(setting, self._data.train, self._plan.epochs, seed)
            result.losses.append(evaluate(model, self._data.train, self._communicator)[0])
            result.accuracies.append(100 * evaluate(model, self._data.test, self._communicator)[1])
            result.skipped += skipped
        steps = setting.num_steps(self._data.train, self._plan.epochs)
        self.say(
            f"{setting.batch:5} {steps:5}  {setting.way.name:18} {setting.rate:6.4g} {setting.warmup:7.0%}  "
            f"{mean(result.accuracies):5.2f} ± {stdev(result.accuracies):4.2f} %  "
            f"{mean(result.losses):6.4f} ± {stdev(result.losses):6.4f}  {remark}"
        )
        return result


def compare(batch: int, recipe: Result, baseline: Result) -> str:
    def difference(ours: list[float], theirs: list[float], digits: int) -> str:
        apart = abs(mean(ours) - mean(theirs)) > stdev(ours) + stdev(theirs)
        return f"{mean(ours) - mean(theirs):+.{digits}f} ({'beyond' if apart else 'within'} the deviations)"

    return (
        f"batch {batch}, LARS in float16 less tuned Nesterov: accuracy "
        f"{difference(recipe.accuracies, baseline.accuracies, 2)}, training loss "
        f"{difference(recipe.losses, baseline.losses, 4)}; {recipe.skipped} steps skipped for overflow"
    )


def run(plan: Plan) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # per rank: ranks share the cores
    dist.init_process_group("gloo")
    with pycomm.Communicator() as communicator:
        table = Table(load_data(), plan, communicator)
        small, _ = table.tuned(NESTEROV, plan.reference)
        comparisons = []
        for batch in plan.batches:
            _, baseline = table.tuned(NESTEROV, batch)
            rate = pycomm.optim.linear_scaled_lr(small.rate, batch, plan.reference)
            table.row(replace(small, batch=batch, rate=rate), "linear scaling")
            setting, recipe = table.tuned(RECIPE, batch)
            table.row(replace(setting, way=RECIPE_FLOAT32), "as chosen for float16")
            comparisons.append(compare(batch, recipe, baseline))
        search = f"best of {len(plan.search(RECIPE, plan.reference))} by validation loss, seeds: {plan.tuning_seeds}"
        table.say(f"\n{plan.epochs} epochs; mean ± standard deviation, seeds: {plan.seeds}; tuned: {search}")
        table.say("\n".join(comparisons))
        table.say(f"took {time.perf_counter() - start:.0f} s with {communicator.size} ranks")
    dist.destroy_process_group()


def parse() -> tuple[Plan, int | None]:
    """The plan, and how many ranks to start; ``None`` if this process is a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch size, a small search, two seeds")
    parser.add_argument("--ranks", type=int, help="processes to start where torchrun did not (default 2)")
    parser.add_argument("--batches", type=int, nargs="+", help=f"global batch sizes (default {Plan.batches})")
    parser.add_argument("--epochs", type=int, help=f"of every run (default {Plan.epochs})")
    parser.add_argument("--seeds", type=int, help=f"to measure with (default {Plan.seeds})")
    arguments = parser.parse_args()
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    ranks = started or (2 if arguments.ranks is None else arguments.ranks)
    if started and arguments.ranks not in (None, started):
        parser.error(f"--ranks: {arguments.ranks}, but {started} were started")
    given = {key: value for key in ("batches", "epochs", "seeds") if (value := getattr(arguments, key)) is not None}
    plan = replace(QUICK if arguments.quick else Plan(), **given)
    if not 1 <= ranks <= plan.reference:
        parser.error(f"--ranks: {ranks}, wanted 1 to {plan.reference}")
    for key, least in (("epochs", 1), ("seeds", 2)):
        if getattr(plan, key) < least:
            parser.error(f"--{key}: {getattr(plan, key)}, wanted at least {least}")
    for batch in plan.batches:
        if not ranks <= batch <= NUM_TUNING:
            parser.error(f"--batches: {batch}, wanted {ranks} (one sample for each rank) to {NUM_TUNING}")
    return plan, None if started else ranks


def main() -> None:
    plan, ranks = parse()
    if find_spec("sklearn") is None:
        sys.exit("examples/large_batch.py needs scikit-learn: pip install scikit-learn")
    if ranks is None:
        run(plan)
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    torchrun(["--standalone", "--nproc-per-node", str(ranks), __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""Optimizers of torch and of other packages on two ranks under attach, against the same one alone; to the bit.

    python -m tests.integrations.optimizers                 # all; writes docs/tested_optimizers.json
    python -m tests.integrations.optimizers Lion Prodigy    # some; prints what came of them
    python -m tests.integrations.optimizers --write Lion    # and writes their rows into the report

Wants the extra [frameworks]. `python docs/optimizers.py` makes the page of the documentation from the report.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.models import perceptron
from tests.ranks import RankPool

REPORT = Path(__file__).resolve().parent.parent.parent / "docs" / "tested_optimizers.json"
STEPS = 12
EQUAL = "equal"
ROUNDED = "equal to rounding"
_ROUNDING = 1e-4
"""Largest difference, after all steps, of kernels or products that round in another order; inverse roots amplify it."""

DISTRIBUTIONS = {"torch.optim": "torch", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt"}
DISTRIBUTIONS |= {"lion_pytorch": "lion-pytorch", "pytorch_optimizer": "pytorch_optimizer"}
"""What is installed for a module, by the module's name."""

_TORCH = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam")
_OTHERS = {
    "torch.optim": (*_TORCH, "RMSprop", "Rprop", "SGD"),
    "schedulefree": ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeClosure"),
    "prodigyopt": ("Prodigy",),
    "lion_pytorch": ("Lion",),
}

_CLOSURES = {"AliG", "AdamWScheduleFreeClosure", "BSAM", "LBFGS"}
"""Optimizers that want a closure, and those that use the loss that it returns."""

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 16},
    "Ranger21": {"num_iterations": STEPS},
}

_MATRICES_ONLY = {"torch.optim.Muon", "pytorch_optimizer.SpectralSphere"}

NOT_RUN = {
    "AdaLOMO": "steps inside backward(), before anything can be averaged",
    "AdaHessian": "requires backward(create_graph=True): averages have no graph",
    "DeMo": "exchanges gradients itself",
    "DistributedMuon": "shares out the parameters among the ranks itself",
    "LOMO": "steps inside backward(), before anything can be averaged",
    "SophiaH": "requires backward(create_graph=True): averages have no graph",
}
"""Reasons for which an optimizer of the packages is not run."""


@dataclass(frozen=True)
class Tried:
    """What came of one optimizer.

    Attributes:
        outcome: :data:`EQUAL`, or what was different, refused or wrong.
        sharded: the same with ``shard="optimizer"``, or :data:`ROUNDED`; "" if the first is not equal.
    """

    package: str
    name: str
    outcome: str
    sharded: str


def named_here(package: str) -> Iterator[tuple[str, str]]:
    """Yield the package and the class of those that are named in this file, as far as the package has them."""
    yield from ((package, name) for name in _OTHERS[package] if hasattr(importlib.import_module(package), name))


def all_names() -> Iterator[tuple[str, str]]:
    """Yield the package and the class of every optimizer."""
    for package in _OTHERS:
        yield from named_here(package)
    theirs = importlib.import_module("pytorch_optimizer")
    classes = {theirs.load_optimizer(name) for name in theirs.get_supported_optimizers()}
    own = (cls.__name__ for cls in classes if cls.__module__.startswith("pytorch_optimizer"))
    yield from (("pytorch_optimizer", name) for name in sorted(own, key=str.lower))


def model() -> nn.Sequential:
    return perceptron(12, 24, 24, 6, dtype=torch.float32)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 6, generator=generator)
    return nn.functional.mse_loss(module(x), y)


def make(package: str, name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for ``module``; those of the Muon kind step matrices only, or are told which those are."""
    cls = getattr(importlib.import_module(package), name)
    arguments = dict(_ARGUMENTS.get(name, {}))
    first = next(iter(inspect.signature(cls).parameters))
    if "lr" in inspect.signature(cls).parameters:
        arguments["lr"] = 0.01
    if first == "model":
        return cls(module, **arguments)
    if first == "optimizer":
        return cls(torch.optim.SGD(module.parameters(), lr=0.01), **arguments)
    if f"{package}.{name}" in _MATRICES_ONLY:
        return cls([p for p in module.parameters() if p.ndim == 2], **arguments)
    if package == "pytorch_optimizer" and "use_muon" in inspect.getsource(cls):
        matrices, vectors = ([p for p in module.parameters() if (p.ndim == 2) is muon] for muon in (True, False))
        return cls([{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}], **arguments)
    return cls(module.parameters(), **arguments)


def trained(
    package: str,
    name: str,
    backward: Callable[[nn.Module, int], torch.Tensor],
    attaches: bool,
    shard: str | None = None,
) -> nn.Module:
    """Return the model after some steps.

    Args:
        backward: called with the model and the number of the step; leaves gradients, and returns the loss.
        attaches: whether gradients are averaged by attach.
        shard: argument of attach.
    """
    module = model()
    optimizer = make(package, name, module)
    reducer = None
    if attaches:
        named = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = [(n, p) for n, p in module.named_parameters() if id(p) in named]
        reducer = pycomm.attach(optimizer, trainable, shard=shard, tuning=pycomm.Tuning(timeout=30))
    try:
        _switch(optimizer, "train")
        torch.manual_seed(1)  # some draw noise
        for step in range(STEPS):
            _step(optimizer, name, partial(backward, module, step))
        _switch(optimizer, "eval")
    finally:
        if reducer is not None:
            reducer.detach()
    return module


def _switch(optimizer: Any, mode: str) -> None:
    """Switch an optimizer that is schedule-free to one of its modes."""
    if callable(getattr(optimizer, mode, None)):
        getattr(optimizer, mode)()


def _step(optimizer: Any, name: str, backward: Callable[[], torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            return backward()

    if name in _CLOSURES:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _alone(module: nn.Module, step: int) -> torch.Tensor:
    """Leave the mean of both ranks' gradients, computed one by one as the ranks do; return the mean loss."""
    params = list(module.parameters())
    losses = [loss_of(module, rank, step) for rank in range(2)]
    grads = [torch.autograd.grad(loss, params) for loss in losses]
    for param, first, second in zip(params, *grads, strict=True):
        param.grad = (first + second) / 2
    return torch.stack(losses).mean().detach()


def _together(module: nn.Module, step: int) -> torch.Tensor:
    """Leave the averages that pycomm makes; return the mean loss, which some optimizers go by."""
    loss = loss_of(module, dist.get_rank(), step)
    loss.backward()
    losses = [torch.empty(()) for _ in range(2)]
    dist.all_gather(losses, loss.detach())
    return torch.stack(losses).mean()


def try_on_rank(package: str, name: str, shard: str | None = None) -> str:
    """Return the outcome on this rank, with ``shard`` passed to attach."""
    warnings.simplefilter("ignore")
    try:
        wanted = trained(package, name, _alone, attaches=False)
    except Exception as error:
        return f"does not run alone: {_first_line(error)}"
    if all(torch.equal(p, q) for p, q in zip(model().parameters(), wanted.parameters(), strict=True)):
        return "does not step"
    try:
        got = trained(package, name, _together, attaches=True, shard=shard)
    except Exception as error:
        return f"refused: {_first_line(error)}"
    if not all(torch.isfinite(p).all() for p in wanted.parameters()):
        return "diverges alone"
    far = max(float((p - q).abs().max()) for p, q in zip(wanted.parameters(), got.parameters(), strict=True))
    if shard is not None and 0.0 < far < _ROUNDING:
        return ROUNDED
    return EQUAL if far == 0.0 else f"differs by {far:.1e}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _without_numbers(said: str) -> str:
    """Return what was said by this rank or another without what differs from run to run."""
    said = re.sub(r"the replicas differ after .*", "the replicas differ", said)
    return re.sub(r"a parameter of shape \[[\d, ]*\]", "a parameter", said)


def tried(names: Sequence[tuple[str, str]], tell: Callable[[str], None]) -> list[Tried]:
    """Run the optimizers on two ranks, one after the other, and tell what came of each."""
    found = []
    pool = RankPool(2)
    try:
        for package, name in names:
            both: list[str] = []
            for shard in (None, "optimizer"):
                if name in NOT_RUN and package == "pytorch_optimizer":
                    both.append("" if both else f"not run: {NOT_RUN[name]}")
                elif both and both[0] != EQUAL:
                    both.append("")
                else:
                    outcomes = pool.outcomes(try_on_rank, package, name, shard, timeout=60.0)
                    said = {each.result if each.error is None else f"fails: {each.error}" for each in outcomes}
                    both.append(_without_numbers(min(map(str, said)) if shard else "; ".join(sorted(map(str, said)))))
                if not pool.alive():
                    pool.close()
                    pool = RankPool(2)
            found.append(Tried(package, name, *both))
            tell(f"{package}.{name}: {', sharded: '.join(both)}")
    finally:
        pool.close()
    return found


def report_of(found: Sequence[Tried]) -> dict[str, Any]:
    packages = {package: importlib.metadata.version(DISTRIBUTIONS[package]) for package in {t.package for t in found}}
    return {
        "steps": STEPS,
        "versions": {"pycomm-torch": pycomm.__version__, **dict(sorted(packages.items()))},
        "optimizers": [[each.package, each.name, each.outcome, each.sharded] for each in found],
    }


def updated(report: dict[str, Any], found: Sequence[Tried]) -> dict[str, Any]:
    """Return ``report`` with the rows of ``found`` in place of its own.

    Raises:
        ValueError: it is of other versions, or has no such rows.
    """
    new = report_of(found)
    rows = {(package, name): [package, name, *both] for package, name, *both in new["optimizers"]}
    old = [(package, name) for package, name, *_ in report["optimizers"]]
    if not rows.keys() <= set(old) or not new["versions"].items() <= report["versions"].items():
        raise ValueError("the report is of other versions or optimizers: run all of them, without names")
    return {**report, "optimizers": [rows.get((row[0], row[1]), row) for row in report["optimizers"]]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="optimizers under attach, to the bit")
    parser.add_argument("names", nargs="*", help="classes; all, with a report, if there are none")
    parser.add_argument("--write", action="store_true", help="write the rows of the named ones into the report")
    options = parser.parse_args(arguments)
    wanted = options.names
    names = [(package, name) for package, name in all_names() if not wanted or name in wanted]
    found = tried(names, lambda line: print(line, flush=True))
    if options.write or not wanted:
        report = updated(json.loads(REPORT.read_text(encoding="utf-8")), found) if wanted else report_of(found)
        REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which optimizers may step whole parameters on the ranks that own them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reducer.partition import independent
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.partition.whole_optimizers import Orthogonal

DECLARED = pycomm.Sharding("optimizer", independent=True)
REPORT = Path(__file__).parents[3] / "docs" / "tested_optimizers.json"


def made(name: str, module: str, **attributes: Any) -> type[Orthogonal]:
    """Return a class of that name, as if the package that has it were installed."""
    return type(name, (Orthogonal,), {"__module__": module, **attributes})


class Subclass(torch.optim.NAdam):
    """Of a known optimizer; what its step does nobody knows."""


def refused(optimizer_class: Any, shard: Any, match: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=match):
        pycomm.attach(optimizer_class(model.parameters()), model, shard=shard)


@pytest.mark.behavior(
    "Sharded steps",
    "shard an optimizer that pycomm does not know",
    '`ValueError`. If it steps each parameter alone: `Sharding("optimizer", independent=True)`.',
)
@on_ranks(2)
def test_unknown_ones_require_the_declaration() -> None:
    text = r'is not among the optimizers that are known .* write shard=pycomm.Sharding\("optimizer", independent=True\)'
    for unknown in (Orthogonal, Subclass, made("Lion", "mine"), made("Adam8bit", "bitsandbytes.optim.adam")):
        refused(unknown, "optimizer", f"{unknown.__module__}.{unknown.__qualname__} {text}")
        model = nn.Linear(3, 2)
        with attached(unknown(model.parameters()), model, shard=DECLARED):
            pass


@on_ranks(2)
def test_known_ones_do_not() -> None:
    for known in (torch.optim.NAdam, torch.optim.Rprop, made("Lion", "lion_pytorch.lion_pytorch")):
        model = nn.Linear(3, 2)
        with attached(known(model.parameters()), model, shard="optimizer"):
            pass


@pytest.mark.behavior(
    "Sharded steps",
    "`its step depends on all gradients together`",
    "Attach this optimizer without `shard`. Clipping: `reducer.clip_grad_norm()`.",
)
@pytest.mark.parametrize("shard", ["optimizer", DECLARED], ids=["not declared", "declared"])
@on_ranks(2)
def test_known_couplings_are_refused_by_name(shard: Any) -> None:
    prodigy = made("Prodigy", "prodigyopt.prodigy")
    together = "its step depends on all gradients together"
    refused(torch.optim.LBFGS, shard, f'shard="optimizer" cannot be combined with LBFGS: {together}')
    refused(prodigy, shard, f'shard="optimizer" cannot be combined with Prodigy: {together}')
    refused(type("Mine", (prodigy,), {"__module__": "mine"}), shard, f"cannot be combined with Prodigy: {together}")
    refused(made("ASGD", "pytorch_optimizer.optimizer.sgd"), shard, f"cannot be combined with ASGD: {together}")
    refused(made("AdaShift", "pytorch_optimizer.optimizer.adashift"), shard, "state of a kind that cannot be sent")


@on_ranks(2)
def test_options_that_couple_are_refused() -> None:
    module = "pytorch_optimizer.optimizer.adan"
    refused(made("Adan", module, max_grad_norm=1.0), "optimizer", r"cannot be combined with Adan\(max_grad_norm=1.0\)")
    model = nn.Linear(3, 2)
    with attached(made("Adan", module, max_grad_norm=0.0)(model.parameters()), model, shard="optimizer"):
        pass


@on_ranks(2)
def test_a_declaration_of_one_rank_is_an_error_of_all() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    with pytest.raises(ValueError, match="independent=True"):
        pycomm.attach(optimizer, model, shard=DECLARED if dist.get_rank() else "optimizer")


def test_entries_of_other_packages_are_those_of_the_report() -> None:
    report = json.loads(REPORT.read_text())["optimizers"]
    equal = {(package, name) for package, name, _, sharded in report if sharded.startswith("equal")}
    others = {"torch.optim", "pycomm.optim"}
    listed = {(package, name) for package, names in independent._INDEPENDENT.items() for name in names.split()}
    assert {entry for entry in listed if entry[0] not in others} <= equal
    assert not listed & {(package, name) for package, names in independent._REFUSED.items() for name in names}

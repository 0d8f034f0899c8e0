"""Optimizers under attach equal the same ones alone, to the bit; the page says what the report says."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from functools import partial
from types import ModuleType

import pytest

import pycomm
from tests.docs.scripts import load
from tests.integrations import optimizers
from tests.ranks import RankPool


def outcomes(package: str, names: list[str], shard: str | None = None) -> dict[str, str]:
    return {name: optimizers.try_on_rank(package, name, shard) for name in names}


def test_those_of_torch(two_ranks: RankPool) -> None:
    """Of torch 2.13; an older one lacks some."""
    over_hosts = [name for _, name in optimizers.named_here("torch.optim")]
    assert len(over_hosts) > 10
    for found in two_ranks.run(outcomes, "torch.optim", over_hosts):
        assert found == dict.fromkeys(over_hosts, optimizers.EQUAL)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("lion_pytorch", ["Lion"]),
        ("prodigyopt", ["Prodigy"]),
        ("schedulefree", ["AdamWScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeClosure"]),
        ("pytorch_optimizer", ["Muon", "SOAP", "Shampoo", "Prodigy", "AliG", "Magma", "AdamMini"]),
    ],
)
def test_some_of_others(two_ranks: RankPool, package: str, names: list[str]) -> None:
    pytest.importorskip(package)
    for found in two_ranks.run(outcomes, package, names):
        assert found == dict.fromkeys(names, optimizers.EQUAL)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("torch.optim", ["Muon", "Adafactor"]),
        ("schedulefree", ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]),
        ("pytorch_optimizer", ["Muon", "SOAP", "Shampoo", "AdaFactor", "Lion"]),
    ],
)
def test_steps_that_are_shared_out(two_ranks: RankPool, package: str, names: list[str]) -> None:
    pytest.importorskip(package)
    names = [name for name in names if hasattr(importlib.import_module(package), name)]  # an older torch lacks Muon
    for found in two_ranks.run(outcomes, package, names, "optimizer"):
        assert set(found.values()) <= {optimizers.EQUAL, optimizers.ROUNDED}, found


@pytest.mark.parametrize("package", ["prodigyopt", "pytorch_optimizer"])
def test_prodigy_is_not_shared_out(two_ranks: RankPool, package: str) -> None:
    """It estimates one rate from all gradients."""
    pytest.importorskip(package)
    for found in two_ranks.run(outcomes, package, ["Prodigy"], "optimizer"):
        assert 'shard="optimizer" cannot be combined with Prodigy: its step depends on all' in found["Prodigy"]


def sums_in_place_of_averages() -> str:
    original = pycomm.attach
    vars(pycomm)["attach"] = partial(original, average=False)
    try:
        return optimizers.try_on_rank("torch.optim", "SGD")
    finally:
        vars(pycomm)["attach"] = original


def test_what_is_different_shows(two_ranks: RankPool) -> None:
    assert all(said.startswith("differs by") for said in two_ranks.run(sums_in_place_of_averages))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all() -> None:
    """What the committed report says, with the versions that it says."""
    report = json.loads(optimizers.REPORT.read_text(encoding="utf-8"))
    for package in report["versions"].keys() & optimizers.DISTRIBUTIONS.keys():
        pytest.importorskip(package)
        distribution = optimizers.DISTRIBUTIONS[package]
        if importlib.metadata.version(distribution) != report["versions"][package]:
            pytest.skip(f"the report is of another version of {distribution}")
    found = optimizers.tried(list(optimizers.all_names()), lambda line: None)

    def without_rounding(rows: list[list[str]]) -> list[list[str]]:
        """Processors round otherwise what is computed together."""
        return [[optimizers.EQUAL if word == optimizers.ROUNDED else word for word in row] for row in rows]

    assert without_rounding(optimizers.report_of(found)["optimizers"]) == without_rounding(report["optimizers"])


def test_rows_of_some_take_the_place_of_old_ones() -> None:
    report = json.loads(optimizers.REPORT.read_text(encoding="utf-8"))
    package, name, *_ = report["optimizers"][3]
    version = importlib.metadata.version(optimizers.DISTRIBUTIONS[package])
    report["versions"][package] = version
    new = optimizers.updated(report, [optimizers.Tried(package, name, "new", "too")])
    assert new["optimizers"][3] == [package, name, "new", "too"]
    assert [row for i, row in enumerate(new["optimizers"]) if i != 3] == [
        row for i, row in enumerate(report["optimizers"]) if i != 3
    ]
    for other in ({"versions": {**report["versions"], package: "0"}}, {"optimizers": report["optimizers"][4:]}):
        with pytest.raises(ValueError, match="the report is of other versions or optimizers"):
            optimizers.updated({**report, **other}, [optimizers.Tried(package, name, "new", "too")])


@pytest.fixture
def page() -> ModuleType:
    return load("docs/optimizers.py")


def test_the_page_is_not_stale(page: ModuleType) -> None:
    assert page.main(["--check"]) == 0


def test_the_page_has_no_words_for_differences(page: ModuleType) -> None:
    report = json.loads(optimizers.REPORT.read_text(encoding="utf-8"))
    assert sum(outcome == optimizers.EQUAL for _, _, outcome, _ in report["optimizers"]) > 100
    assert sum(sharded.startswith(optimizers.EQUAL) for *_, sharded in report["optimizers"]) > 90
    report["optimizers"][0][2] = "differs by 1.0e-03"
    with pytest.raises(ValueError, match=r"the page says that none differs, but torch\.optim\.ASGD: differs by 1"):
        page.render(report)

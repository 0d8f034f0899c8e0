"""From what ranks report to figures, words and a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from pycomm.tools.cli.demo.report import conclusions, link_name, save_plot, show, title
from pycomm.tools.cli.demo.results import Death, Results, RunOutcome, problems, smoothed, speed
from pycomm.tools.cli.demo.settings import HOST_METHODS, LINK_METHODS, DemoSettings
from pycomm.tools.cli.demo.train import first_difference
from pycomm.tools.launching.reporting import Bar, Progress
from tests.ranks import RankPool

STEPS, TURNS = 10, 4
SETTINGS = DemoSettings(
    ranks=2,
    megabits=300.0,
    hosts=("one", "two"),
    seconds=10,
    kill=False,
    seed=0,
    batch=1,
    context=8,
    width=64,
    layers=1,
    output=Path("unused.png"),
)


def outcome(
    label: str, seconds: float, *, loss: float = 2.5, jitter: float = 0.0, sent: float | None = None
) -> RunOutcome:
    turns = [[seconds * (1 + jitter * (-1) ** turn)] * STEPS for turn in range(TURNS)]
    return RunOutcome(
        label=label,
        turns=[[99.0] * STEPS, *turns],  # the warm-up must not count
        losses=np.linspace(5.5, loss, STEPS * (TURNS + 1)).tolist(),
        wire_bytes=sent,
        validation_loss=loss,
    )


def results(dense: float = 0.2, dgc: float = 0.02, attach: float = 0.1, death: Death | None = None) -> Results:
    host = [outcome("DDP over Gloo", 0.2), outcome("pycomm.attach", attach), outcome('attach(shard="optimizer")', 0.05)]
    link = [
        outcome("DDP", 0.2, sent=15e6),
        outcome("DDP, fp16 hook", 0.1, sent=7.5e6),
        outcome("pycomm dense", dense, sent=15e6),
        outcome("pycomm DGC 1 %", dgc, sent=2.4e5),
    ]
    return Results(1_000_000, 5.55, host, link, death)


DEATH = Death(3, 30, [0.1] * 29 + [1.5] + [0.08] * 30, np.linspace(5.5, 3.0, 60).tolist())


def test_a_step_is_a_median_without_the_warm_up_and_seconds_are_all() -> None:
    run = outcome("x", 0.2)
    assert run.step_seconds == 0.2
    assert run.seconds[-1] == pytest.approx(99.0 * STEPS + 0.2 * STEPS * TURNS)


def test_smoothing_keeps_the_first_loss_and_averages_twenty() -> None:
    losses = np.linspace(5.5, 2.5, 40).tolist()
    curve = smoothed(losses)
    assert len(curve) == 40
    assert curve[0] == losses[0]
    assert curve[-1] == pytest.approx(np.mean(losses[-20:]))


def test_seconds_to_a_loss() -> None:
    run = RunOutcome("x", [[1.0, 1.0], [1.0]], [5.0, 3.0, 1.0])
    assert run.seconds_to(4.0) == 2.0
    assert run.seconds_to(2.0) is None


def test_a_speed_is_clear_only_if_most_turns_agree() -> None:
    base = outcome("base", 0.2)
    assert speed(outcome("x", 0.1), base).value == 2.0
    assert speed(outcome("x", 0.1), base).is_clearly_higher
    assert not speed(outcome("x", 0.2), base).is_clearly_higher
    assert not speed(outcome("x", 0.18, jitter=0.3), base).is_clearly_higher


def test_a_run_with_fewer_turns_is_compared_by_those_that_both_have() -> None:
    short = outcome("x", 0.1)
    del short.turns[2:]
    assert speed(short, outcome("base", 0.2)).value == 2.0


def test_good_runs_have_no_problems() -> None:
    assert problems(results()) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 5.55, 6.0, 5.54])
def test_a_loss_that_did_not_come_down_is_a_problem(loss: float) -> None:
    bad = results()
    bad.link[3] = replace(bad.link[3], validation_loss=loss)
    (found,) = problems(bad)
    says = "pycomm DGC 1 %: the loss did not come down: validation 5.550 before training"
    assert found == f"{says}, {loss:.3f} after"


def test_replicas_that_differ_are_a_problem() -> None:
    bad = results()
    bad.host[1] = replace(bad.host[1], difference="'head.weight' differs between ranks 0 and 1")
    (found,) = problems(bad)
    assert found == "pycomm.attach: the replicas are not equal: 'head.weight' differs between ranks 0 and 1"


def test_three_sentences_follow_the_figures() -> None:
    gained, lost, write = conclusions(results(), SETTINGS)
    assert gained.startswith(
        "Gained: more steps per second than DDP by pycomm.attach on this host (2.00x), "
        'attach(shard="optimizer") on this host (4.00x) and '
        "pycomm DGC 1 % over the link of 300 Mbit/s (10.0x)"
    )
    assert lost == "Not gained: by pycomm dense over the link of 300 Mbit/s (1.00x)."
    assert write == (
        'Write: on one host pycomm.attach(optimizer, model, shard="optimizer"); over slow links pycomm.attach('
        "optimizer, model, compression=pycomm.DGC(0.01, momentum=0.9)), with an SGD optimizer without momentum."
    )
    assert "; survive=pycomm.Survive() where ranks may die." in conclusions(results(death=DEATH), SETTINGS)[2]


def test_the_advice_is_the_fastest_of_the_table_that_reached_the_loss() -> None:
    runs = results()
    runs.host[2] = outcome('attach(shard="optimizer")', 0.25)  # 0.80x
    runs.link[3] = outcome("pycomm DGC 1 %", 0.02, loss=2.6)  # fast, and 4 % above DDP's loss
    write = conclusions(runs, SETTINGS)[2]
    assert write == "Write: on one host pycomm.attach(optimizer, model); over slow links keep DDP."
    nothing = results(dense=0.3, dgc=0.4, attach=0.21)
    nothing.host[2] = outcome('attach(shard="optimizer")', 0.25)
    assert conclusions(nothing, SETTINGS)[2] == "Write: on one host keep DDP; over slow links keep DDP."


def test_columns_agree_although_the_load_of_the_machine_differed() -> None:
    """Turn by turn twice as fast as DDP; but while more than half of its own steps were taken, the machine was busy."""
    runs, label = results(), "pycomm.attach"
    ddp, ours = runs.host[0], runs.host[1]
    ddp.turns = [[9.0], *[[seconds] * STEPS for seconds in (0.1, 0.1, 0.1, 0.8)]]
    ours.turns = [[9.0], *[[seconds] * number for seconds, number in ((0.05, 1), (0.05, 1), (0.05, 1), (0.4, 20))]]
    assert ours.step_seconds > ddp.step_seconds  # the medians of all steps contradict the speed
    row = next(line.split() for line in shown(runs, SETTINGS).splitlines() if line.startswith(f" {label} "))
    assert row == [label, "50.0", "ms", "2.00x", "2.00-2.00", "-", "2.500"]


def test_a_loss_that_was_lost_again_was_not_reached() -> None:
    runs = results()
    for run, number in ((runs.link[0], 10), (runs.link[3], 100)):
        run.turns, run.losses = [[0.5], [5.0 / number] * (number - 1)], np.linspace(5.5, 3.0, number).tolist()
    runs.link[3] = replace(runs.link[3], validation_loss=2.6)
    assert "reached" not in conclusions(runs, SETTINGS)[0]


def test_sentences_claim_nothing_that_is_not_clear() -> None:
    slow = results(dense=0.3, dgc=0.4, attach=0.21)
    slow.host[2] = outcome("sharded", 0.18, jitter=0.3)
    gained, lost, _ = conclusions(slow, SETTINGS)
    assert gained == "Gained: nothing in this run."
    assert "pycomm.attach on this host (0.95x)" in lost
    assert "pycomm DGC 1 % over the link of 300 Mbit/s (0.50x)" in lost


def test_when_everything_gained_that_is_said() -> None:
    assert conclusions(results(dense=0.1), SETTINGS)[1] == "Not gained: nowhere in this run."


def test_how_much_sooner_a_loss_was_there() -> None:
    runs = results()
    for run, number in ((runs.link[0], 10), (runs.link[3], 100)):
        run.turns, run.losses = [[0.5], [5.0 / number] * (number - 1)], np.linspace(5.5, 3.0, number).tolist()
    assert "reached DDP's final training loss after 3.5 s instead of 5.0 s" in conclusions(runs, SETTINGS)[0]


@pytest.mark.parametrize("death", [None, DEATH])
@pytest.mark.timeout(30)
def test_the_plot_is_a_picture(tmp_path: Path, death: Death | None) -> None:
    save_plot(results(death=death), "title", "link", tmp_path / "plot")
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


def shown(found: Results, settings: DemoSettings) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(found, settings, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_line_for_every_run() -> None:
    text = shown(results(death=DEATH), SETTINGS)
    assert " DDP, fp16 hook             100.0 ms         2.00x  2.00-2.00   7.50 MB  2.500\n" in text
    assert " rank 2 is killed             1.50 s                                  -  4" in text
    assert "Link, 300 Mbit/s\n" in text
    assert " 3 ranks, 29 steps " in text
    assert "speed vs DDP" in text
    assert "simulated" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_simulated_is_called_so_everywhere() -> None:
    simulated = replace(SETTINGS, hosts=(), megabits=2500.0)
    assert link_name(simulated) == "Simulated link, 2.5 Gbit/s"
    text = shown(results(), simulated)
    assert "A simulated step takes its time here plus" in text.replace("\n", " ").replace("  ", " ")
    assert "over the simulated link of 2.5 Gbit/s" in conclusions(results(), simulated)[0]
    assert title(results(), simulated).startswith("1.00 M parameters, 2 ranks of one thread")


def test_an_ordinary_terminal_has_room_for_the_bar_and_the_time_left() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    bar = Bar(console)
    for method in (*HOST_METHODS, *LINK_METHODS):
        bar.show(Progress(23, 30, {f"loss of {method.label}": 4.875}))
        bar._bars.refresh()
    bar.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert 'attach(shard="optimizer") 4.875' in text


def difference_after(rank_that_strays: int | None) -> str | None:
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 4)
    if rank_that_strays == torch.distributed.get_rank():
        with torch.no_grad():
            model.bias[2] = torch.nextafter(model.bias[2], torch.tensor(9.0))
    return first_difference(model)


@pytest.mark.timeout(60)
def test_the_last_bit_of_a_replica_counts(rank_pools: Callable[[int], RankPool]) -> None:
    pool = rank_pools(2)
    assert pool.run(difference_after, None) == [None, None]
    assert pool.run(difference_after, 1) == ["'bias' differs between ranks 0 and 1"] * 2

"""From accounts to figures, words and a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from pycomm.cli.demo.figures import figures_of, problems, smoothed, step_ratio
from pycomm.cli.demo.live import display
from pycomm.cli.demo.messages import Outcome, Progress, Results
from pycomm.cli.demo.plot import save_plot
from pycomm.cli.demo.report import conclusions, show
from pycomm.cli.demo.trainee import first_difference
from tests.cli.small import small_settings
from tests.ranks import RankPool

STEPS = 40
SETTINGS = small_settings("topk", STEPS)


def outcome(label: str, seconds: float, *, loss: float = 2.5, sent: int = 1000, jitter: float = 0.0) -> Outcome:
    wobble = np.where(np.arange(STEPS) // 10 % 2, 1 + jitter, 1 - jitter)
    return Outcome(
        label=label,
        losses=np.linspace(5.5, loss, STEPS).tolist(),
        seconds=[99.0] * 5 + (seconds * wobble)[5:].tolist(),  # the warm-up must not count
        waits=[99.0] * 5 + [seconds / 10] * (STEPS - 5),
        reported_waits=[99.0] * 5 + [seconds / 20] * (STEPS - 5),
        bytes_sent=[sent * (i + 1) for i in range(STEPS)],
        validation_loss=loss,
    )


def results(*outcomes: Outcome) -> Results:
    return Results(1_000_000, 5.55, list(outcomes))


def words(*outcomes: Outcome, ranks: int = 2) -> str:
    return "\n".join(conclusions(results(*outcomes), replace(SETTINGS, ranks=ranks)))


def test_figures_leave_the_warm_up_out() -> None:
    figures = figures_of(outcome("x", 0.2))
    assert (figures.step_seconds, figures.wait_seconds, figures.reported_wait_seconds) == (0.2, 0.02, 0.01)
    assert figures.bytes_per_step == 1000


def test_smoothing_keeps_the_first_loss_and_averages_twenty() -> None:
    run = outcome("x", 0.2)
    curve = smoothed(run)
    assert len(curve) == STEPS
    assert curve[0] == run.losses[0]
    assert curve[-1] == pytest.approx(np.mean(run.losses[-20:]))


def test_a_ratio_is_clear_only_if_most_turns_agree() -> None:
    base = outcome("base", 0.2)
    assert step_ratio(outcome("x", 0.1), base).is_clearly_below_one()
    assert step_ratio(outcome("x", 0.3), base).is_clearly_above_one()
    unsteady = step_ratio(outcome("x", 0.19, jitter=0.3), base)
    assert not unsteady.is_clearly_below_one()
    assert not unsteady.is_clearly_above_one()


def test_good_runs_have_no_problems() -> None:
    assert problems(results(outcome("x", 0.2), outcome("y", 0.1))) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 5.55, 6.0, 5.54])
def test_a_loss_that_did_not_come_down_is_a_problem(loss: float) -> None:
    bad = replace(outcome("bad", 0.1), validation_loss=loss)
    (found,) = problems(results(outcome("good", 0.2), bad))
    assert found.startswith(f"bad: the loss did not come down: validation 5.550 before training, {loss:.3f} after")


def test_replicas_that_differ_are_a_problem() -> None:
    bad = replace(outcome("bad", 0.1), difference="'head.weight' differs between ranks 0 and 1")
    (found,) = problems(results(outcome("good", 0.2), bad))
    assert found == "bad: the replicas are not equal: 'head.weight' differs between ranks 0 and 1"


@pytest.mark.parametrize(
    ("dense_seconds", "compressed_seconds", "says"),
    [
        (0.10, 0.20, ["50 % less time than DDP's (100.0 against 200.0 ms)", "did not pay on this host", "100 % more"]),
        (0.40, 0.20, ["100 % more time than DDP's", "which paid on this host: its steps took 50 % less time"]),
    ],
)
def test_words_follow_the_figures(dense_seconds: float, compressed_seconds: float, says: list[str]) -> None:
    text = words(
        outcome("DDP", 0.2), outcome("dense", dense_seconds), outcome("TopK", compressed_seconds, loss=2.6, sent=50)
    )
    for part in [*says, "the validation loss is the same (2.500)", "20.0 times fewer", "loss is 0.100 higher"]:
        assert part in text


def test_words_claim_nothing_that_is_not_clear() -> None:
    ddp, dense = outcome("DDP", 0.2), outcome("dense", 0.19, jitter=0.3)
    text = words(ddp, dense, outcome("TopK", 0.19, loss=2.4))
    assert "about as long as DDP's" in text
    assert "no clear difference to the step time" in text
    assert "loss is 0.100 lower" in text


def test_one_rank_proves_nothing() -> None:
    assert "nothing to communicate" in words(outcome("DDP", 0.2), outcome("dense", 0.1), ranks=1)


@pytest.mark.timeout(30)
def test_the_plot_is_a_picture_also_of_runs_that_sent_nothing(tmp_path: Path) -> None:
    save_plot(results(outcome("DDP", 0.2, sent=0), outcome("dense", 0.1)), "title", tmp_path / "plot")
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_an_ordinary_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(results(outcome("DDP over Gloo", 0.2), outcome("pycomm TopK 0.01 %", 12.3)), SETTINGS, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "pycomm TopK 0.01 %       2.500  12300.0   1230.0     0.001     61.50x\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with display(SETTINGS, console) as on_progress:
        for run in range(3):
            on_progress(Progress(run, 30, 3.25, 0.0421))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "30/40 loss 3.250   42.1 ms" in text


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

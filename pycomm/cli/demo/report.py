"""The table, and what it means in words."""

from __future__ import annotations

from rich.console import Console

from pycomm.cli.demo.figures import Figures, Ratio, figures_of, step_ratio
from pycomm.cli.demo.messages import Outcome, Results
from pycomm.cli.demo.settings import WARM_UP_STEPS, Settings, ranks_of
from pycomm.cli.table import table

_HEADER = ["run", "validation\nloss", "step\nms", "waiting\nms", "sent per\nstep, MB", "step time\nvs DDP"]


def show(results: Results, settings: Settings, console: Console) -> None:
    """Print everything; ``results.outcomes`` are DDP, pycomm dense, and the compressed runs."""
    for text in (f"\n{title(results, settings)}\n", table(_HEADER, rows_of(results))):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    for line in conclusions(results, settings):
        console.print("\n" + line, highlight=False, markup=False)
    console.print("\n" + notes(results), style="dim", highlight=False, markup=False)


def title(results: Results, settings: Settings) -> str:
    return (
        f"{results.num_parameters / 1e6:.2f} M parameters, {ranks_of(settings)}, "
        f"{settings.steps} steps of {settings.batch} x {settings.context} bytes per rank"
    )


def rows_of(results: Results) -> list[list[str]]:
    """Return a line of the table for every run."""
    ddp, rows = results.outcomes[0], []
    for outcome in results.outcomes:
        run = figures_of(outcome)
        rows.append(
            [
                run.label,
                f"{run.validation_loss:.3f}",
                f"{1e3 * run.step_seconds:.1f}",
                f"{1e3 * run.wait_seconds:.1f}",
                f"{run.bytes_per_step / 1e6:.3f}",
                f"{step_ratio(outcome, ddp).value:.2f}x",
            ]
        )
    return rows


def notes(results: Results) -> str:
    """What the columns mean."""
    own = ", ".join(
        f"{1e3 * run.reported_wait_seconds:.1f} ({run.label})" for run in map(figures_of, results.outcomes[1:])
    )
    return (
        f"Times are medians over the steps after the first {WARM_UP_STEPS}, means over the ranks. Waiting is from a "
        "rank's last gradient to the return of backward(), by one stopwatch for all runs; "
        f'Reducer.stats()["wait_seconds"] says {own}. Sent is what a rank hands to its transport, for DDP its '
        f"gradients. The untrained model has a validation loss of {results.initial_loss:.3f}."
    )


def conclusions(results: Results, settings: Settings) -> list[str]:
    """What pycomm changed, as these numbers have it."""
    ddp, dense, *compressed = results.outcomes
    if settings.ranks == 1:
        return ["With one rank there is nothing to communicate: this shows what each way costs when it is not needed."]
    return [_about_dense(ddp, dense), *(_about_compressed(dense, outcome) for outcome in compressed)]


def _about_dense(ddp: Outcome, dense: Outcome) -> str:
    theirs, ours = figures_of(ddp), figures_of(dense)
    times = f"{1e3 * ours.step_seconds:.1f} against {1e3 * theirs.step_seconds:.1f} ms"
    ratio = step_ratio(dense, ddp)
    if ratio.is_clearly_below_one():
        verdict = f"pycomm's steps took {100 * (1 - ratio.value):.0f} % less time than DDP's ({times})"
    elif ratio.is_clearly_above_one():
        verdict = f"pycomm's steps took {100 * (ratio.value - 1):.0f} % more time than DDP's ({times})"
    else:
        verdict = f"pycomm's steps took about as long as DDP's ({times}; {_spread(ratio)})"
    waits = f"{1e3 * ours.wait_seconds:.1f} ms instead of {1e3 * theirs.wait_seconds:.1f}"
    return f"With the same gradients, {verdict}, of which backward() waited {waits}; {_losses(ours, theirs)}."


def _about_compressed(dense: Outcome, outcome: Outcome) -> str:
    plain, ours = figures_of(dense), figures_of(outcome)
    ratio = step_ratio(outcome, dense)
    fewer = f"{ours.label} sent {plain.bytes_per_step / ours.bytes_per_step:.1f} times fewer bytes than pycomm dense"
    times = f"{1e3 * ours.step_seconds:.1f} against {1e3 * plain.step_seconds:.1f} ms"
    if ratio.is_clearly_below_one():
        verdict = f"which paid on this host: its steps took {100 * (1 - ratio.value):.0f} % less time ({times})"
    elif ratio.is_clearly_above_one():
        verdict = (
            "which did not pay on this host, where ranks share memory: "
            f"its steps took {100 * (ratio.value - 1):.0f} % more time ({times})"
        )
    else:
        verdict = f"which made no clear difference to the step time on this host ({times}; {_spread(ratio)})"
    return f"{fewer}, {verdict}; {_losses(ours, plain)}."


def _spread(ratio: Ratio) -> str:
    return f"{ratio.low:.2f} to {ratio.high:.2f} times as long in the middle half of the turns"


def _losses(run: Figures, base: Figures) -> str:
    """Both to the digits of the table, so that the words never contradict it."""
    difference = round(run.validation_loss, 3) - round(base.validation_loss, 3)
    if abs(difference) < 0.0005:
        return f"the validation loss is the same ({run.validation_loss:.3f})"
    direction = "higher" if difference > 0 else "lower"
    return f"after the same number of steps the validation loss is {abs(difference):.3f} {direction}"

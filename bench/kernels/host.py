"""Time that the host needs for a step of an optimizer, on parameters so small that there is little else to it.

    python -m bench.kernels.host [--counts 161,1000] [--elements 64] [--threads 1] [--rounds 41] [--json FILE]

Every optimizer of pycomm's takes turns with torch's own, ``fused=True`` and ``foreach=True``; the
ratios are of medians. LARS and LAMB, which torch lacks, stand beside Adam. With a scaler, a step
includes looking for infinities in the gradients. All are verified first: after steps from the same
weights with the same gradients, pycomm's parameters are equal to torch's, or to the results of plain operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pycomm
from bench.harness.arguments import counts, make_parser, positive
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, interleave, stopwatch, times
from pycomm.tools.cli.table import print_table

_ADAM = {"lr": 1e-3, "weight_decay": 1e-2}
_SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2}
_STEPS = 3  # to verify, and to have all state
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One optimizer.

    Attributes:
        peer: torch's optimizer of the same rule; of the nearest for which torch has a fused one.
        plain: makes one that does the same without kernels of pycomm's.
        scaler: makes what scales the loss, if anything, for pycomm's and for torch's.
    """

    name: str
    kind: Any
    peer: Any
    options: dict[str, float]
    plain: dict[str, Any]
    scalers: tuple[Callable[[], Any], Callable[[], Any]] | None = None


def make_cases() -> list[Case]:
    """Return what is measured, in the order of the table."""
    adam, sgd, foreach = torch.optim.Adam, torch.optim.SGD, {"foreach": True}
    return [
        Case("Adam", adam, adam, _ADAM, foreach),
        Case("AdamW", torch.optim.AdamW, torch.optim.AdamW, _ADAM, foreach),
        Case("SGD, momentum", sgd, sgd, _SGD, foreach),
        Case("LARS", pycomm.LARS, adam, {**_SGD, "lr": 1.0}, {"fused": False}),
        Case("LAMB", pycomm.LAMB, adam, _ADAM, {"fused": False}),
        Case("Adam, LossScaler", adam, adam, _ADAM, foreach, (_own_scaler, _torchs_scaler)),
        Case("Adam, GradScaler", adam, adam, {**_ADAM, "fused": True}, foreach, (_torchs_scaler, _torchs_scaler)),
    ]


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    print(f"{headline()}\n{arguments.threads} thread(s), {arguments.rounds} rounds, {arguments.elements} elements each")
    rows = []
    for count in arguments.counts:
        for case in make_cases():
            verify(case, count, arguments.elements)
            rows.append(_measure(case, count, arguments.elements, arguments.rounds))
    print("verified")
    header = ["step", "parameters", "pycomm", "p10 - p90", "fused", "p10 - p90", "foreach", "p10 - p90", "of fused"]
    print_table(header, [_cells(row) for row in rows])
    settings = {"threads": arguments.threads, "rounds": arguments.rounds, "elements": arguments.elements}
    write_json(arguments.json, "host", settings, {"rows": rows})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.kernels.host", __doc__)
    parser.set_defaults(rounds=41)
    parser.add_argument("--counts", type=counts, default=[161, 1000], help="numbers of parameters (default 161,1000)")
    parser.add_argument("--elements", type=positive, default=64, help="elements of each (default 64)")
    parser.add_argument("--threads", type=positive, default=1, help="threads for pycomm and torch (default 1)")
    return parser.parse_args()


def _own_scaler() -> Any:
    return pycomm.LossScaler(1.0, dynamic=False)


def _torchs_scaler() -> Any:
    scaler = torch.amp.GradScaler("cpu", 1.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros(()))  # makes the scale a tensor
    return scaler


def _optimizer(kind: Any, count: int, elements: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(1, elements, generator=generator)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(1, elements, generator=generator)
    return kind(params, **options)


def _ours(case: Case, count: int, elements: int) -> Any:
    optimizer = _optimizer(case.kind, count, elements, **case.options)
    pycomm.fuse(optimizer)
    return optimizer


def _step(optimizer: Any, make_scaler: Callable[[], Any] | None) -> Callable[[], None]:
    if make_scaler is None:
        return optimizer.step  # type: ignore[no-any-return]
    scaler = make_scaler()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def verify(case: Case, count: int, elements: int) -> None:
    """Raise ``AssertionError`` unless steps of pycomm's kernels end where plain operations do."""
    ours = _ours(case, count, elements)
    plain = _optimizer(case.kind, count, elements, **{**case.options, "fused": None, **case.plain})
    start = [param.detach().clone() for param in plain.param_groups[0]["params"]]
    make_scaler = case.scalers[0] if case.scalers else None
    for step in (_step(ours, make_scaler), plain.step):
        for _ in range(_STEPS):
            step()
    ends = (optimizer.param_groups[0]["params"] for optimizer in (ours, plain))
    for before, mine, theirs in zip(start, *ends, strict=True):
        if torch.equal(before, theirs) or not torch.allclose(mine, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise AssertionError(f"{case.name}: differs by up to {float((mine - theirs).abs().max().detach())}")


def _measure(case: Case, count: int, elements: int, rounds: int) -> dict[str, Any]:
    our_scaler, peers_scaler = case.scalers or (None, None)
    peer_options = _ADAM if case.peer is not case.kind else {k: v for k, v in case.options.items() if k != "fused"}
    steps = {"pycomm": _step(_ours(case, count, elements), our_scaler)}
    for variant in ("fused", "foreach"):
        peer = _optimizer(case.peer, count, elements, **peer_options, **{variant: True})
        steps[variant] = _step(peer, peers_scaler)
    for step in steps.values():
        for _ in range(_STEPS):
            step()
    samples = interleave({name: partial(stopwatch, step) for name, step in steps.items()}, rounds)
    return {
        "step": case.name,
        "parameters": count,
        **{name: taken.as_json() for name, taken in samples.items()},
        "of_fused": samples["pycomm"].median / samples["fused"].median,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["step"], str(row["parameters"])]
    for name in ("pycomm", "fused", "foreach"):
        cells += Samples.of(row[name]["samples"]).cells()
    return [*cells, times(row["of_fused"])]


if __name__ == "__main__":
    main()

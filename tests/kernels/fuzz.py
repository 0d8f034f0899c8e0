"""A fuzz of the kernels' Python face: ``python -m tests.kernels.fuzz --calls 100000 --seed 0``.

Calls, right ones and wrong ones, follow from the seed and their number alone, so that ``--only N`` makes one of them
again. The calls are made in a process of their own: one that dies of a call is reported like any other fault, and the
next process goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from tests.kernels import fuzz_calls, fuzz_codes, fuzz_entries, fuzz_steps
from tests.kernels.fuzz_arrays import Slot, fill, place, settle
from tests.kernels.fuzz_calls import Call
from tests.kernels.fuzz_memory import Rng, fences
from tests.kernels.fuzz_oracle import Violation, check
from tests.kernels.fuzz_spoil import spoil
from tests.kernels.reference import instruction_sets

_BUILDERS = [
    *(
        fuzz_calls.pack,
        fuzz_calls.pack_flagged,
        fuzz_calls.unpack,
        fuzz_calls.reduce,
        fuzz_calls.topk,
        fuzz_calls.scatter_add,
    ),
    *(fuzz_calls.absmax, fuzz_calls.hashes, fuzz_calls.squared_norms),
    *(fuzz_codes.pack_indices, fuzz_codes.unpack_indices, fuzz_codes.quantize, fuzz_codes.dequantize),
    *(fuzz_codes.requantize, fuzz_codes.pack_signs, fuzz_codes.unpack_signs),
    *(fuzz_codes.pack_chunks, fuzz_codes.unpack_chunks),
    *(fuzz_entries.pack_entries, fuzz_entries.unpack_entries, fuzz_entries.add_entries),
    *(fuzz_steps.accumulate_chunks, fuzz_steps.accumulate_quantized, fuzz_steps.accumulate_low_rank),
    *(fuzz_steps.split_low_rank, fuzz_steps.orthogonalize, fuzz_steps.expand_low_rank),
    *(fuzz_steps.accumulate, fuzz_steps.sparsify, fuzz_steps.momentum_step, fuzz_steps.adam_step),
    *(fuzz_steps.rmsprop_step, fuzz_steps.adagrad_step, fuzz_steps.lamb_moments, fuzz_steps.lamb_apply),
]
_SMALL = [fuzz_codes.packed_words, fuzz_codes.sign_words, fuzz_codes.set_num_threads]
FUNCTIONS = [builder.__name__ for builder in (*_BUILDERS, *_SMALL)]


def generate(seed: int, number: int) -> Call:
    """The call of that number, its arrays in place."""
    rng = Rng(f"{seed}/{number}")
    fences().restart()
    call = rng.choice(_SMALL if rng.chance(0.04) else _BUILDERS)(rng)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 1, 1, 1, 2])):
        spoil(rng, call)
    for slot in call.slots:
        settle(rng, slot)
        place(rng, slot)
    for slot in call.slots:
        fill(slot)
    call.threads = rng.choice([None, 1, 2, 3])
    call.simd = rng.choice(instruction_sets())
    if call.function == "set_num_threads":
        call.threads = None
    return call


def _shown(value: Any) -> str:
    """A repr that asks no tensor for elements which it may not have."""
    if isinstance(value, torch.Tensor):
        return f"<{type(value).__name__} {list(value.shape)} of {value.dtype} on {value.device}>"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if is_dataclass(value) and not isinstance(value, type | Slot):
        inside = ", ".join(f"{field.name}={_shown(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    return repr(value)


def describe(call: Call) -> str:
    """For people: what was called with what."""
    lines = [
        f"kernels.{call.function}(",
        *(f"    {name}={_shown(value)}," for name, value in call.arguments.items()),
        ")",
    ]
    told = "; ".join(call.story) or "valid"
    return "\n".join([*lines, f"spoilt: {told}; threads: {call.threads}, instruction set: {call.simd}"])


def run(seed: int, number: int) -> tuple[Violation, Call] | None:
    """Make one call; what is wrong with it."""
    call = generate(seed, number)
    try:
        check(call)
    except Violation as violation:
        return violation, call
    return None


def _report(seed: int, number: int, function: str, kind: str, detail: str, description: str) -> None:
    print(f"\n{function}: {kind}\n{detail}\n{description}")
    print(f"again: python -m tests.kernels.fuzz --seed {seed} --only {number}", flush=True)


def _work(seed: int, first: int, calls: int) -> None:
    """Makes calls and says so, a line for each, for _supervise to read."""
    for number in range(first, calls):
        print(number, flush=True)
        try:
            found = run(seed, number)
        except Exception:
            what = {"function": "the fuzz", "kind": "failed", "detail": traceback.format_exc(), "description": ""}
            print(json.dumps(what), flush=True)
            continue
        if found is not None:
            violation, call = found
            what = {"function": call.function, "kind": violation.kind, "detail": str(violation)}
            print(json.dumps({**what, "description": describe(call)}), flush=True)


class _Supervisor:
    """Starts processes that work, and keeps count."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.next = options.first
        self.found: Counter[str] = Counter()
        self.begin = self.told = time.monotonic()

    def tell(self, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self.told < 5.0:
            return
        self.told = now
        done = self.next - self.options.first
        pace = done / max(now - self.begin, 1e-9)
        print(f"{done} calls, {pace:.0f} a second, {self.found.total()} faults", flush=True)

    def report(self, number: int, what: dict[str, Any]) -> None:
        group = f"{what['function']}: {what['kind']}"
        self.found[group] += 1
        if self.found[group] <= self.options.each:
            _report(self.options.seed, number, **what)

    def work(self) -> None:
        """One process, to its end."""
        options = self.options
        command = [sys.executable, "-m", "tests.kernels.fuzz", "--worker", "--seed", str(options.seed)]
        command += ["--first", str(self.next), "--calls", str(options.calls)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    self.report(self.next - 1, json.loads(line))
                elif line.strip().isdigit():
                    self.next = int(line) + 1
                    self.tell()
        if process.returncode != 0:
            detail = f"the process ended with {process.returncode}"
            call = generate(options.seed, self.next - 1)
            what = {"function": call.function, "kind": "died", "detail": detail, "description": describe(call)}
            self.report(self.next - 1, what)


def _supervise(options: argparse.Namespace) -> int:
    supervisor = _Supervisor(options)
    while supervisor.next < options.calls:
        supervisor.work()
    supervisor.tell(always=True)
    for group, count in supervisor.found.most_common():
        print(f"{count:6d} {group}")
    return 1 if supervisor.found else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz of pycomm.kernels on the CPU.")
    parser.add_argument("--calls", type=int, default=100_000, help="the number of the last call, plus one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--only", type=int, help="make this call alone, in this process")
    parser.add_argument("--each", type=int, default=2, help="how many faults of a kind are shown")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only is not None:
        print(describe(generate(options.seed, options.only)), flush=True)
        found = run(options.seed, options.only)
        if found is not None:
            raise found[0]
        return 0
    if options.worker:
        _work(options.seed, options.first, options.calls)
        return 0
    return _supervise(options)


if __name__ == "__main__":
    sys.exit(main())

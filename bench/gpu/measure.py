"""Part of ``bench.gpu`` that imports pycomm and measures; in a process of its own, started by it.

    python -m bench.gpu.measure --out FILE [--rounds N] [--seconds N] [--phases NAME,...]

What is known is written to FILE after every line, so that nothing is lost when this process is.
With ``--device cpu`` everything is tiny: that is how tests run it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.environment import gpu_environment, gpu_state, l2_bytes
from bench.gpu.models import TINY_WORKLOADS, WORKLOADS, Workload
from bench.gpu.plan import TRACE
from bench.gpu.targets import OVERHEAD, PEAK, judged
from bench.gpu.timing import WARM_UP_TURNS, Turn, num_copies
from bench.harness.arguments import plain_parser, positive
from bench.harness.timing import Samples, interleave
from bench.kernels.resnet50 import parameter_shapes

if TYPE_CHECKING:
    from bench.gpu.cases import Plan

_PHASES = {"bandwidth": 15.0, "kernels": 160.0, "nccl": 30.0, "attach": 240.0, "two_ranks": 45.0}
"""Seconds that each may take at most; where there are fewer for all, each has less."""

_CASE_SECONDS = 6.0
_LEAST_ROUNDS = 3
_LEAST_ATTACH_ROUNDS = 3
_SHARED_GPU_NCCL = (2, 30)
_SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
_BY_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "8"}
"""Variables of ranks that share a GPU: with older versions, each rank also names a host of its own."""


def main() -> None:
    arguments = _parse()
    Measurement(arguments).run()


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.gpu.measure", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything (default 500)")
    parser.add_argument("--phases", default=",".join(_PHASES), help="default: %(default)s")
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args()


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured.

    Attributes:
        small, large: elements of the kernels' arrays (1, 25 and 100 MiB); ``large`` is also what is copied.
        gradients: how many of ResNet-50's.
        workloads: training steps.
        steps: in a turn.
    """

    small: tuple[int, ...] = (1 << 18, 25 << 18, 100 << 18)
    large: int = 100_000_000
    gradients: int = 161
    workloads: tuple[Workload, ...] = WORKLOADS
    steps: int = 5


_TINY = Sizes((2_000,), 30_000, gradients=9, workloads=TINY_WORKLOADS, steps=1)


class CopyFloor:
    """Floor of everything else: copies from one large array into another on the device."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.bytes = 8 * elements  # read and written
        self._device = device
        self._pairs = [(torch.randn(elements, device=device), torch.randn(elements, device=device)) for _ in range(2)]

    def turn(self) -> Turn:
        """Return a turn of torch's ``copy_``, which is cudaMemcpyAsync."""
        return Turn([partial(target.copy_, source) for source, target in self._pairs], self._device)

    def cupy_turn(self) -> Turn:
        """Return a turn of the same through cupy, on torch's arrays and stream.

        Raises:
            ImportError: no cupy.
        """
        runtime = importlib.import_module("cupy").cuda.runtime
        stream = torch.cuda.current_stream(self._device).cuda_stream
        kind = runtime.memcpyDeviceToDevice

        def call(source: torch.Tensor, target: torch.Tensor) -> None:
            runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)

        return Turn([partial(call, source, target) for source, target in self._pairs], self._device)


class Measurement:
    """Report as far as it has come, and the phases that fill it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._device = torch.device(arguments.device)
        self._end: float = time.monotonic() + arguments.seconds
        self._phase_end: float = self._end
        self._sizes = Sizes() if self._device.type == "cuda" else _TINY
        settings = {"rounds": arguments.rounds, **asdict(self._sizes)}
        self.report: dict[str, Any] = {"environment": {}, "settings": settings, "bandwidth": {}}
        for key in ("cases", "nccl", "attach", "peaks", "skipped", "errors"):
            self.report[key] = []

    def run(self) -> None:
        """Run every phase; if one raises an error, note it and begin the next."""
        self._guarded("environment", self._environment)
        wanted = self._arguments.phases.split(",")
        share = min(1.0, self._arguments.seconds / sum(_PHASES.values()))
        for name, most in _PHASES.items():
            seconds = share * most
            if name in wanted:
                print(f"-- {name}, {seconds:.0f} s at most", flush=True)
                self._phase_end = min(self._end, time.monotonic() + seconds)
                self._guarded(name, getattr(self, f"_{name}"))

    def _guarded(self, where: str, work: Callable[[], None]) -> None:
        begin = time.monotonic()
        try:
            work()
        except Exception:
            self.report["errors"].append({"where": where, "error": traceback.format_exc()})
            print(traceback.format_exc())
        print(f"{where}: {time.monotonic() - begin:.1f} s", flush=True)
        self._write()

    def _write(self) -> None:
        """Write the report so that whoever looks finds a whole one, whenever this process ends."""
        draft = self._arguments.out.with_suffix(".draft")
        draft.write_text(json.dumps(self.report))
        draft.replace(self._arguments.out)

    def _skip(self, what: str, why: str) -> None:
        self.report["skipped"].append({"what": what, "why": why})

    def _out_of_time(self) -> bool:
        return time.monotonic() > self._phase_end

    def _environment(self) -> None:
        self.report["environment"] = gpu_environment(self._device)

    def _bandwidth(self) -> None:
        floor = CopyFloor(self._device, self._sizes.large)
        turns = {"torch copy_": floor.turn()}
        if self._device.type == "cuda":
            try:
                turns["cupy memcpyAsync"] = floor.cupy_turn()
            except ImportError as error:
                self._skip("copy bandwidth by cupy", str(error))
        for turn in turns.values():
            turn.warm_up()
        samples = interleave(turns, self._arguments.rounds)
        ways = [
            {"way": way, "seconds": found.as_json(), "bytes_per_second": floor.bytes / found.median}
            for way, found in samples.items()
        ]
        fastest = max(floor.bytes / found.median for found in samples.values())
        self.report["bandwidth"] = {"bytes": floor.bytes, "copy_bytes_per_second": fastest, "ways": ways}

    def _kernels(self) -> None:
        from bench.gpu.cases import make_plans  # imports pycomm: the phases before do without

        floor = CopyFloor(self._device, self._sizes.large)
        shapes = parameter_shapes()[: self._sizes.gradients]
        for plan in make_plans(self._sizes.small, self._sizes.large, shapes):
            name = f"{plan.name}, {plan.elements} elements"
            if self._out_of_time():
                self._skip(name, "the time for kernels was used up")
                continue
            self._guarded(name, partial(self._case, plan, floor))
            self._free()

    def _case(self, plan: Plan, floor: CopyFloor) -> None:
        copies = plan.make(self._device, num_copies(l2_bytes(self._device), plan.case.floor_bytes))
        for copy in copies:
            copy.verify()
        ours = Turn([copy.ours for copy in copies], self._device)
        peer = Turn([copy.peer for copy in copies], self._device)
        turns = {"ours": ours, "peer": peer, "copy": floor.turn()}
        samples = interleave(turns, self._rounds_in(_CASE_SECONDS, turns))
        row = case_row(plan, samples, floor.bytes / samples["copy"].median)
        host = {"host_seconds": ours.host_seconds, "peer_host_seconds": peer.host_seconds}
        self.report["cases"].append({**row, "copies": len(copies), **host, "gpu": gpu_state(self._device)})

    def _rounds_in(self, seconds: float, turns: Mapping[str, Turn]) -> int:
        """Warm up, and return how many rounds fit into ``seconds``: as many as asked for, or some at least."""
        begin = time.monotonic()
        for turn in turns.values():
            turn.warm_up()
        one = (time.monotonic() - begin) / WARM_UP_TURNS
        rounds: int = self._arguments.rounds
        return min(rounds, max(_LEAST_ROUNDS, int(seconds / one)))

    def _free(self) -> None:
        """Free the memory: the next case's arrays have other sizes."""
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _nccl(self) -> None:
        if self._device.type != "cuda":
            self._skip("NCCL", "no GPU")
            return
        from bench.harness.ranks import WorkerGroup  # imports pycomm, as above
        from pycomm.tools.launching import rendezvous

        with rendezvous() as port, WorkerGroup("NCCL", "bench.gpu.ranks:NcclRank", 1, {"port": port}) as ranks:
            for num_bytes in (4096, *(4 * n for n in self._sizes.small)):
                found = ranks.call("measure", num_bytes, self._arguments.rounds)[0]
                self.report["nccl"].append({**_nccl_row(num_bytes, found), "gpu": gpu_state(self._device)})

    def _attach(self) -> None:
        """Measure all workloads; each has its share of the time that is left."""
        from bench.gpu.ranks import DDP_BF16, WAYS, WAYS_BESIDE_DDP  # imports pycomm, as above

        workloads = self._sizes.workloads
        for number, workload in enumerate(workloads):
            if self._out_of_time():
                self._skip(f"training step: {workload.title}", "the time for attach was used up")
                continue
            left = self._phase_end - time.monotonic()
            end = time.monotonic() + left / (len(workloads) - number)
            # In a capture, DDP requires other settings of NCCL, and streams of its own from the beginning.
            ways: tuple[str, ...] = WAYS if workload.captured else WAYS_BESIDE_DDP
            if self._device.type == "cpu":
                ways = tuple(way for way in ways if way != DDP_BF16)  # torch refuses its hook there
            self._guarded(workload.title, partial(self._attach_in, 1, {}, workload, ways, end))

    def _two_ranks(self) -> None:
        """Measure two ranks on one GPU: NCCL before 2.30 takes them for two hosts, linked by sockets."""
        what = "attach, two ranks on one GPU"
        if self._device.type != "cuda":
            self._skip(what, "no GPU")
            return
        from bench.gpu.ranks import WAYS  # imports pycomm, as above
        from pycomm.collectives.transport.nccl import nccl_version

        found = nccl_version()
        if found is None:
            self._skip(what, "no NCCL")
            return
        shared = tuple(int(part) for part in found[0].split(".")[:2]) >= _SHARED_GPU_NCCL
        variables = _SHARED_GPU if shared else _BY_SOCKETS
        self._attach_in(2, variables, self._sizes.workloads[0], WAYS, self._phase_end)

    def _attach_in(
        self, size: int, environment: dict[str, str], workload: Workload, ways: Sequence[str], end: float
    ) -> None:
        from bench.gpu.ranks import DDP, DENSE
        from bench.harness.ranks import WorkerGroup  # imports pycomm, as above
        from pycomm.tools.launching import rendezvous

        self._free()
        setup = {"device": str(self._device), "workload": workload, "own_host": environment is _BY_SOCKETS}
        rounds, worker = 2 * self._arguments.rounds, "bench.gpu.ranks:AttachRank"  # a few per cent take more of them
        turns: list[dict[str, dict[str, Any]]] = []
        with rendezvous() as port, WorkerGroup("attach", worker, size, {"port": port, **setup}, environment) as ranks:
            ranks.call("verify", ways)
            for number in range(rounds):
                if number >= _LEAST_ATTACH_ROUNDS and time.monotonic() > end:
                    left_out = f"{workload.title}, {size} rank(s): {rounds - number} of {rounds} rounds"
                    self._skip(left_out, "time was used up")
                    break
                order = ways if number % 2 == 0 else ways[::-1]
                turns.append({way: _slowest(ranks.call("turn", way, self._sizes.steps)) for way in order})
            common = {"ranks": size, "model": workload.title, "gpu": gpu_state(self._device)}
            profiles = {way: ranks.call("profile", way, self._trace_of(way == DENSE))[0] for way in ways}
        rows = {way: {**attach_row(way, ways[0], turns), **profiles[way], **common} for way in ways}
        for way, row in rows.items():
            self.report["attach"].append(judged(row, OVERHEAD if way == DENSE and size == 1 else None))
        if DDP in rows and rows[DDP]["peak_bytes"] is not None:
            self.report["peaks"].append(peak_row(workload.title, rows[DENSE]["peak_bytes"], rows[DDP]["peak_bytes"]))

    def _trace_of(self, is_wanted: bool) -> str | None:
        """Return where to write the trace of a step, once in a run."""
        path = self._arguments.out.with_name(TRACE)
        return str(path) if is_wanted and self._device.type == "cuda" and not path.exists() else None


def peak_row(model: str, ours: int, ddp: int) -> dict[str, Any]:
    """Return a line of the report on memory: what ``attach`` takes at most, beside DistributedDataParallel."""
    row = {"model": model, "peak_bytes": ours, "ddp_peak_bytes": ddp, "over_ddp_bytes": ours - ddp}
    return judged(row, PEAK)


def case_row(plan: Plan, samples: dict[str, Samples], copy_bytes_per_second: float) -> dict[str, Any]:
    """Return a line of the report, judged."""
    ours, peer = samples["ours"], samples["peer"]
    share = plan.case.floor_bytes / ours.median / copy_bytes_per_second
    row = {
        "name": plan.name,
        "note": plan.note,
        "elements": plan.elements,
        "seconds": ours.as_json(),
        "peer": plan.case.peer_name,
        "peer_seconds": peer.as_json(),
        "times_faster": peer.median / ours.median,
        "bytes": plan.case.floor_bytes,
        "copy_bytes_per_second": copy_bytes_per_second,
        "share_of_copy_bandwidth": share,
        "time_over_floor": 1 / share,
    }
    return judged(row, plan.target)


def attach_row(way: str, without: str, turns: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a line of the report on steps with ``way``.

    ``ratio`` compares two turns of one round; ``overhead`` is its median, less 1; ``active`` whether pycomm did
    anything. ``peak_bytes`` is the least that a turn was content with: what is left of other ways is not counted.
    """
    ratio = Samples.of(turn[way]["seconds"] / turn[without]["seconds"] for turn in turns)
    return {
        "name": way,
        "active": any(turn[way]["active"] for turn in turns),
        "seconds": Samples.of(turn[way]["seconds"] for turn in turns).as_json(),
        "ratio": ratio.as_json(),
        "overhead": ratio.median - 1,
        "host_seconds": Samples.of(turn[way]["host_seconds"] for turn in turns).median,
        "peak_bytes": min((turn[way]["peak_bytes"] for turn in turns), key=lambda found: found or 0),
        "miss_rate": turns[-1][way]["miss_rate"],
    }


def _nccl_row(num_bytes: int, found: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": "all_reduce, one rank (no data moves)", "bytes": num_bytes}
    for side, prefix in (("pycomm", ""), ("torch", "peer_")):
        if side in found:
            row[f"{prefix}seconds"] = Samples.of(found[side]["seconds"]).as_json()
            row[f"{prefix}host_seconds"] = found[side]["host_seconds"]
    return {**row, "peer": "torch.distributed, nccl" if "torch" in found else None}


def _slowest(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    return max(by_rank, key=lambda found: found["seconds"])


if __name__ == "__main__":
    main()

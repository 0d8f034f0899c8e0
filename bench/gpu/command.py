"""Check and measurement of one GPU: two commands, which run alone or together, in less than ten minutes.

    python -m bench.gpu check [--output FILE] [--folder DIR] [--skip-build] [--commit ID] [--rehearse]
    python -m bench.gpu measure [the same, and --rounds N]
    python -m bench.gpu check measure [the same]

`check` builds the checkout for this GPU, runs all tests that require a GPU, and the tests of top-k,
sparsify, entries, norms and accumulate under compute-sanitizer's memcheck, racecheck, synccheck and
initcheck. `measure` builds, then measures bandwidth, kernels, NCCL and attach: every line is verified
before it is timed, takes turns with torch's and with a copy, and has its target beside it. Both in
one call build once and write one report; `check` then leaves half of the time to `measure`.
`python -m bench.gpu.report` prints what either has written.

The report is one JSON file, by default bench/results/gpu_<device>.json (or gpu_check_<device>.json).
It is rewritten after every line, so that a run that is cut off leaves what it had. Each step has a
limit; what fails, or does not fit, is in the report. With --folder the build is kept there, and the
next command builds only what has changed.

Without a GPU both end at once, with status 2. --rehearse goes as far as it can even so: it builds for
compute capability 9.0, finds the tests, prints the commands that would follow, and ends with 2.

Wants torch with CUDA, a CUDA toolkit (nvcc on PATH, in CUDA_HOME or in /usr/local/cuda), and what the
build and the tests need: scikit-build-core, pybind11, pytest, pytest-timeout, hypothesis. Needs no
network and no git. Exit status: 0; 1 if something failed (a target missed is no failure); 2 if it
cannot begin.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench import ROOT
from bench.gpu.report import RESULTS
from bench.gpu.run import Run, slug
from bench.harness.arguments import plain_parser, positive

_NO_GPU = "bench.gpu: torch finds no GPU here; this bench needs a CUDA device and a torch that can use it"
_TO_BUILD = {"scikit_build_core": "scikit-build-core", "pybind11": "pybind11"}
_TO_TEST = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}


def main() -> int:
    arguments = _parse()
    wanted = ({} if arguments.skip_build else _TO_BUILD) | (_TO_TEST if "check" in arguments.what else {})
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"bench.gpu: not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.rehearse:
        print(_NO_GPU, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is cut off ends what it has started
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        output = arguments.output or _default_path(arguments)
        try:
            run = Run(arguments.what, output, Path(scratch), arguments.folder)
        except OSError as error:
            print(f"bench.gpu: cannot write to {output}: {error}", file=sys.stderr)
            return 2
        try:
            if arguments.rehearse:
                run.rehearse(not arguments.skip_build, arguments.commit, arguments.rounds)
            else:
                run.everything(not arguments.skip_build, arguments.commit, arguments.rounds)
        except KeyboardInterrupt:
            run.fail("bench.gpu", "interrupted")
        status = run.finish()
    if not has_gpu:
        print(_NO_GPU, file=sys.stderr)
    return status if has_gpu else 2


def _default_path(arguments: argparse.Namespace) -> Path:
    if arguments.rehearse:
        return ROOT / "build" / f"gpu_rehearsal_{'_'.join(arguments.what)}.json"
    prefix = "gpu" if "measure" in arguments.what else "gpu_check"
    return RESULTS / f"{prefix}_{slug(_device_name())}.json"


def _device_name() -> str:
    """Ask another process: this one must not hold a context on the GPU that others measure."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout.strip()


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.gpu", __doc__)
    parser.add_argument("what", nargs="+", choices=["check", "measure"])
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the report is written")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="build in DIR, and keep it")
    parser.add_argument("--rounds", type=positive, default=15, help="turns that everything measured gets (default 15)")
    parser.add_argument("--skip-build", action="store_true", help="use the pycomm that is installed")
    parser.add_argument("--commit", metavar="ID", help="what to note where the checkout is no git repository")
    parser.add_argument("--rehearse", action="store_true", help="go as far as it goes without a GPU")
    return parser.parse_args()

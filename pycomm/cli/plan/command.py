"""``pycomm plan``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pycomm import schedule
from pycomm.cli.arguments import integer
from pycomm.cli.plan.arguments import positive_size, rate, seconds, share, size, sizes
from pycomm.cli.plan.report import print_calibration, print_ranking
from pycomm.cli.terminal import complain
from pycomm.schedule.choose import SIZES, rank_algorithms
from pycomm.schedule.network import DEFAULT_NETWORK, NETWORKS, Network
from pycomm.transport.choice import TRANSPORTS

_DESCRIPTION = f"""\
Prices every all-reduce algorithm on a described network, by simulation: prints their ranking for one size and the
fastest for each range of sizes, and plots time against size. Nothing is sent.

With --compression it says whether compressing gradients pays: the cost of each method, measured here and simulated on
the network, and the bandwidth below which it is faster than none.

With --model it plans the training of a model: FILE.py has a function that makes it, make_batch(samples), which returns
its arguments, unless there is --input, and, if wanted, loss(output). The model is traced without memory; how its layers
can be split over devices, made stages of a pipeline, and replicated, is priced by memory and time.

With --layers it says which layers of given sizes go to which devices: all of them to each (data parallelism), whole
layers to different devices (inter-operator), layers cut over devices (intra-operator), or both.

With --scaling it fits the efficiency e of T = S N e (throughput of one device, number of devices) to measured --points,
in Amdahl's form, Gustafson's and others, or predicts it from --step, the time that one device computes, and the
network.

With --calibrate it measures instead: the cost of messages between the ranks of the running group, and the time that the
algorithms take. Under torchrun that group is the one torchrun started; otherwise --ranks processes of this host. The
file that it writes is a network for --network, for Communicator(network=...) and for the environment variable
PYCOMM_NETWORK.

Networks: {", ".join(NETWORKS)}; or a file.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="price all-reduce algorithms on a network, or calibrate one",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=integer(1), help="number of ranks")
    add("--per-host", type=integer(1), help="ranks on each host (default: as the network says)")
    add(
        "--bytes",
        type=size,
        default=100e6,
        metavar="SIZE",
        help="of the array: 100MB, 64KiB ... (default 100MB)",
    )
    add("--network", help=f"a name or a file (default {DEFAULT_NETWORK})")
    add("--plot", type=Path, default=Path("pycomm_plan.png"), metavar="FILE", help="file for the plot, a PNG")
    add("--no-plot", action="store_true", help="draw nothing")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--compression", action="store_true", help="price the compression of gradients of --bytes")
    modes.add_argument("--calibrate", action="store_true", help="measure the running group instead")
    modes.add_argument(
        "--layers", type=sizes, metavar="SIZES", help="place layers of these sizes, such as 16GB,2GB, on --devices"
    )
    modes.add_argument("--model", metavar="FILE.py:FUNCTION", help="plan the training of the model that it returns")
    modes.add_argument("--scaling", action="store_true", help="throughput and efficiency of up to 4096 devices")
    add("--devices", type=integer(1), help="number of devices, for --model and --layers; the most, for --scaling")
    add("--memory", type=positive_size, metavar="SIZE", help="of each device, for --model and --layers")
    _add_model_arguments(parser)
    add(
        "--output",
        type=Path,
        default=Path("network.json"),
        metavar="FILE",
        help="file that --calibrate writes",
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="transport for --calibrate")
    add("--points", help="for --scaling: measured throughputs by devices, 1:100,2:190, or a file [[1, 100], [2, 190]]")
    add("--step", type=seconds, help="for --scaling: time that one device computes in a step, such as 50ms")
    add("--overlap", type=share, default=0.0, help="for --scaling and --model: hidden part of communication, 0 to 1")
    parser.set_defaults(run=run, parser=parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("for --model").add_argument
    add("--batch", type=integer(1), help="samples of a step, over all devices")
    add(
        "--input", metavar="SHAPES", help="of one sample, such as 3x224x224 or 512:int64 (default: make_batch(samples))"
    )
    add("--optimizer", default="adam", help="sgd, momentum, adam, ... (default adam)")
    add("--flops", type=rate, help="FLOPs per second of a device, such as 19.5T (default: measured here)")
    add("--memory-bandwidth", type=rate, help="bytes per second of its memory, such as 900G, with --flops")
    add("--cores", type=integer(1), help="devices that can compute at once, if they share the cores of one host")
    add("--write", type=Path, metavar="FILE", help="file for the plan that is chosen, which split() takes")


def run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.layers is not None:
        return _place_layers(arguments)
    if arguments.model is not None:
        return _plan_model(arguments)
    if arguments.scaling:
        return _scale(arguments)
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many ranks will there be?")
    try:
        network = schedule.load(arguments.network).with_hosts_of(arguments.per_host)
        if network.per_host is not None and arguments.per_host and arguments.ranks % network.per_host:
            raise ValueError(f"--ranks {arguments.ranks} do not factor into hosts of {network.per_host}")
        if arguments.compression:
            return _price_compression(arguments, network)
        ranking = rank_algorithms(arguments.ranks, network, sorted({*SIZES, arguments.bytes}))
    except ValueError as error:
        complain(f"pycomm plan: {error}")
        return 2
    print_ranking(ranking, arguments.bytes)
    return _draw("save_plot", "time against size", arguments, ranking, arguments.bytes)


def _place_layers(arguments: argparse.Namespace) -> int:
    from pycomm.cli.plan.layers import print_layers

    _require(arguments, "devices", "how many are there?")
    _require(arguments, "memory", "how many bytes has a device?")
    try:
        return 0 if print_layers(arguments.layers, arguments.devices, arguments.memory) else 1
    except ValueError as error:
        complain(f"pycomm plan: {error}")
        return 2


def _plan_model(arguments: argparse.Namespace) -> int:
    from pycomm.cli.plan.model import plan_model

    _require(arguments, "batch", "how many samples has a step, over all devices?")
    _require(arguments, "devices", "how many are there?")
    _require(arguments, "memory", "how many bytes has a device?")
    try:
        return 0 if plan_model(arguments) else 1
    except (OSError, TypeError, ValueError) as error:
        complain(f"pycomm plan: {error}")
        return 2


def _require(arguments: argparse.Namespace, name: str, question: str) -> None:
    if getattr(arguments, name) is None:
        arguments.parser.error(f"--{name} is missing: {question}")


def _price_compression(arguments: argparse.Namespace, network: Network) -> int:
    from pycomm.cli.plan.compression import print_compression  # imports torch

    print_compression(arguments.ranks, arguments.bytes, network)
    return 0


def _scale(arguments: argparse.Namespace) -> int:
    from pycomm.cli.plan.scaling import numbers, scale
    from pycomm.parallel.planning.scaling import MOST_DEVICES

    try:
        if (arguments.devices or 1) > MOST_DEVICES:
            raise ValueError(f"--devices is {arguments.devices}, wanted at most {MOST_DEVICES} for --scaling")
        fits, points = scale(arguments)
    except ValueError as error:
        complain(f"pycomm plan: {error}")
        return 2
    shown = numbers(points, arguments.devices or MOST_DEVICES)
    return _draw("save_scaling", "throughput and efficiency", arguments, fits, points, shown)


def _draw(function: str, what: str, arguments: argparse.Namespace, *data: Any) -> int:
    """Write a plot of ``data`` by that function of :mod:`pycomm.cli.plan.plot`, unless there is to be none."""
    if arguments.no_plot:
        return 0
    try:
        plot = importlib.import_module("pycomm.cli.plan.plot")  # needs an extra
    except ModuleNotFoundError as error:
        print(f"pycomm plan: no plot, {error.name} is not installed: pip install 'pycomm-torch[demo]'", file=sys.stderr)
        return 1
    try:
        getattr(plot, function)(*data, arguments.plot)
    except OSError as error:
        complain(f"pycomm plan: no plot: {error}")
        return 1
    print(f"\nplot of {what}: {arguments.plot}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if "WORLD_SIZE" not in os.environ:
        return _launch(arguments)
    import torch
    import torch.distributed as dist

    from pycomm.calibration import calibrate
    from pycomm.communicator import Communicator

    torch.set_num_threads(1)  # ranks may outnumber cores
    dist.init_process_group("gloo")
    try:
        with Communicator(transport=arguments.transport) as communicator:
            first = communicator.rank == 0
            network = calibrate(
                communicator, tell=(lambda line: print(f"measuring {line}")) if first else lambda _: None
            )
            if first:
                _write(network, arguments.output)
    except ValueError as error:  # all ranks have it
        if dist.get_rank() == 0:
            complain(f"pycomm plan: {error}")
        return 2
    finally:
        dist.destroy_process_group()
    return 0


def _write(network: Network, path: Path) -> None:
    path.write_text(network.to_json())
    print_calibration(network)
    print(f'\nnetwork written to {path}: --network {path}, or PYCOMM_NETWORK={path} for algorithm="auto"')


def _launch(arguments: argparse.Namespace) -> int:
    """Run the same command on local ranks, by torch's launcher."""
    if arguments.ranks is None:
        arguments.parser.error("--ranks is missing: how many local ranks? (or start this under torchrun)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += ["--module", "pycomm.cli.main", "plan", "--calibrate", f"--output={arguments.output}"]
    command += [f"--transport={arguments.transport}"]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode

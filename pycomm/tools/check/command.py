"""``python -m pycomm.check``: facts, links, and what attach would choose; one line for each finding."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm.collectives.communicator import Communicator
from pycomm.descriptions import counted, size_text
from pycomm.tools.check.board import AbsentError, NoticeBoard, store_of_job
from pycomm.tools.check.facts import Facts, Finding, facts_of, findings_of, hosts_of, with_distinct_hosts
from pycomm.tools.check.links import HostLink, findings_of_links, links_of
from pycomm.tools.cli.arguments import complain
from pycomm.tools.cli.plan.command import number
from pycomm.tools.cli.table import print_table
from pycomm.tools.cli.timing import duration, rate_text, times
from pycomm.torch_internals import PrefixStore
from pycomm.training.cost.auto import Auto, cheapest, measured
from pycomm.training.cost.pricing import agreed

_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_BUCKET = 25 << 20  # bytes, as of attach's buckets
_LESS = 1 << 20
_SLOW = 0.5  # seconds of an all-reduce of fewer bytes, from which on no bucket is timed
_REPEATS = 3
_SAMPLE = 512  # rows and columns of the parameter that methods are timed with

_DESCRIPTION = """\
Checks the hosts of a job, in about ten seconds: versions, addresses, links, memory, cores, descriptors, NCCL. Then it
measures what attach would do there. Start it exactly as the job: torchrun ... -m pycomm.check
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the check on this rank; return its exit code: 1 if a job would fail, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.check",
        description=_DESCRIPTION,
        epilog="Exit code: 0 a job would run; 1 it would fail; 2 wrong arguments, or not started by torchrun.",
    )
    add = parser.add_argument
    add("--parameters", type=number, default=100e6, metavar="N", help="of the model: 125M, 7B, ...; default 100M")
    add("--timeout", type=float, default=30.0, metavar="SECONDS", help="of each wait for another rank; default 30")
    arguments = parser.parse_args(words)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        complain(f"pycomm.check: {missing[0]} is not set: start it as the job, torchrun ... -m pycomm.check")
        return 2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        board = NoticeBoard(store_of_job(rank, arguments.timeout), rank, size, arguments.timeout)
        code = _check(board, arguments.parameters)
        board.leave()
    except AbsentError as error:
        # Each rank says it: which of them is shown depends on where the output of the hosts goes.
        complain(f"error: {error}")
        return 1
    return code


def _check(board: NoticeBoard, parameters: float) -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = facts_of(board.rank, os.environ["MASTER_ADDR"], local_ranks)
    everyones = with_distinct_hosts(board.exchange("facts", mine))
    findings = findings_of(everyones, parameters)
    say = print if board.rank == 0 else _silent
    say(f"{counted(board.size, 'rank')} on {counted(len(hosts_of(everyones)), 'host')}\n")
    if board.rank == 0:
        _print_hosts(everyones)
    if not any(finding.is_fatal for finding in findings):
        links = links_of(board, everyones)
        findings += findings_of_links(links)
        if board.rank == 0 and links:
            _print_links(links)
    if not any(finding.is_fatal for finding in findings):
        findings += _try_attach(board, parameters, say)
    say("")
    for finding in sorted(findings, key=lambda finding: not finding.is_fatal):
        say(str(finding))
    errors = sum(finding.is_fatal for finding in findings)
    say(f"A job would fail: {counted(errors, 'error')}." if errors else "Nothing here would stop a job.")
    return 1 if errors else 0


def _silent(_text: str) -> None:
    pass


def _print_hosts(everyones: Sequence[Facts]) -> None:
    rows = []
    for ranks in hosts_of(everyones):
        first = ranks[0]
        numbers = [str(facts["rank"]) for facts in ranks]
        rows.append(
            [
                first["host"],
                numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}",
                first["address"] or "none",
                f"{first['interface'] or '?'} ({first['mtu'] or '?'})",
                f"{first['cores'] / len(ranks):.3g}",
                size_text(first["memory"]),
                str(first["descriptors"]),
                str(first["torch_gpus"]),
            ]
        )
    header = ["host", "ranks", "address", "interface (MTU)", "cores per rank", "memory left", "files", "GPUs"]
    print_table(header, rows)


def _print_links(links: Sequence[HostLink]) -> None:
    rows = [
        [f"{link.host} - {link.peer}", duration(link.latency), rate_text(link.sent), rate_text(link.received)]
        for link in links
        if link.sent > 0
    ]
    print()
    print_table(["link", "round trip", "there", "back"], rows)


def _try_attach(board: NoticeBoard, parameters: float, say: Callable[[str], None]) -> list[Finding]:
    """Make a process group and a communicator as a job would, and time both. Collective."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", board.store),
            rank=board.rank,
            world_size=board.size,
            timeout=timedelta(seconds=board.timeout),
        )
        with Communicator(timeout=board.timeout) as communicator:
            _say_choice(communicator, device, parameters, say)
        problem = ""
    except (RuntimeError, OSError, ValueError) as error:
        problem = f"rank {board.rank}: {str(error).splitlines()[0]}"
    problems = list(filter(None, board.exchange("collectives", problem)))
    if not problems:
        dist.destroy_process_group()
        return []
    remedy = "The links work by TCP, so look at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and at what the error says."
    return [Finding(True, f"collectives fail: {problems[0]}", remedy)]


def _say_choice(
    communicator: Communicator, device: torch.device, parameters: float, say: Callable[[str], None]
) -> None:
    """Say what attach would choose, and how long the gradients of the model take. Collective."""
    if communicator.size == 1:
        say("\nattach: one rank, so there is nothing to average")
        return
    num_bytes = _LESS if _seconds(communicator, device, _LESS, 1)[0] >= _SLOW else _BUCKET
    ours, torchs = _seconds(communicator, device, num_bytes, _REPEATS)
    factor = 4.0 * parameters / num_bytes
    say(f"\nattach: transport {communicator.transport!r}")
    say(
        f"averaging the gradients of {parameters / 1e6:,.4g} M float32 parameters takes {duration(factor * ours)} by "
        f"pycomm, {duration(factor * torchs)} by {dist.get_backend()} ({times(torchs / ours)}); backward() hides a part"
    )
    sample = torch.zeros(_SAMPLE, _SAMPLE, device=device)
    costs, link, _ = measured(Auto(), [sample], _BUCKET / sample.nbytes, communicator, device)
    best = cheapest(costs, link, None)
    ratio = costs["dense"].seconds(link) / costs[best].seconds(link)
    gain = "no method is clearly faster" if best == "dense" else f"{ratio:.2f} times as fast as dense gradients"
    say(f'compression="auto" would choose {best}: {gain}')


def _seconds(communicator: Communicator, device: torch.device, num_bytes: int, repeats: int) -> tuple[float, float]:
    """Return the slowest rank's medians for an all-reduce by pycomm and by torch, in turns. Collective."""
    ours = communicator.empty(num_bytes // 4, torch.float32, device).fill_(1.0)
    torchs = torch.ones(num_bytes // 4, device=device)
    taken: dict[str, list[float]] = {"ours": [], "torchs": []}
    jobs: dict[str, Callable[[], Any]] = {
        "ours": lambda: communicator.all_reduce(ours),
        "torchs": lambda: dist.all_reduce(torchs),
    }
    for _ in range(1 + repeats):  # the first connects
        for name, job in jobs.items():
            communicator.barrier()
            begin = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - begin)
    slowest = agreed(communicator, [statistics.median(each[1:]) for each in taken.values()])
    return slowest[0], slowest[1]

"""Workers and servers that die, come late or come back; and mistakes, which all ranks learn of."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.tools.launching.processes import _fork_server
from pycomm.training.asynchronous import server_checkpoint
from pycomm.training.asynchronous.worker import ServerLink
from tests.asynchronous.runs import Run, loss_of, model_of, optimizer_of, serve, weight_of, work
from tests.checkpoint.test_failures import file_size_limit
from tests.on_ranks import Pools
from tests.ranks import PRELOAD, free_port

TIMEOUT = 110.0


def lose_a_worker(run: Run, number: int, when: str) -> dict[str, Any]:
    """As ``work``, but worker ``number`` dies in its third step."""
    if dist.get_rank() != number:
        return work(run)
    model = model_of(run.dtype)
    server = serve(optimizer_of(run, model), model, **{"timeout": run.timeout, **run.options})
    for step in range(3):
        server.pull()
        if step == 2 and when == "reading":
            server._links[
                0
            ].ask_to_pull()  # it was given the parameters once more, and never says that it has read them
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, number, step).backward()
        if step == 2 and when == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        server.push()
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.parametrize("when", ["backward", "reading", "pushed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "sync"}, {"mode": pycomm.StaleSynchronous(1)}, {"compression": pycomm.TopK(0.2)}],
    ids=["async", "sync", "ssp", "compressed"],
)
def test_a_worker_that_dies_costs_its_gradient_only(new_ranks: Pools, options: dict[str, Any], when: str) -> None:
    outcomes = new_ranks(4).outcomes(lose_a_worker, Run(options), 2, when, timeout=TIMEOUT)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False, True], outcomes[1].trace
    stats = outcomes[0].result["stats"]
    assert 2 * 8 + 2 <= stats["pushes"] <= 2 * 8 + 3
    last = [torch.cat([p.reshape(-1) for p in outcomes[rank].result["parameters"]]) for rank in (0, 1, 3)]
    assert any(torch.equal(last[0], other) for other in last[1:]), "whoever ends last has the server's parameters"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("variable", ["MASTER_PORT", "RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 5000])
def test_a_wrong_number_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(variable, text)
    model = model_of()
    with pytest.raises(ValueError, match=f"{variable} is '{text[:80]}' in the environment, wanted a number"):
        pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.05), model, timeout=1.0)


def play(part: str, port: int, rank: int, folder: str | None, options: dict[str, Any], pipe: Connection) -> None:
    """Be a process of its own, without a process group: a server, or a worker that makes steps until told to end."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="3")
    if rank >= 0:
        os.environ["RANK"] = str(rank)
    server_checkpoint._EVERY = 0.2
    model = model_of()
    options = {"timeout": 60.0, **options}
    try:
        server = pycomm.parameter_server(
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model, checkpoint=folder, **options
        )
        pipe.send("here")
        step = 0
        while part == "worker" and not pipe.poll():
            with server.step():
                loss_of(model, rank, step).backward()
            step += 1
            pipe.send(step)
        server.close()
        pipe.send(("ended", server.stats()))
    except BaseException as error:
        pipe.send(("raised", type(error).__name__, str(error)))


class Player:
    def __init__(self, part: str, port: int, rank: int, folder: Path | None = None, **options: Any) -> None:
        context = _fork_server(PRELOAD)  # while a new process imported everything, workers would go on and on
        self.pipe, other = context.Pipe()
        where = None if folder is None else str(folder)
        self.process = context.Process(target=play, args=(part, port, rank, where, options, other), daemon=True)
        self.process.start()
        other.close()
        self.steps = 0
        self.end: Any = None

    def listen(self) -> None:
        try:
            while self.end is None and self.pipe.poll():
                said = self.pipe.recv()
                self.steps = said if isinstance(said, int) else self.steps
                self.end = said if isinstance(said, tuple) else None
        except EOFError:
            self.end = ("died",)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10.0)


Start = Callable[..., Player]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that have ended when the test has."""
    players: list[Player] = []

    def one(*arguments: Any, **options: Any) -> Player:
        players.append(Player(*arguments, **options))
        return players[-1]

    yield one
    for player in players:
        player.process.join(0.0 if player.end is None else 10.0)
        player.kill()
        player.process.close()
        player.pipe.close()


def until(what: str, is_so: Callable[[], bool], players: list[Player], patience: float = 100.0) -> None:
    deadline = time.monotonic() + patience
    while not is_so():
        for player in players:
            player.listen()
        assert time.monotonic() < deadline, f"{what}: {[(p.steps, p.end) for p in players]}"
        time.sleep(0.005)


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    store = dist.TCPStore("127.0.0.1", number, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield number
    del store


def stop(workers: list[Player]) -> None:
    for worker in workers:
        worker.pipe.send("end")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="async"),
        pytest.param(
            {"mode": "sync", "compression": pycomm.RandomK(0.2)}, id="sync, compressed", marks=pytest.mark.slow
        ),
    ],
)
def test_a_server_that_was_killed_goes_on_and_counts_what_is_lost(
    start: Start, port: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    server = start("server", port, 0, tmp_path, **options)
    workers = [start("worker", port, rank, tmp_path, **options) for rank in (1, 2)]
    everyone = [server, *workers]
    for kills in range(1, 4):
        until("steps", lambda kills=kills: min(w.steps for w in workers) >= 6 * kills, everyone)  # type: ignore[misc]
        server.kill()
        everyone[0] = server = start("server", port, 0, tmp_path, **options)
    until("more steps", lambda: min(w.steps for w in workers) >= 24, everyone)
    stop(workers)
    until("the end", lambda: all(p.end is not None for p in everyone), everyone)
    assert [p.end[0] for p in everyone] == ["ended"] * 3, [p.end for p in everyone]
    stats = server.end[1]
    assert stats["pushes"] + stats["lost"] == sum(worker.end[1]["steps"] for worker in workers)
    assert min(stats["pushes"], stats["lost"]) > 0


def test_a_process_that_comes_later_works_too_and_one_takes_the_place_of_another(start: Start, port: int) -> None:
    server = start("server", port, 0)
    workers = [start("worker", port, rank) for rank in (1, 2)]
    until("steps", lambda: min(w.steps for w in workers) >= 3, [server, *workers])
    workers[0].kill()
    workers += [start("worker", port, -1), start("worker", port, 1)]
    until("their steps", lambda: min(w.steps for w in workers[1:]) >= 3, [server, *workers[1:]])
    stop(workers[1:])
    until("the end", lambda: all(p.end is not None for p in [server, *workers[1:]]), [server, *workers[1:]])
    assert [p.end[0] for p in [server, *workers[1:]]] == ["ended"] * 4, [p.end for p in workers]


@pytest.mark.parametrize("has_checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_dies_for_good(start: Start, port: int, tmp_path: Path, has_checkpoint: bool) -> None:
    folder = tmp_path if has_checkpoint else None
    server = start("server", port, 0, folder, timeout=12.0)
    workers = [start("worker", port, rank, folder, timeout=12.0) for rank in (1, 2)]
    until("steps", lambda: min(w.steps for w in workers) >= 3, [server, *workers])
    server.kill()
    until("the end", lambda: all(w.end is not None for w in workers), workers)
    for worker in workers:
        assert worker.end[:2] == ("raised", "CommError")
        assert "server 0" in worker.end[2]
        assert (f"its last checkpoint is in {tmp_path}" if has_checkpoint else "no checkpoint") in worker.end[2]


def work_with_a_bad_link(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Lose the connection after every other push was sent, so that nobody knows whether it has arrived."""
    original, broken = ServerLink._send, set[int]()

    def send(self: ServerLink, message: dict[str, Any]) -> None:
        original(self, message)
        number = message.get("number", 0)
        if message["ask"] == "push" and number % 2 and number not in broken:
            broken.add(number)
            time.sleep(0.05)
            self._require().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerLink, "_send", send)
        return work(Run({"checkpoint": folder, **options}))


@pytest.mark.parametrize("options", [{}, {"compression": pycomm.TopK(0.2)}], ids=["as they are", "compressed"])
def test_a_push_that_comes_twice_counts_once(new_ranks: Pools, tmp_path: Path, options: dict[str, Any]) -> None:
    told = new_ranks(3).run(work_with_a_bad_link, str(tmp_path), options, timeout=TIMEOUT)
    stats = told[0]["stats"]
    assert stats["pushes"] == 2 * 8
    assert stats["duplicates"] > 0


# Mistakes.


def serve_with(folder: str, options: dict[str, Any], again: dict[str, Any]) -> str:
    """Train twice with a checkpoint in the same folder; what the second one says."""
    work(Run({"checkpoint": folder, **options}))
    try:
        work(Run({"checkpoint": folder, **again}, timeout=3.0))
    except (ValueError, pycomm.CommError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("options", "again", "said"),
    [
        ({}, {"mode": "sync"}, "mode=Async()"),
        ({}, {"compression": pycomm.TopK(0.2)}, "compression=None"),
        ({"compression": pycomm.TopK(0.2)}, {"compression": pycomm.TopK(0.3)}, "compression=TopK(ratio=0.2"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    new_ranks: Pools, tmp_path: Path, options: dict[str, Any], again: dict[str, Any], said: str
) -> None:
    server, worker = new_ranks(2).run(serve_with, str(tmp_path), options, again, timeout=TIMEOUT)
    path = tmp_path / "server-0" / "checkpoint-2.pt"
    assert server.startswith(f"ValueError: {path}: the checkpoint is of a server with")
    assert said in server
    assert worker == server.replace(str(path), f"rank 0: {path}")


def refused(options: dict[str, Any]) -> str:
    """Return what is said of the files that a server has, and how long that took."""
    begun = time.monotonic()
    try:
        make(options)
    except ValueError as error:
        return f"{error} after {time.monotonic() - begun:.0f} s"
    return "nothing"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["trace", "checkpoint"])
def test_files_that_cannot_be_opened_are_told_to_all(new_ranks: Pools, tmp_path: Path, name: str) -> None:
    """At once: nobody waits for a server that will never serve."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "inside"
    server, worker = new_ranks(2).run(refused, {name: str(path)}, timeout=TIMEOUT)
    for told in (server, worker):
        assert re.search(rf"Not a directory: '{path}.*' after [0-5] s", told)
    assert worker.startswith("rank 0: ")


def serve_schedule(folder: str, with_schedule: bool) -> str:
    """Serve with a schedule or without; return what is said, and how long that took."""
    begun = time.monotonic()
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with pycomm.parameter_server(optimizer, model, checkpoint=folder, timeout=60) as server:
            if with_schedule and not server.is_worker:
                server.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    except (ValueError, pycomm.CommError) as error:
        return f"{error} after {time.monotonic() - begun:.0f} s"
    return "nothing"


@pytest.mark.timeout(100)
def test_a_server_that_cannot_begin_tells_its_workers(new_ranks: Pools, tmp_path: Path) -> None:
    """Which schedules it has is known only when it serves."""
    assert new_ranks(2).run(serve_schedule, str(tmp_path), True, timeout=TIMEOUT) == ["nothing", "nothing"]
    server, worker = new_ranks(2).run(serve_schedule, str(tmp_path), False, timeout=TIMEOUT)
    for told in (server, worker):
        assert re.search(r"checkpoint-2.pt: the checkpoint has 1 schedules, this server 0 after [0-9] s", told)
    assert "server 0 could not begin" in worker


def serve_on_a_full_disk(folder: str) -> str:
    """Make steps until the server's checkpoint exceeds a limit; return what is said, and how long that took."""
    begun = time.monotonic()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)  # the first checkpoint has no momentum
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            pycomm.parameter_server(optimizer, model, checkpoint=folder, timeout=60) as server,
            file_size_limit(70_000),
        ):
            patch.setattr(server_checkpoint, "_EVERY", 0.1)
            if not server.is_worker:
                server.close()
            while server.is_worker:
                with server.step():
                    model(torch.randn(1, 100)).square().sum().backward()
    except (OSError, pycomm.CommError) as error:
        return f"{error} after {time.monotonic() - begun:.0f} s"
    return "nothing"


@pytest.mark.timeout(100)
def test_a_server_that_cannot_write_its_checkpoint_tells_its_workers(new_ranks: Pools, tmp_path: Path) -> None:
    server, worker = new_ranks(2).run(serve_on_a_full_disk, str(tmp_path), timeout=TIMEOUT)
    for told in (server, worker):
        assert re.search(rf"File too large: '{tmp_path}/server-0/unfinished'.* after [0-9] s", told)
    assert "server 0 cannot go on" in worker


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["trace.0", "server-0/checkpoint-1.pt"])
def test_files_that_block_are_told_to_all(new_ranks: Pools, tmp_path: Path, name: str) -> None:
    (tmp_path / "server-0").mkdir()
    os.mkfifo(tmp_path / name)
    argument = {"checkpoint": str(tmp_path)} if "/" in name else {name[:-2]: str(tmp_path / name[:-2])}
    for told in new_ranks(2).run(refused, argument, timeout=TIMEOUT):
        assert re.search(rf"{tmp_path / name}\b.* after [0-5] s", told)


def make(options: dict[str, Any]) -> None:
    model: Any = model_of(options.pop("dtype", torch.float32))
    if options.pop("other_values", False) and dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    if options.pop("other_model", False) and dist.get_rank() == 1:
        model = nn.Linear(3, 3)
    if options.pop("half_of_it", False):
        model[0].half()
    if "compressions" in options:
        options["compression"] = options.pop("compressions")[dist.get_rank()]
    kind = options.pop("optimizer", torch.optim.SGD)
    momentum = {"momentum": options.pop("momentum")} if "momentum" in options else {}
    serve(kind(model.parameters(), 0.1, **momentum), model, timeout=60, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"servers": 3}, "servers=3 of 3 ranks leaves none to work"),
        ({"servers": 0}, "servers"),
        ({"mode": "bulk"}, "mode is 'bulk'"),
        ({"mode": "ssp"}, 'mode is \'ssp\', wanted "async", "sync", a pycomm.Async, StaleSynchronous or Sync'),
        ({"mode": pycomm.Sync(backup=2)}, "backup=2 requires more workers"),
        ({"compression": "topk"}, "compression is 'topk'"),
        ({"optimizer": torch.optim.LBFGS}, "requires a closure"),
        ({"dtype": torch.complex64}, "parameters are torch.complex64 on cpu"),
        ({"compression": "auto"}, "name a method"),
        ({"compression": pycomm.DGC(0.1, 0.9), "momentum": 0.9}, "would apply momentum twice"),
        ({"half_of_it": True}, "parameters are torch.float16 on cpu, torch.float32 on cpu"),
        ({"compressions": [pycomm.TopK(0.1), pycomm.TopK(0.2), pycomm.TopK(0.1)]}, "compression=TopK(ratio=0.2"),
        ({"other_values": True}, "the ranks disagree: 'values"),
        ({"other_model": True}, "the ranks disagree"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(3).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert problem in str(outcome.error)


def serve_twice() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pycomm.parameter_server(optimizer, model, timeout=60).close()
    pycomm.parameter_server(optimizer, model, timeout=60)


def test_an_optimizer_that_has_served_before_is_refused_on_all_ranks(rank_pools: Pools) -> None:
    """Were it found after the agreement only, workers would wait for the server and get a CommError."""
    for outcome in rank_pools(3).outcomes(serve_twice, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert "the step of this SGD has already been replaced" in str(outcome.error)


def push_before_pull() -> str:
    model = model_of()
    server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=60)
    said = ""
    if server.is_worker:
        with pytest.raises(ValueError, match="push.. before pull") as caught:
            server.push()
        said = str(caught.value)
        server.pull()
        loss_of(model, 0, 0).backward()
        with pytest.raises(ValueError, match="samples"):
            server.push(0.0)
        server.push(weight_of(0, 0))
    else:
        with pytest.raises(RuntimeError, match="which serves"):
            server.pull()
    server.close()
    server.close()
    return said


def test_a_push_before_a_pull_is_an_error_on_that_rank_alone(rank_pools: Pools) -> None:
    assert len(set(rank_pools(3).run(push_before_pull, timeout=TIMEOUT))) == 2

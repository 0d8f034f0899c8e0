"""Rank of ``test_namespaces.py``: ``python -m tests.transport.namespace_ranks CASE`` prints what it found, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import pycomm

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def told(call: Callable[[], object]) -> dict[str, Any]:
    """Return the error that ``call`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        call()
    except (pycomm.CommError, ValueError, OSError) as error:
        found = {"kind": type(error).__name__, "text": str(error), "peer": getattr(error, "peer", None)}
        return {**found, "seconds": time.monotonic() - begun}
    return {"kind": "", "text": "", "peer": None, "seconds": time.monotonic() - begun}


def again_and_again(communicator: pycomm.Communicator, num_elements: int) -> None:
    x = torch.ones(num_elements)
    while True:
        communicator.all_reduce(x, "max")


def vanishes() -> dict[str, Any]:
    """Cut off the last rank's host while all work."""
    communicator = pycomm.Communicator(timeout=40)
    communicator.barrier()
    if RANK == SIZE - 1:
        time.sleep(0.5)
        subprocess.run(["ip", "link", "set", "dev", "eth0", "down"], check=True)
        time.sleep(6)
        os._exit(0)  # it cannot say goodbye
    return told(lambda: again_and_again(communicator, 300_000))


def dies() -> dict[str, Any]:
    """Kill rank 1 while all work."""
    communicator = pycomm.Communicator(timeout=40)
    communicator.barrier()
    if RANK == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {os.getpid()}"], start_new_session=True)
    return told(lambda: again_and_again(communicator, 300_000))


def is_late() -> dict[str, Any]:
    """Let the others wait for rank 1, which sleeps, and then is stopped, with 100 MB under way."""
    communicator = pycomm.Communicator(timeout=40)
    communicator.barrier()
    x = torch.ones(26_214_400)

    def work() -> None:
        for _ in range(2):
            if RANK == 1:
                time.sleep(4)
            communicator.all_reduce(x, "max")
            if RANK == 1:
                pid = os.getpid()
                command = f"sleep 0.02; kill -STOP {pid}; sleep 4; kill -CONT {pid}"
                subprocess.Popen(["sh", "-c", command], start_new_session=True)
            communicator.all_reduce(x, "max")

    found = told(work)
    communicator.close()
    return found


def relay(port: int, to: tuple[str, int]) -> None:
    """Hand on, for ever, what comes to ``port``, as a translator of addresses does."""

    def hand_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("", port)) as server:
        while True:
            one = server.accept()[0]
            other = socket.create_connection(to)
            for pair in ((one, other), (other, one)):
                threading.Thread(target=hand_on, args=pair, daemon=True).start()


def meets() -> dict[str, Any]:
    """Meet, and reduce once; with this rank's own environment."""
    own = json.loads(os.environ.get("PYCOMM_TEST_OWN", "{}"))
    os.environ.update(own.get(str(RANK), {}))
    for command in json.loads(os.environ.get("PYCOMM_TEST_SHELL", "[]")):
        subprocess.run(shlex.split(command), check=True)
    if "PYCOMM_TEST_RELAY" in os.environ:
        port, host, target = os.environ["PYCOMM_TEST_RELAY"].split()
        threading.Thread(target=relay, args=(int(port), (host, int(target))), daemon=True).start()
    docker = ["ip", "link", "add", "docker0", "type", "bridge"]
    if os.environ.get("PYCOMM_TEST_DOCKER"):
        subprocess.run(docker, check=True)
        subprocess.run(["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"], check=True)
        subprocess.run(["ip", "link", "set", "docker0", "up"], check=True)

    def meet() -> None:
        with pycomm.Communicator(timeout=float(os.environ.get("PYCOMM_TEST_TIMEOUT", "20"))) as communicator:
            assert communicator.transport == "tcp"
            x = torch.full((int(os.environ.get("PYCOMM_TEST_COUNT", "1000")),), float(RANK))
            communicator.all_reduce(x)
            assert bool((x == sum(range(SIZE))).all())

    return told(meet)


def main() -> None:
    if sys.argv[1] == "dies" and RANK == 1 and "PYCOMM_TEST_CHILD" not in os.environ:
        # The one that is killed is a child, so that this process can end well.
        command = [sys.executable, "-m", "tests.transport.namespace_ranks", "dies"]
        ended = subprocess.run(command, env={**os.environ, "PYCOMM_TEST_CHILD": "1"}, check=False)
        assert ended.returncode == -signal.SIGKILL
        return
    dist.init_process_group("gloo")
    found = {"vanishes": vanishes, "dies": dies, "is_late": is_late, "meets": meets}[sys.argv[1]]()
    print(json.dumps(found), flush=True)
    if RANK == 0:
        time.sleep(3)  # it serves the store, in which the others read why
    os._exit(0)  # the default group's Gloo would wait for ranks that are gone


if __name__ == "__main__":
    main()

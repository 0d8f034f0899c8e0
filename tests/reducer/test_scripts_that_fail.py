"""A mistake on one rank that ends its script: the others get its text in their next reduction, and do not wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

SCRIPT = """
import sys
import torch, torch.distributed as dist
import pycomm
from pycomm.collectives import communicator

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if sys.argv[1] == "tcp":
    choose = communicator.choose_transport
    communicator.choose_transport = lambda place, _, *rest: choose(place, "tcp", *rest)
reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=60))
model(torch.ones(4)).sum().backward()
optimizer.step()
dist.barrier()
if dist.get_rank() == 1:
    MISTAKE
try:
    model(torch.ones(4)).sum().backward()
except pycomm.CommError as error:
    print(error)
"""
MISTAKES = {
    "reducer.set_weight('x')": "TypeError: num_samples is 'x', wanted a number",
    "reducer.load_state_dict({'a': 1})": "ValueError: state is neither a Reducer.state_dict() nor a list of them",
    "1 / 0": "ZeroDivisionError: division by zero",
    "raise ValueError('\\ud800' + 'x' * 9999)": "ValueError: ?xxxxx",
}


@pytest.mark.parametrize(
    ("transport", "mistake"), [("torch", "1 / 0"), *(("shared_memory", mistake) for mistake in MISTAKES)]
)
def test_the_others_get_its_text(transport: str, mistake: str, tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT.replace("MISTAKE", mistake), transport]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (told, _), (_, raised) = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert MISTAKES[mistake].replace("?", "") in raised.replace("\\ud800", ""), raised
    assert f"after step 1: {MISTAKES[mistake]}" in told
    assert "rank 1" in told
    assert "timed out" not in told

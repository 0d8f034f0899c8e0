"""``pycomm.launch`` from prompts, scripts and terminals: processes of their own, which leave none behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import left_behind, ranks_of_session

pytestmark = pytest.mark.timeout(120)

INTERACTIVE = """
import pycomm, torch, torch.distributed as dist
scale = 10
class Answer:
    def __init__(self, value):
        self.value = value

def double(x):
    total = torch.tensor([float(x * (dist.get_rank() + 1))])
    dist.all_reduce(total)
    return Answer(2 * scale * total.item())

answers = pycomm.launch(double, 2, (1,))
print("answers", [isinstance(answer, Answer) and answer.value for answer in answers])
def fails(get):
    raise LookupError(f"scale is {get()}")

try:
    pycomm.launch(fails, 1, (lambda: scale,))
except pycomm.RankError as error:
    print("error", repr(error.__cause__), str(error).splitlines()[-1])

"""

WITHOUT_CLOUDPICKLE = """
import sys
sys.modules["cloudpickle"] = None
import pycomm
def here():
    return 1

pycomm.launch(here, 1)
"""

UNGUARDED = """
import pycomm

def here():
    return 1

try:
    print("result", pycomm.launch(here, 2))
except pycomm.RankError as error:
    print(f"said: {error}")
"""

GUARDED = """
import sys
from collections import namedtuple

import pycomm
import torch.distributed as dist

Point = namedtuple("Point", ["x", "y"])


def place(point):
    assert __name__ == "__mp_main__"
    return Point(point.x + dist.get_rank(), point.y)


if __name__ == "__main__":
    sys.modules["cloudpickle"] = None
    print(pycomm.launch(place, 2, (Point(1, 2),)))
"""

ENDLESS = """
import signal
import time

import pycomm


def waits(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("here")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    try:
        pycomm.launch(waits, 2, (STUBBORN,))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


WHAT_IS_LEFT = """
    except KeyboardInterrupt:
        left = multiprocessing.active_children()
        print("left", len(left))
        for process in left:
            process.kill()
"""

# In notebooks there are always other threads, which the kernel gives Ctrl-C to where the main thread has it blocked.
IMPATIENT = """
import multiprocessing
import os
import signal
import threading
import time

import pycomm


def interrupts_once_more():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
    print("here")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    try:
        pycomm.launch(interrupts_once_more, 2)
"""

INTERRUPTED_AT_THE_START = """
import multiprocessing
import os
import signal
import threading
from multiprocessing.context import SpawnProcess

import pycomm

start = SpawnProcess.start


def start_and_interrupt(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    if THREADS:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    SpawnProcess.start = start_and_interrupt
    try:
        pycomm.launch(signal.pause, 2)
"""


IMPORTS = """
import signal

import pycomm

BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # while the script is imported


def blocked():
    return signal.SIGINT in BLOCKED, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


if __name__ == "__main__":
    print(pycomm.launch(blocked, 2))
"""


@pytest.fixture
def sessions() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in sessions of their own, of which nothing must be left."""
    started: list[subprocess.Popen[str]] = []
    yield started
    left = [pid for process in started for pid in left_behind(process.pid, 10.0 if process.poll() is not None else 0)]
    for process in started:
        process.communicate()
    assert not left


def start(sessions: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, *words]
    # Elsewhere than in the source tree, which a prompt would take for the package.
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd="/"
    )
    sessions.append(process)
    return process


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("words", [["-i", "-q"], pytest.param(["-"], marks=pytest.mark.slow)])
def test_what_was_typed_runs_on_ranks(words: list[str], sessions: list[subprocess.Popen[str]]) -> None:
    pytest.importorskip("cloudpickle")
    out, errors = start(sessions, *words).communicate(INTERACTIVE, timeout=90)
    assert "answers [60.0, 60.0]\n" in out, errors
    assert "error LookupError('scale is 10') LookupError: scale is 10\n" in out
    assert "Traceback" not in errors


def test_says_what_to_install_where_something_was_typed(sessions: list[subprocess.Popen[str]]) -> None:
    process = start(sessions, "-c", WITHOUT_CLOUDPICKLE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        errors.splitlines()[-1].endswith(
            "TypeError: function, with args and kwargs, cannot be sent to another process: 'here' is defined in an "
            "interactive session; to send it as code, install cloudpickle (pip install 'pycomm-torch[notebook]')"
        )
        or "SerializationError: function, with args and kwargs, cannot be sent" in errors
    )


def test_a_script_needs_no_cloudpickle(tmp_path: Path, sessions: list[subprocess.Popen[str]]) -> None:
    out, errors = start(sessions, script(tmp_path, GUARDED)).communicate(timeout=60)
    assert out == "[Point(x=1, y=2), Point(x=2, y=2)]\n", errors


def test_a_script_that_starts_itself_over_and_over(tmp_path: Path, sessions: list[subprocess.Popen[str]]) -> None:
    out, errors = start(sessions, script(tmp_path, UNGUARDED)).communicate(timeout=100)
    # Whichever rank ends first.
    assert re.match(r"said: rank \d did not start: the script calls pycomm.launch where it is imported", out), errors
    assert '\n    if __name__ == "__main__":\n' in out
    assert not errors


@pytest.mark.parametrize(
    ("number", "stubborn", "everybody"),
    [
        pytest.param(signal.SIGINT, False, True, marks=pytest.mark.slow),
        (signal.SIGINT, True, False),
        (signal.SIGKILL, True, False),
    ],
)
def test_nothing_is_left(
    number: signal.Signals, stubborn: bool, everybody: bool, tmp_path: Path, sessions: list[subprocess.Popen[str]]
) -> None:
    """Ctrl-C reaches all at a terminal, and the one process in a notebook."""
    process = start(sessions, script(tmp_path, ENDLESS.replace("STUBBORN", str(stubborn))))
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] here\n", "[rank 1] here\n"}
    assert len(ranks_of_session(process.pid)) == 2
    (os.killpg if everybody else os.kill)(process.pid, number)
    begin = time.monotonic()
    process.wait(60)
    assert time.monotonic() - begin < 30
    assert process.returncode == -number
    out, errors = process.communicate()
    if number == signal.SIGINT:
        assert out == "interrupted\n"
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert errors.count("Traceback") == 1


@pytest.mark.slow
def test_a_second_interrupt_leaves_no_rank(tmp_path: Path, sessions: list[subprocess.Popen[str]]) -> None:
    """The ranks send it when they are asked to end, and do not."""
    process = start(sessions, script(tmp_path, IMPATIENT + WHAT_IS_LEFT))
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] here\n", "[rank 1] here\n"}
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert out == "left 0\n", errors


@pytest.mark.parametrize("threads", [False, True])
def test_an_interrupt_at_the_start_leaves_no_rank(
    threads: bool, tmp_path: Path, sessions: list[subprocess.Popen[str]]
) -> None:
    text = INTERRUPTED_AT_THE_START.replace("THREADS", str(threads)) + WHAT_IS_LEFT
    out, errors = start(sessions, script(tmp_path, text)).communicate(timeout=60)
    assert out == "left 0\n", errors


def test_ranks_cannot_be_interrupted_while_they_import(tmp_path: Path, sessions: list[subprocess.Popen[str]]) -> None:
    """They would print tracebacks. Also not the first ranks that a process starts."""
    out, errors = start(sessions, script(tmp_path, IMPORTS)).communicate(timeout=60)
    assert out == "[(True, False), (True, False)]\n", errors

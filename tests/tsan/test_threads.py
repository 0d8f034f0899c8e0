"""The shared-memory transport and the executor under ThreadSanitizer; and that it would find what it is there for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tsan import build

pytestmark = pytest.mark.skipif(build.why_not() != "", reason=build.why_not())

SIZES = (2, 3, 4, 8)
# One of each kind: a return that comes too early, a buffer that is used twice, a missing order, a missing lock.
BUGS_IN_CI = {
    "all_reduce returns before the others have read",
    "one staging segment instead of two",
    "messages that are offered without releasing",
    "two threads that copy one message",
}


@dataclass
class Driver:
    directory: Path
    objects: dict[str, Path]
    executable: Path
    programs: Path


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    directory = tmp_path_factory.mktemp("tsan")
    objects = build.compile_groups(build.GROUPS, directory)
    executable = build.link(list(objects.values()), directory / "driver")
    build.write_programs(directory / "programs", SIZES)
    return Driver(directory, objects, executable, directory / "programs")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [pytest.param(n, marks=() if n in (2, 4) else pytest.mark.slow) for n in SIZES])
def test_no_race(driver: Driver, size: int) -> None:
    """All collectives and schedules, two groups at once, closing, giving up, clocks that wrap around."""
    ended = build.run(driver.executable, driver.programs, size, rounds=3, seed=size, timeout=500)
    assert ended.returncode == 0, ended.stderr[:6000]


@dataclass(frozen=True)
class Bug:
    """``right``, of which there is one in ``source``, becomes ``wrong``; ``sizes``: where to look for it."""

    source: str
    right: str
    wrong: str
    sizes: tuple[int, ...] = (2, 3, 4)


INCOMING, OUTGOING, MESSAGES = (
    f"csrc/transport/shared_memory/{name}.cpp" for name in ("incoming", "outgoing", "messages")
)
COLLECTIVES, PARTS, CALL, WAIT, RUN = (
    "csrc/transport/shared_memory/collectives.cpp",
    "csrc/transport/shared_memory/parts.h",
    "csrc/transport/shared_memory/call.h",
    "csrc/transport/shared_memory/wait.h",
    "csrc/transport/shared_memory/run.cpp",
)
BUGS = {
    "all_reduce returns before the others have read": Bug(
        COLLECTIVES,
        "[&](int p) { return call.in_arena(p) + offset; });\n    call.step();",
        "[&](int p) { return call.in_arena(p) + offset; });",
    ),
    "all_gather returns before the others have read": Bug(
        COLLECTIVES,
        "pull([&](int p) { return call.in_arena(p); }, 0, x.num_bytes());\n        return call.step();",
        "pull([&](int p) { return call.in_arena(p); }, 0, x.num_bytes());\n        return;",
    ),
    "all_gather returns before others have read what was not staged": Bug(
        COLLECTIVES,
        "pull(address, begin, segments[i].size());\n        });\n    if (call.any_in_arena()) call.step();",
        "pull(address, begin, segments[i].size());\n        });",
    ),
    "broadcast returns before the others have read": Bug(
        COLLECTIVES,
        "call.in_arena(root), x.num_bytes());\n        return call.step();",
        "call.in_arena(root), x.num_bytes());\n        return;",
    ),
    "all_to_all_v returns before the others have read": Bug(
        PARTS, "if (any_in_arena_) call_.step();  // the others have read", "", (2, 3)
    ),
    "one staging segment instead of two": Bug(CALL, "segment % 2 * kMostSegmentBytes", "0 * kMostSegmentBytes"),
    "one mailbox instead of two": Bug(CALL, "kControlBytes + slot_ * kMailboxBytes", "kControlBytes"),
    "one announcement instead of two": Bug(
        "csrc/transport/shared_memory/call.cpp", "slot_ = group.num_calls_ & 1;", "slot_ = 0;"
    ),
    "a clock that is read without acquiring": Bug(
        WAIT, "value.load(std::memory_order_acquire) - target", "value.load(std::memory_order_relaxed) - target"
    ),
    "messages that are offered without releasing": Bug(
        RUN,
        "posted.store(posted.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);",
        "posted.store(posted.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);",
    ),
    "messages that are taken without releasing": Bug(
        RUN,
        "taken.store(taken.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);",
        "taken.store(taken.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);",
    ),
    "receiving in place before what lies there was taken": Bug(
        RUN, "if (in_arena_ && retired_ < message->after_taken) return false;", "", (3,)
    ),
    "sending from the shadow before it was written": Bug(
        RUN, "if (copies(&message) && message.fresh) {", "if (copies(&message) && message.fresh && false) {"
    ),
    "an envelope that is linked without releasing": Bug(
        OUTGOING, "arena_->data(), std::memory_order_seq_cst);", "arena_->data(), std::memory_order_relaxed);"
    ),
    "an envelope that is found without acquiring": Bug(
        INCOMING, "->next).load(std::memory_order_acquire)", "->next).load(std::memory_order_relaxed)"
    ),
    "a piece of a message that is said to be there without releasing": Bug(
        MESSAGES,
        "ready.store(at + piece, std::memory_order_seq_cst)",
        "ready.store(at + piece, std::memory_order_relaxed)",
    ),
    "a piece of a message that is said to be there before it is": Bug(
        MESSAGES, "ready.store(at + piece", "ready.store(bytes"
    ),
    "a message that is taken without releasing": Bug(
        INCOMING,
        "fetch_or(Envelope::kTaken, std::memory_order_seq_cst)",
        "fetch_or(Envelope::kTaken, std::memory_order_relaxed)",
    ),
    "a message that is freed before the next one was found": Bug(
        OUTGOING, "(fate & Envelope::kPassed) == 0 || letter.envelope == queue.last", "false"
    ),
    "two threads that copy one message": Bug(INCOMING, "receipt.busy = true;", ""),
    "a receive that is withdrawn while it is copied": Bug(INCOMING, "while (receipt->busy) {", "while (false) {"),
    "writing the shadow before it was taken": Bug(
        RUN, "return !copies(message) || !message->fresh || retired_ >= message->after_taken;", "return true;"
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_a_change_of_one_place(name: str) -> None:
    text = (build.ROOT / BUGS[name].source).read_text()
    assert text.count(BUGS[name].right) == 1, "the source has changed: so must the bug"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BUGS_IN_CI else pytest.mark.slow) for name in BUGS]
)
def test_it_finds(driver: Driver, tmp_path: Path, name: str) -> None:
    """A bug of this kind. (Results are compared too, and a wrong one counts as found.)"""
    bug = BUGS[name]
    text = (build.ROOT / bug.source).read_text()
    objects = dict(driver.objects)
    objects |= build.with_bug(bug.source, text.replace(bug.right, bug.wrong), tmp_path)
    executable = build.link(list(objects.values()), tmp_path / "driver")
    for attempt in range(12):
        for size in bug.sizes:
            ended = build.run(executable, driver.programs, size, rounds=3, seed=attempt, timeout=300)
            if ended.returncode != 0:
                return
    raise AssertionError("nothing was found")

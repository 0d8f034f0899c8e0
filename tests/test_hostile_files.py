"""Damaged files: for each, a reader of pycomm promptly gives a result, or an error that names the file.

Each reader gets valid files with random damage; failures name the seed. `nox -s slow` has many more.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import resource
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.schedule import NETWORKS, load
from pycomm.tools.cli.main import build_parser
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint
from pycomm.training.checkpoint.files import Reserve, read_report, write_json, write_sealed
from pycomm.training.checkpoint.torch_files import load_values
from tests.asynchronous.cores import begun, core_of
from tests.checkpoint.training import Training, training
from tests.cli.test_explain import DUMP
from tests.hostile import damage, damaged_bytes, other_json, remove, with_other_value

FEW, MANY = 200, 10_000
LONGEST = 20.0  # seconds for one file, on a busy machine
MOST_MEMORY = 512 << 20  # bytes
RUNS_SOMETHING = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class", "ctypes.dlopen"}
"""Audit events of running programs, loading libraries, and looking up objects by name."""

_seen: list[str] | None = None
sys.addaudithook(lambda event, _: None if _seen is None or event not in RUNS_SOMETHING else _seen.append(event))

Remake = Callable[[random.Random], bytes]


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Fail if the block runs anything that a file may have named."""
    global _seen
    _seen = []
    try:
        yield
        assert not _seen
    finally:
        _seen = None


@dataclass
class Reader:
    """Reader of files.

    Attributes:
        read: reads the files in the folder, and returns a result.
        folder: where the files are; errors name it, or a file in it.
        targets: files to damage; for each a function that makes other well-formed content, or ``None``.
    """

    read: Callable[[], Any]
    folder: Path
    targets: dict[Path, Remake | None] = field(default_factory=dict)

    def fuzz(self, name: str, count: int) -> Counter[str]:
        """Read ``count`` damaged files; return how often each outcome occurred."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        whole = {path: path.read_bytes() for path in files}
        self.read()
        outcomes: Counter[str] = Counter()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            chance = random.Random(f"{name} {number}")
            for path, content in whole.items():
                if path.is_symlink() or not path.is_file() or path.stat().st_size != len(content):
                    remove(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            for extra in set(self.folder.rglob("*")) - whole.keys():
                if extra.is_symlink() or not extra.is_dir():
                    remove(extra)
            target = chance.choice(sorted(self.targets))
            damage(target, chance, self.targets[target])
            start = time.monotonic()
            try:
                outcomes[self._outcome()] += 1
            except BaseException as error:
                raise AssertionError(f"seed {name} {number}, {target.name}: {error!r}") from error
            assert time.monotonic() - start < LONGEST, f"seed {name} {number}"
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_MEMORY
        assert outcomes["error"] or outcomes["left aside"]
        print(name, dict(outcomes))
        return outcomes

    def _outcome(self) -> str:
        result, error = "", ""
        with nothing_runs():
            try:
                result = self.read()
            except (ValueError, OSError) as raised:
                error = str(raised)
        assert not error or str(self.folder) in error, f"no file is named: {error}"
        return "error" if error else result if result in ("error", "left aside") else "result"


def json_reader(path: Path, content: str, read: Callable[[Path], Any]) -> Reader:
    path.write_text(content)
    return Reader(lambda: read(path), path.parent, {path: other_json(content.encode())})


parser = functools.cache(build_parser)  # which takes longer than most files


def run_command(path: Path, *arguments: str) -> str:
    """Run a command of pycomm on ``path``; check that it prints no control characters and that errors name the file."""
    out, err = io.StringIO(), io.StringIO()
    parsed = parser().parse_args(arguments)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = parsed.run(parsed)
    printed = out.getvalue() + err.getvalue()
    assert printed.replace("\n", "").isprintable(), f"{printed!r}"
    if code == 0:
        return "left aside" if err.getvalue() else "result"
    assert code == 2
    assert str(path) in err.getvalue()
    return "error"


def explain(folder: Path) -> Reader:
    path = folder / "rank0-h-1.json"
    return json_reader(path, json.dumps(DUMP), lambda p: run_command(p, "explain", str(p)))


def explain_folder(folder: Path) -> Reader:
    made = explain(folder)
    (folder / "rank1-h-2.json").write_text(json.dumps(DUMP))
    return Reader(lambda: run_command(folder, "explain", str(folder)), folder, made.targets)


def network(folder: Path) -> Reader:
    link = {"alpha": 1e-6, "beta": 1e-9, "gamma": 0}
    measured = {"ring": [[8, 1e-5], [1e6, 1e-3]], "native": [[8, 1e-5], [1e6, 2e-3]]}
    content = {**json.loads(NETWORKS["ethernet-10g"].to_json()), "within_host": link, "measured_ranks": 4}
    return json_reader(folder / "network.json", json.dumps({**content, "measured": measured}), load)


def calibration(folder: Path) -> Reader:
    made = network(folder)
    arguments = ("plan", "ranks", "--ranks", "4", "--network", str(folder / "network.json"))
    return Reader(lambda: run_command(folder, *arguments), folder, made.targets)


def step_trace(folder: Path) -> Reader:
    timeline = pytest.importorskip("pycomm.tools.cli.trace.timeline")
    span = {"lane": "training", "name": "backward", "began": 1.0, "ended": 1.5}
    content = {"rank": 0, "size": 1, "step": 7, "optimizer": 1, "spans": [span, {**span, "lane": "wire"}]}

    def read(path: Path) -> None:
        traces = timeline.read_traces([path])
        timeline.save_json(traces, folder / "out")
        assert "\n".join(timeline.summary(traces)).isprintable()

    return json_reader(folder / "rank0.json", json.dumps(content), read)


def told(folder: Path) -> Reader:
    path = folder / "failed"
    Reserve(folder / "writing").report("OSError", "no room", "failed")

    def read() -> str:
        found = read_report(path)
        assert found is None or all(isinstance(text, str) for text in found)
        return "result" if found == ("OSError", "no room") else "left aside"

    return Reader(read, folder, {path: other_json(path.read_bytes())})


def other_values(content: bytes) -> Remake:
    """Return a function that makes other files of torch.save, with other values or with a damaged pickle in them."""
    value: Any = torch.load(io.BytesIO(content), weights_only=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (program,) = (name for name in parts if name.endswith("/data.pkl"))

    def make(chance: random.Random) -> bytes:
        made = io.BytesIO()
        if chance.random() < 0.5:
            torch.save(with_other_value(value, chance), made)
            return made.getvalue()
        with zipfile.ZipFile(made, "w", chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for name, part in parts.items():
                archive.writestr(name, damaged_bytes(part, chance) if name == program else part)
        return made.getvalue()

    return make


def torch_file(folder: Path) -> Reader:
    path = folder / "state.pt"
    state = {
        "x": torch.rand(3, 4),
        "y": [torch.ones(2), (1, 2.5, None)],
        "z": {1: "a"},
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, path)
    return Reader(lambda: load_values(path), folder, {path: other_values(path.read_bytes())})


def server(folder: Path) -> Reader:
    """A server's checkpoints."""
    states = begun("ssp", folder)
    targets: dict[Path, Remake | None] = {path: other_values(path.read_bytes()) for path in folder.iterdir()}

    def read() -> str:
        core = core_of("ssp")
        checkpoint = ServerCheckpoint(folder, core.state_spec())
        checkpoint.load(core)
        known = str(core.state()) in states
        checkpoint.write(core)
        return "result" if known else "another state"

    return Reader(read, folder, targets)


def checkpoint_of(folder: Path, run: Training) -> Reader:
    """The manifest, the part and the tensors of the second checkpoint of two; the first one is whole."""
    for step in (1, 2):
        run.step()
        pycomm.save(folder, run.reducer, step=step, plain={"a": [1, (2.5, None)], "b": b"x"}, **run.more).wait()
    place = folder / "checkpoint-00000002"
    part, manifest = place / "rank-0" / "part.json", place / "manifest.json"
    content, outer = json.loads(part.read_bytes()), json.loads(manifest.read_bytes())["content"]

    def seal(made: Any) -> bytes:
        wanted = write_json(part, made)
        write_sealed(manifest, {**outer, "parts": [wanted]})
        return part.read_bytes()

    def other_manifest(chance: random.Random) -> bytes:
        write_sealed(manifest, {"content": with_other_value(outer, chance)}["content"])
        return manifest.read_bytes()

    def other_tensors(path: Path) -> Remake:
        def make(chance: random.Random) -> bytes:
            data, made = damaged_bytes(path.read_bytes(), chance), json.loads(json.dumps(content))
            made["indexes"][path.parent.name]["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
            seal(made)
            return data

        return make

    def read() -> str:
        found = pycomm.load(folder, run.reducer, **run.more)
        return "result" if found.get("step") == 2 else "left aside"

    targets: dict[Path, Remake | None] = {
        part: lambda chance: seal(with_other_value(content, chance)),
        manifest: other_manifest,
        **{path: other_tensors(path) for path in place.rglob("tensors")},
    }
    return Reader(read, folder, targets)


READERS = [
    explain,
    explain_folder,
    network,
    calibration,
    step_trace,
    told,
    torch_file,
    server,
]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_some_files(make: Callable[[Path], Reader], tmp_path: Path) -> None:
    make(tmp_path).fuzz(make.__name__, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_many_files(make: Callable[[Path], Reader], tmp_path: Path) -> None:
    make(tmp_path).fuzz(f"many {make.__name__}", MANY)


@pytest.mark.timeout(100)
def test_some_checkpoints(one_rank_group: None, tmp_path: Path) -> None:
    with training("sgd", "topk") as run:
        checkpoint_of(tmp_path, run).fuzz("checkpoint", FEW // 2)


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("ending", ["manifest.json", "part.json", "tensors"])
def test_many_checkpoints(one_rank_group: None, tmp_path: Path, ending: str) -> None:
    with training("sgd", "topk") as run:
        reader = checkpoint_of(tmp_path, run)
        reader.targets = {path: make for path, make in reader.targets.items() if path.name.endswith(ending)}
        reader.fuzz(f"many {ending}", MANY)

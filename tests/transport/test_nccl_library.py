"""Finding NCCL, and what is said where there is none that can be used; processes that end with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pycomm._native as _native
from tests.transport.nccl_ranks import Fake, build_fake, requires_emulator

pytestmark = requires_emulator


def refusal_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error with which ``path`` is refused."""
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(path))
    assert _native.nccl_version([]) is None
    with pytest.raises(RuntimeError) as caught:
        _native.nccl_library([])
    with pytest.raises(RuntimeError):
        _native.nccl_unique_id([])
    assert f"PYCOMM_NCCL_LIBRARY is {path}, which cannot be used" in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def lacking_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("lacking"), "lacking.so", "-DFAKE_WITHOUT_REDUCE_SCATTER")


def in_version(library: Path, code: int, folder: Path) -> Path:
    """A copy, which has switches of its own."""
    copy = folder / f"version_{code}.so"
    shutil.copy(library, copy)
    Fake(copy).version(code)
    return copy


@pytest.mark.parametrize(("code", "name"), [(21304, "2.13.4"), (2708, "2.7.8"), (2804, "2.8.4"), (20906, "2.9.6")])
def test_old_versions(
    lacking_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    """Their age is what matters, not what they lack because of it."""
    library = in_version(lacking_library, code, tmp_path)
    text = refusal_of(library, monkeypatch)
    assert f"NCCL at {library} is version {name}, wanted 2.14 or newer: install" in text
    assert "pip install nvidia-nccl-cu13" in text


@pytest.mark.parametrize(("code", "name"), [(21400, "2.14.0"), (21805, "2.18.5"), (22703, "2.27.3"), (23201, "2.32.1")])
def test_versions(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str) -> None:
    library = in_version(fake_library, code, tmp_path)
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(library))
    assert _native.nccl_version([]) == (name, str(library))
    assert _native.nccl_library([]) == (name, str(library))


def test_libraries_that_are_none(lacking_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal_of(lacking_library, monkeypatch)
    assert f"the library at {lacking_library} lacks ncclReduceScatter: it is not NCCL, or is broken: install" in text
    assert "cannot open shared object file" in refusal_of(tmp_path / "nowhere.so", monkeypatch)
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"this is no library")
    assert str(garbage) in refusal_of(garbage, monkeypatch)


def test_a_pipe_is_no_library(tmp_path: Path) -> None:
    """The loader would wait for the other end of it, for ever."""
    pipe = tmp_path / "pipe.so"
    os.mkfifo(pipe)
    text = json.loads(in_new_process(LOAD + SEARCH, "", PYCOMM_NCCL_LIBRARY=str(pipe)))
    assert text == f"PYCOMM_NCCL_LIBRARY is {pipe}, which is not a regular file"


def in_new_process(script: str, *arguments: str, **environment: str) -> str:
    """Return what ``script`` prints in a new process, since the library that was found is kept for the life of one."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYCOMM_NCCL_LIBRARY", "LD_LIBRARY_PATH")}
    # The package that is tested, also where the current directory has another one.
    packages = [str(Path(_native.__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    variables["PYTHONPATH"] = os.pathsep.join(packages)
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**variables, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


IMPORT = "import pycomm._native as _native"
# The extension alone: importing torch takes seconds.
LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_native)
"""

SEARCH = """
import sys, ctypes, json
already, *paths = sys.argv[1:]
if already: ctypes.CDLL(already)
try:
    print(json.dumps(_native.nccl_library(paths)))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    first = build_fake(tmp_path, "first.so", "-DFAKE_VERSION=21500")
    (tmp_path / "system").mkdir()
    soname = "-Wl,-soname,libnccl.so.2"
    system = build_fake(tmp_path / "system", "libnccl.so.2", "-DFAKE_VERSION=21600", soname)
    (tmp_path / "loaded").mkdir()
    loaded = build_fake(tmp_path / "loaded", "libnccl.so.2", "-DFAKE_VERSION=21700", soname)
    nowhere, in_system = str(tmp_path / "nowhere.so"), {"LD_LIBRARY_PATH": str(system.parent)}

    def search(*arguments: str, **environment: str) -> Any:
        return json.loads(in_new_process(LOAD + SEARCH, *arguments, **environment))

    assert search(str(loaded), str(first), **in_system) == ["2.17.0", str(loaded)]
    assert search("", nowhere, str(first), **in_system) == ["2.15.0", str(first)]
    assert search("", nowhere, **in_system) == ["2.16.0", str(system)]
    assert search(str(loaded), **in_system, PYCOMM_NCCL_LIBRARY=str(first)) == ["2.15.0", str(first)]
    if shutil.which("ldconfig") and "libnccl.so.2" in subprocess.getoutput("ldconfig -p"):
        return  # this system has an NCCL
    text = search("", nowhere)
    assert text.startswith("NCCL was not found: install NCCL 2.14 or newer (pip install nvidia-nccl-cu13")
    assert f"Tried:\n  {nowhere}: " in text
    assert "\n  libnccl.so.2: libnccl.so.2: cannot open shared object file" in text


LEAVE = """
import sys, ctypes, os
import numpy as np
native = ctypes.CDLL(_native.__file__)
class X:
    def __init__(self):
        self.host = np.ones(4, np.float32)
        address = self.host.__array_interface__["data"][0]
        native.emulator_own(ctypes.c_void_p(address), ctypes.c_int64(16), 0)
        self.__cuda_array_interface__ = {**self.host.__array_interface__, "version": 3}
group = _native.NcclGroup(0, 1, 0, _native.nccl_unique_id([]), False, 20.0, [])
native.emulator_stall(sys.argv[1] == "stalled")
x = X()
group.all_reduce(x, "sum", stream=0, timeout=60.0)
if sys.argv[1] == "forked":
    if os.fork() == 0:
        try:
            group.all_reduce(x, "sum", stream=0, timeout=60.0)
        except RuntimeError as error:
            assert "was inherited by a fork" in str(error), error
            group.close("")
            del group
            fake = ctypes.CDLL(os.environ["PYCOMM_NCCL_LIBRARY"])
            assert fake.fake_destroys() == fake.fake_aborts() == 0, "the parent's communicator"
            sys.exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    group.all_reduce(x, "sum", stream=0, timeout=60.0)
if sys.argv[1] == "kept":
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
print("leaving")
"""


@pytest.mark.parametrize("how", ["plain", "stalled", "forked", "kept"])
def test_a_script_may_simply_end(fake_library: Path, how: str) -> None:
    if how == "forked" and "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer's allocator may be locked for ever in the child of a process with threads")
    started = time.monotonic()
    load = IMPORT if how == "forked" else LOAD  # which needs pycomm.errors
    assert in_new_process(load + LEAVE, how, PYCOMM_NCCL_LIBRARY=str(fake_library)) == "leaving"
    assert time.monotonic() - started < 30

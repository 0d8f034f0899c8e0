"""init() under every launcher, by what each puts into the environment; and Horovod's names by install()."""

from __future__ import annotations

import contextlib
import errno
import http.server
import importlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm.horovod as hvd
from pycomm.collectives.transport import authentication
from pycomm.horovod import environment
from pycomm.horovod.environment import first_node, launched
from tests.on_ranks import Pools, on_ranks
from tests.ranks import free_port

LAUNCHERS = ("HOROVOD", "OMPI", "PMI", "MV2", "SLURM", "PMIX", "MASTER", "TORCHELASTIC", "MPI")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def _begin(environments: list[dict[str, str]]) -> tuple[int, ...]:
    """Leave the group that the tests' rank is in, and begin as a launcher's process; return who it is."""
    mine = environments[dist.get_rank()]
    dist.destroy_process_group()
    os.environ.update(mine)
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.barrier()
    hvd.shutdown()
    assert not dist.is_initialized()
    hvd.init()  # once more, in the same store
    who = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert hvd.allgather_object(who[0]) == list(range(hvd.size()))
    assert hvd.is_homogeneous()
    hvd.barrier()
    hvd.shutdown()
    return who


class _KeyValueStore(http.server.BaseHTTPRequestHandler):
    """What horovodrun serves."""

    values: dict[str, bytes] = {}  # noqa: RUF012 - of all requests

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def horovodrun() -> Iterator[int]:
    """Serve as horovodrun does; yield the port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _KeyValueStore) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
        _KeyValueStore.values.clear()


def test_horovodrun(new_ranks: Pools, horovodrun: int) -> None:
    server = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(horovodrun)}
    each = [{"HOROVOD_RANK": str(r), "HOROVOD_SIZE": "2", "HOROVOD_HOSTNAME": f"host{r}", **server} for r in range(2)]
    assert new_ranks(2).run(_begin, each) == [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]


def _drip(one: socket.socket) -> None:
    while True:
        one.sendall(b"H")
        time.sleep(0.05)


def _pour(one: socket.socket) -> None:
    one.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        one.sendall(b"1" * (1 << 20))


def _say(answer: bytes) -> Callable[[socket.socket], None]:
    return lambda one: one.sendall(b"HTTP/1.1 200 OK\r\n" + answer)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (_drip, r"TimeoutError: horovodrun at {} has not answered in 2 s"),
        (lambda one: time.sleep(4.0), r"TimeoutError: horovodrun at {} has not answered in 2 s"),
        (_pour, r"ValueError: horovodrun at {} gives .*it has more than 1024 bytes"),
        (lambda one: one.sendall(b"220 smtp\r\n"), r"ValueError: horovodrun at {} gives .*BadStatusLine"),
        (lambda one: None, r"ConnectionError: horovodrun at {} gives .*(RemoteDisconnected|ConnectionReset)"),
        (_say(b"\r\n\xff:1"), r"ValueError: horovodrun at {} gives .*UnicodeDecodeError"),
        (_say(b"Content-Length: 9\r\n\r\nhost:47"), r"ValueError: horovodrun at {} gives .*IncompleteRead"),
        (_say(b"\r\nhost"), r"ValueError: rank 0's address from horovodrun at {} is 'host', wanted .*its store"),
        (_say(b"\r\nhost:\x1b]0;"), r"ValueError: rank 0's address from horovodrun at {} is 'host:\\x1b\]0;', wanted"),
    ],
)
def test_another_server_in_the_place_of_horovodruns(
    monkeypatch: pytest.MonkeyPatch, behave: Callable[[socket.socket], None], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        names = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
        each = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", names[0]: "127.0.0.1", names[1]: str(port)}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in each.items():
            monkeypatch.setenv(name, value)

        def serve() -> None:
            one, _ = listener.accept()
            with one, contextlib.suppress(OSError):
                one.recv(1000)
                behave(one)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises((OSError, ValueError)) as caught:
            environment.launched().store(2.0)
        place = rf"127.0.0.1:{port} \({names[0]}, {names[1]}\)"
        assert re.match(message.format(place), f"{type(caught.value).__name__}: {caught.value}")
        serving.join()


def test_mpirun_on_one_host(new_ranks: Pools) -> None:
    job = {"PMIX_NAMESPACE": f"job-{os.getpid()}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    each = [{"OMPI_COMM_WORLD_RANK": str(r), **job} for r in range(2)]
    assert new_ranks(2).run(_begin, each) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


@pytest.mark.parametrize(
    ("rank", "size"), [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
)
def test_with_a_meeting_place(new_ranks: Pools, rank: str, size: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), size: "2"}
    each = [{rank: str(r), **place} for r in (1, 0)]  # numbers of the launcher's
    assert new_ranks(2).run(_begin, each) == [(1, 2, 1, 2, 0, 1), (0, 2, 0, 2, 0, 1)]


def test_starts_that_torchruns_agents_count_each_for_itself(new_ranks: Pools) -> None:
    """On two hosts: the second one's process fails, then a new host comes."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", **place}
    for counts in ("00", "01", "00"):
        each = [{"RANK": str(r), "TORCHELASTIC_RESTART_COUNT": counts[r], **served} for r in range(2)]
        assert [rank for rank, *_ in new_ranks(2).run(_begin, each)] == [0, 1]


def test_alone() -> None:
    code = (
        "import torch, pycomm.horovod as hvd; hvd.init(); print(hvd.rank(), hvd.size(), hvd.local_size());"
        "x = torch.ones(2, requires_grad=True); hvd.allreduce(x).sum().backward(); assert x.grad.tolist() == [1, 1];"
        "assert hvd.join() == 0; m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=1.0);"
        "hvd.DistributedOptimizer(o, m.named_parameters()); m(torch.ones(1, 2)).sum().backward(); o.step();"
        "assert hvd.allgather_object(3) == [3]"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd="/", capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1", "1"]
    assert not done.stderr, "something is said when the process ends"


@on_ranks(2)
def test_in_a_group_that_is_there() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    hvd.barrier()
    hvd.shutdown()
    assert dist.is_initialized()
    with pytest.raises(ValueError, match="comm: torch.distributed is initialized already"):
        hvd.init(comm=[0])
    hvd.init(comm=[0, 1])
    hvd.barrier()
    hvd.shutdown()


def test_environments_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (launched().rank, launched().size) == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a batch job, whose script is one process
    assert launched().size == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert (launched().rank, launched().size) == (3, 4)
    with pytest.raises(ValueError, match="set MASTER_ADDR to a name of rank 0's host and MASTER_PORT"):
        launched().store(1.0)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "4")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK is 4 and OMPI_COMM_WORLD_SIZE is 4"):
        launched()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "x")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK is 'x'"):
        launched()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setenv("PMIX_NAMESPACE", f"nobody-{os.getpid()}")
    with pytest.raises(TimeoutError, match="rank 0 of the job 'nobody-.*was not found on this host in 0.1 s"):
        launched().store(0.1)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon")
    from pycomm.horovod import environment

    with pytest.raises(ValueError, match="HOROVOD_STALL_CHECK_TIME_SECONDS is 'soon'"):
        environment.stall_check_seconds()
    for name, ask in (
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", environment.timeout),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", environment.meeting_seconds),
    ):
        for text in ("nan", "inf", "1e300"):
            monkeypatch.setenv(name, text)
            with pytest.raises(ValueError, match=f"{name} is '{text}' in the environment, wanted a number of at most"):
                ask()


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a1,b2", "a1"), ("n[03-05,9],m", "n03"), ("n[7]-ib", "n7-ib"), ("n[1,2]", "n1")]
)
def test_the_first_of_slurms_hosts(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_queries_are_honest() -> None:
    assert not any(query() for query in (hvd.mpi_built, hvd.mpi_enabled, hvd.ccl_built, hvd.ddl_built))
    assert hvd.gloo_built() == hvd.gloo_enabled() == dist.is_gloo_available()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert torch.cuda.is_available() or hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="MPI is not in use"):
        hvd.mpi_threads_supported()


def test_names_of_horovods_modules() -> None:
    code = (
        "import pycomm.horovod; pycomm.horovod.install(); pycomm.horovod.install();"
        "import horovod, horovod.torch as hvd, horovod.torch.elastic; assert horovod.__version__ == '0.28.1';"
        "assert hvd is pycomm.horovod and horovod.torch is hvd and hvd.elastic.TorchState;"
        "from horovod.torch.mpi_ops import allreduce, size, Average, global_process_set;"
        "import horovod.torch.mpi_ops as m; from horovod.torch import mpi_ops; assert m is mpi_ops is hvd.mpi_ops;"
        "import horovod.torch.elastic.state as s; assert s.TorchState is hvd.elastic.TorchState;"
        "from horovod.torch.compression import Compression; from horovod.torch.functions import broadcast_object;"
        "from horovod.torch.elastic.sampler import ElasticSampler; from horovod.common.elastic import run_fn, State;"
        "from horovod.torch.elastic.state import TorchState, get_handler_registry;"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt;"
        "from horovod.common.process_sets import ProcessSet; from horovod.torch.optimizer import DistributedOptimizer;"
        "from horovod.common.util import check_extension, gpu_available, num_rank_is_power_2, split_list;"
        "from horovod.torch.sync_batch_norm import SyncBatchNorm; check_extension('horovod.torch', 'X', 'Y');"
        "assert split_list(list(range(5)), 2) == [[0, 1, 2], [3, 4]] and num_rank_is_power_2(4);"
        "\ntry:\n    import horovod.tensorflow\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd="/", capture_output=True, text=True)
    assert done.stdout.strip() == "No module named 'horovod.tensorflow'"


def test_horovod_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", importlib)
    with pytest.raises(RuntimeError, match="horovod has been imported already"):
        hvd.install()


def _ask(job: str, patience: float) -> tuple[str, str]:
    """Return what rank 0 tells, to two ranks of three, one of which asks twice."""
    told = [environment.on_this_host(job, rank, "", 3, patience) for rank in (1, 1, 2)]
    assert len(set(told)) == 1
    return told[0], str(authentication.own_folder())


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    tmp_path.chmod(0o700)
    return tmp_path


def test_rank_0_tells_its_address_to_ranks_of_this_user(own_folder: Path) -> None:
    assert environment.on_this_host("job", 0, "4711", 3, 20.0) == "4711"
    (path,) = own_folder.iterdir()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as wrong:
        wrong.connect(path.name)
        wrong.sendall(b"\xff")  # no number of a rank
        wrong.close()
        with pytest.raises(ValueError, match="another process is rank 0 of the job 'job'"):
            environment.on_this_host("job", 0, "4712", 3, 20.0)
        assert _ask("job", 20.0) == ("4711", str(own_folder))
        silent.close()
    while list(own_folder.iterdir()):  # all have been told
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match="rank 0 of the job 'job' was not found"):
        environment.on_this_host("job", 1, "", 3, 0.1)


def test_rank_0_tells_its_address_once_it_has_descriptors(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE]

    def accept_later(listener: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "no descriptor is left")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    environment.on_this_host("job", 0, "4711", 2, 20.0)
    assert environment.on_this_host("job", 1, "", 2, 10.0) == "4711"
    assert not failures
    while list(own_folder.iterdir()):
        time.sleep(0.01)


def test_what_a_killed_job_has_left_is_no_hindrance(own_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        environment.on_this_host("job", 0, "1", 2, 20.0)
        (path,) = own_folder.iterdir()
        assert environment.on_this_host("job", 1, "", 2, 20.0) == "1"
        while path.exists():
            time.sleep(0.01)
        left.bind(path.name)
    assert environment.on_this_host("job", 0, "2", 2, 20.0) == "2"
    assert environment.on_this_host("job", 1, "", 2, 20.0) == "2"
    while path.exists():
        time.sleep(0.01)


def test_a_folder_that_others_can_use_is_no_place_to_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert authentication.own_folder() == tmp_path / f"pycomm-{os.geteuid()}"
    (tmp_path / f"pycomm-{os.geteuid()}").chmod(0o755)
    with pytest.raises(PermissionError, match="is not for this user alone"):
        environment.on_this_host("job", 0, "1", 2, 1.0)


STRANGER = """
import os, socket, sys
os.setgid(12345)
os.setuid(12345)
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
try:
    one.sendall(bytes([0, 0, 0, 1]))
    sys.exit(one.recv(100) != b"")
except ConnectionError:
    pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_nothing(own_folder: Path) -> None:
    """Even where the folder lets a stranger in, the kernel says who has connected."""
    environment.on_this_host("job", 0, "4711", 2, 20.0)
    (path,) = own_folder.iterdir()
    for folder in (own_folder, *own_folder.parents[:-2]):
        folder.chmod(0o711)
    path.chmod(0o777)
    subprocess.run([sys.executable, "-c", STRANGER, path.name], check=True, timeout=20)
    own_folder.chmod(0o700)
    assert environment.on_this_host("job", 1, "", 2, 20.0) == "4711"
    while path.exists():
        time.sleep(0.01)

"""The secret of a job: where it is read, who must have it, and certificates besides."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.transport import authentication
from pycomm.torch_internals import PrefixStore
from pycomm.training.asynchronous import wire
from tests.asynchronous.runs import model_of
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks

KEY = b"a secret of the job"


@pytest.mark.timeout(20)
def test_where_the_secret_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for name in (authentication.SECRET, authentication.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    assert authentication.Access.read() == authentication.Access()
    monkeypatch.setenv("PYCOMM_SECRET", "too short")
    with pytest.raises(ValueError, match="the secret in PYCOMM_SECRET has 9 characters, wanted at least 16"):
        authentication.Access.read()
    monkeypatch.setenv("PYCOMM_SECRET", "long enough, one hopes")
    assert authentication.Access.read().key == b"long enough, one hopes"
    monkeypatch.setenv("PYCOMM_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="are both set"):
        authentication.Access.read()
    monkeypatch.delenv("PYCOMM_SECRET")
    with pytest.raises(ValueError, match="PYCOMM_SECRET_FILE is .*secret', which cannot be read"):
        authentication.Access.read()
    path.write_text("long enough, one hopes\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="others may read it: chmod 600"):
        authentication.Access.read()
    path.chmod(0o600)
    assert authentication.Access.read().key == b"long enough, one hopes"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a FIFO"):
        authentication.Access.read()


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "serve several hosts without one secret",
    "Error everywhere that says what to set.",
)
@on_ranks(2)
def test_hosts_without_a_secret_are_an_error_of_all() -> None:
    model = model_of()
    with on_hosts("AB"), pytest.MonkeyPatch.context() as patch:
        for secrets, message in (
            (
                ("", ""),
                "are on different hosts, .* and have no secret .*: without one, servers listen on their own host",
            ),
            (
                ("one secret of a job", "another secret of it"),
                "the ranks disagree about PYCOMM_SECRET or certificates: f",
            ),
            (("", "the secret of one rank"), "the ranks disagree about PYCOMM_SECRET or certificates"),
            (("short", "short"), "the secret in PYCOMM_SECRET has 5 characters"),
        ):
            patch.setenv("PYCOMM_SECRET", secrets[dist.get_rank()])
            with pytest.raises(ValueError, match=message):
                pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=20)


@on_ranks(2)
def test_the_secret_is_in_no_store() -> None:
    """What travels to the store is seen by whoever can connect to its port."""
    told: list[str] = []
    model = model_of()
    with on_hosts("AB"), pytest.MonkeyPatch.context() as patch:
        real = PrefixStore.set

        def noted(store: PrefixStore, key: str, value: str) -> None:
            told.append(f"{key}={value}")
            real(store, key, value)

        patch.setattr(PrefixStore, "set", noted)
        with pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=20) as server:
            if server.is_worker:
                server.pull()
        key = os.environ["PYCOMM_SECRET"]
    assert any("lines/" in text for text in told)
    assert not any(key in text or key.encode().hex() in text for text in told)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_timeout_on_one_rank_is_told_to_all(rank: int) -> None:
    model, here = model_of(), dist.get_rank()

    def server(timeout: Any) -> None:
        pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=timeout).close()

    for wrong in (-1, "ten", float("nan"), float("inf")):
        message = "timeout is" if here == rank else f"rank {rank}.*: timeout is"
        with pytest.raises((TypeError, ValueError), match=message):
            server(wrong if here == rank else 20)
    server(20)


# TLS.


def named(path: Path) -> dict[str, str]:
    """Return the variables that name the certificate, the key and the authority, whose names begin with ``path``."""
    return dict(zip(authentication.TLS, (f"{path}.{end}" for end in ("crt", "key", "ca")), strict=True))


@pytest.fixture
def certificates(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return a function that makes an authority, and a certificate and its key by it."""

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=tmp_path, capture_output=True, timeout=30)

    def make(name: str) -> dict[str, str]:
        curve = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        run(
            "req",
            "-x509",
            *curve,
            "-keyout",
            f"{name}.ca.key",
            "-out",
            f"{name}.ca",
            "-subj",
            f"/CN={name}",
            "-days",
            "9",
        )
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=rank")
        signed = "-CA", f"{name}.ca", "-CAkey", f"{name}.ca.key", "-CAcreateserial", "-days", "9"
        run("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")
        return dict(
            zip(authentication.TLS, (str(tmp_path / f"{name}.{end}") for end in ("crt", "key", "ca")), strict=True)
        )

    return make


def set_all(patch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        patch.setenv(name, value)


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
def test_tls(monkeypatch: pytest.MonkeyPatch, certificates: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    ours, theirs = certificates("ours"), certificates("theirs")
    monkeypatch.setenv("PYCOMM_SECRET", KEY.decode())
    set_all(monkeypatch, ours)
    access = authentication.Access.read()
    assert str(access).endswith("with TLS")
    listener = wire.WorkerListener("127.0.0.1", KEY, access.context(server=True))
    worker = wire.connect(listener.address, KEY, access.context(server=False))
    assert wire.ready({}, listener.wakeup, 10.0)[1]
    (inside,) = listener.admitted()
    big, out = torch.randn(1_000_000), torch.empty(1_000_000)

    def send() -> None:
        wire.send(worker, a=1)
        wire.send(worker, b=2)
        wire.send_array(worker, big)

    sending = threading.Thread(target=send)
    sending.start()
    assert wire.receive(inside) == {"a": 1}
    assert wire.ready({inside: select.POLLIN}, listener.wakeup, 10.0)[0] == [inside], "what TLS has read ahead is seen"
    assert wire.receive(inside) == {"b": 2}
    wire.receive_array(inside, out)
    sending.join()
    assert torch.equal(out, big)
    with pytest.raises(OSError, match="127.0.0.1"):  # in clear
        wire.connect(listener.address, KEY)
    set_all(monkeypatch, {**theirs, authentication.TLS[2]: ours[authentication.TLS[2]]})
    foreign = authentication.Access.read().context(server=False)
    with pytest.raises(OSError, match="127.0.0.1"):  # it believes the server, which does not believe its certificate
        wire.connect(listener.address, KEY, foreign)
    set_all(monkeypatch, theirs)
    with pytest.raises(OSError, match="certificate verify failed"):
        wire.connect(listener.address, KEY, authentication.Access.read().context(server=False))
    assert not wire.ready({}, listener.wakeup, 0.2)[1]
    for one in (worker, inside, listener):
        one.close()
    monkeypatch.delenv(authentication.TLS[1])
    with pytest.raises(ValueError, match="PYCOMM_TLS_KEY must be set"):
        authentication.Access.read()
    (tmp_path / "no.key").write_text("no key")
    monkeypatch.setenv(authentication.TLS[1], str(tmp_path / "no.key"))
    with pytest.raises(OSError, match="no.key"):
        authentication.Access.read()


@on_ranks(2)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
def test_servers_and_workers_by_tls() -> None:
    folder = Path(f"/dev/shm/pycomm-tls-{os.getppid()}")  # of both ranks
    folder.mkdir(exist_ok=True)
    try:
        with on_hosts("AB"), pytest.MonkeyPatch.context() as patch:
            make = certificates.__wrapped__(folder)  # type: ignore[attr-defined]
            if dist.get_rank() == 0:
                make("job")
            dist.barrier()
            set_all(patch, named(folder / "job"))
            model = model_of()
            with pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=20) as server:
                for _ in range(3 if server.is_worker else 0):
                    with server.step():
                        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

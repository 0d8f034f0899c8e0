"""The examples of what the README promises: each runs as its first lines say, and shows that."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import Block
from tests.docs.shell import check_shell
from tests.examples.running import EXAMPLES, ROOT, run, run_on, torchrun_on
from tests.ranks import free_port

RANKS = {
    "checkpoint.py": 1,
    "fp8_ddp.py": 2,
    "gossip.py": 2,
    "local_sgd.py": 2,
    "parameter_server.py": 3,
    "sharded_muon.py": 2,
    "two_hosts.py": 2,
}
"""Examples that torchrun starts, and the fewest ranks that they need."""
TRAINERS = ("trainers/lightning_trainer.py", "trainers/transformers_trainer.py")
PROMISES = sorted([*RANKS, *TRAINERS, "horovod_digits.py", "kernels_numpy.py", "survive_and_join.py"])
PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10


@pytest.fixture(autouse=True)
def _digits() -> None:
    pytest.importorskip("sklearn")


def accuracy_in(out: str) -> float:
    """Return the last accuracy that an example prints; by chance it is 0.1."""
    return float(re.findall(r"accuracy ([\d.]+)", out)[-1])


def commands_of(example: str) -> str:
    """Return the commands in the first lines of an example."""
    head = (EXAMPLES / example).read_text(encoding="utf-8").split('"""')[1].replace("\\\n", "")
    lines = [line.strip().replace("$ ", "") for line in head.splitlines() if line.startswith("    ")]
    return "\n".join(line for line in lines if not line.startswith("mpirun"))


@pytest.mark.parametrize("example", PROMISES)
def test_the_readme_leads_there_in_one_click(example: str) -> None:
    assert f"](examples/{example})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", PROMISES)
def test_it_is_short_and_says_how_to_run_it(example: str) -> None:
    assert len((EXAMPLES / example).read_text(encoding="utf-8").splitlines()) <= 80
    commands = commands_of(example)
    assert f"examples/{example}" in commands.splitlines()[0]
    check_shell(Block(f"examples/{example}", 1, "sh", commands))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [[], pytest.param(["--diloco"], marks=pytest.mark.slow)], ids=" ".join)
def test_local_sgd(options: list[str]) -> None:
    out = run_on(2, "local_sgd.py", "--epochs", "5", *options)
    assert accuracy_in(out) > 0.85, out
    counted = re.search(r"^([\d.]+) MB sent in (\d+) averages; gradients are ([\d.]+) MB$", out, re.MULTILINE)
    assert counted is not None, out
    assert int(counted[2]) == 12  # of 225 steps, every 20th and the end
    assert float(counted[1]) == pytest.approx(12 * 4 * PARAMETERS / 1e6, abs=0.06)
    assert float(counted[3]) == pytest.approx(225 * 4 * PARAMETERS / 1e6, abs=0.06)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_parameter_server(mode: str) -> None:
    out = run_on(3, "parameter_server.py", "--mode", mode)
    pushed = {int(worker): int(count) for worker, count in re.findall(r"^worker (\d) pushed (\d+) grad", out, re.M)}
    updates = re.search(r"^(\d+) updates, ", out, re.MULTILINE)
    assert updates is not None, out
    if mode == "async":
        assert pushed[1] > pushed[2], out
        assert int(updates[1]) == pushed[1] + pushed[2], out
        assert accuracy_in(out) > 0.5, out
    else:  # they keep step until one leaves, and the other goes on alone until its time is up
        fewest, most = sorted(pushed.values())
        assert most < 1.5 * fewest + 5, out
        assert fewest - 1 <= int(updates[1]) <= most + 1, out


@pytest.mark.timeout(400)
def test_gossip() -> None:
    out = run_on(3, "gossip.py", "--epochs", "5")
    assert re.search(r"^accuracy [\d.]+ of rank 0, [\d.]+ of the ranks' mean$", out, re.MULTILINE), out
    assert accuracy_in(out) > 0.85, out
    assert f"{4 * PARAMETERS / 1e3:.0f} kB sent per step and rank\n" in out


@pytest.mark.timeout(400)
def test_fp8_inside_ddp() -> None:
    out = run_on(2, "fp8_ddp.py")
    assert accuracy_in(out) > 0.9, out
    sent = re.search(r"^([\d.]+) bytes sent per parameter and step over shared_memory$", out, re.MULTILINE)
    assert sent is not None, out
    assert 1.0 < float(sent[1]) < 1.1, out  # biases are sent as they are


@pytest.mark.timeout(400)
def test_sharded_muon() -> None:
    out = run_on(2, "sharded_muon.py")
    assert accuracy_in(out) > 0.9, out
    kept = re.search(r"^rank 0 of 2 keeps the momentum of (\d+)% of the elements$", out, re.MULTILINE)
    assert kept is not None, out
    assert 40 < int(kept[1]) < 60, "matrices are of different sizes"


def bytes_in(out: str) -> tuple[float, float]:
    """Return the kB of a step of the last epoch, and of one without compression."""
    sent = re.findall(r"^epoch \d: accuracy [\d.]+, ([\d.]+) kB sent per step$", out, re.MULTILINE)
    whole = re.search(r"^([\d.]+) kB per step without compression, ", out, re.MULTILINE)
    assert whole is not None, out
    return float(sent[-1]), float(whole[1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_on_one() -> None:
    out = run_on(2, "two_hosts.py", "--epochs", "6")
    assert accuracy_in(out) > 0.85, out
    sent, whole = bytes_in(out)
    assert sent < whole / 40, out
    assert out.endswith("transport shared_memory\n")


@pytest.mark.timeout(400)
def test_two_hosts() -> None:
    """The commands for two hosts. A process in a user namespace of its own shares no memory with others."""
    elsewhere = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*elsewhere, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may make no user namespace")
    first, second, _ = commands_of("two_hosts.py").splitlines()
    script = ROOT / "examples" / "two_hosts.py"

    def command(line: str) -> list[str]:
        words = line.partition("  #")[0].replace("10.0.0.1", "127.0.0.1").split()[1:-1]
        return [sys.executable, "-m", "torch.distributed.run", *words, str(script), "--epochs", "2"]

    port = {"PET_MASTER_PORT": str(free_port())}
    environment = {**os.environ, **port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([*elsewhere, *command(second)], env=environment, start_new_session=True)
    try:
        out = run(command(first), **port)
        assert other.wait(30) == 0
    finally:
        if other.poll() is None:
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()
    sent, whole = bytes_in(out)
    assert sent < whole / 20, out
    assert out.endswith("transport tcp\n")


@pytest.mark.timeout(400)
def test_survive_and_join() -> None:
    out = run([sys.executable, str(EXAMPLES / "survive_and_join.py"), "--port", str(free_port())])
    lost, joined, end = out.splitlines()
    assert lost.startswith("step 30: ranks (0, 1, 2) -> (0, 1), accuracy "), out
    assert re.match(r"step \d+: ranks \(0, 1\) -> \(0, 1, 3\), accuracy ", joined), out
    assert re.match(r"step \d+: ranks \(0, 1, 3\), accuracy ", end), out
    assert accuracy_in(out) > 0.9, out


def end_of(out: str) -> tuple[int, str]:
    """Return the number of steps and the loss that a run with checkpoints ends with."""
    end = re.search(r"^(\d+) steps  loss (\S+)  accuracy ", out, re.MULTILINE)
    assert end is not None, out
    return int(end[1]), end[2]


@pytest.mark.timeout(700)
def test_a_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = ["--steps", "60", "--folder", str(tmp_path)]
    stopped = run([*torchrun_on(2), str(EXAMPLES / "checkpoint.py"), *options, "--stop-at", "30"])
    assert "stopped: signal SIGTERM on rank 1\n" in stopped
    assert end_of(stopped)[0] == 31
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000030", "checkpoint-00000031"]
    again = run_on(3, "checkpoint.py", *options)
    assert "resumed after step 31 on 3 ranks\n" in again
    assert end_of(again)[0] == 60
    assert float(end_of(again)[1]) < float(end_of(stopped)[1]) < 2.3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    def command(name: str, *options: str) -> list[str]:
        launcher = [*torchrun_on(2), "--max-restarts", "3", str(EXAMPLES / "checkpoint.py")]
        return [*launcher, "--steps", "30", "--folder", str(tmp_path / name), *options]

    alone = run(command("alone"))
    killed = run(command("killed", "--fail-at", "15"))
    assert "resumed after step 1" in killed
    run(command("stopped", "--stop-at", "15"))
    stopped = run(command("stopped"))
    assert end_of(alone) == end_of(killed) == end_of(stopped)


@pytest.mark.timeout(400)
def test_horovod() -> None:
    out = run_on(2, "horovod_digits.py")
    assert accuracy_in(out) > 0.9, out
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", out, re.MULTILINE)]
    assert len(losses) == 10, out
    assert losses[-1] < losses[0], out


def test_kernels_alone() -> None:
    out = run([sys.executable, str(EXAMPLES / "kernels_numpy.py")])
    line = re.fullmatch(r"(?:numpy|cupy): accuracy [\d.]+, ([\d.]+) MB sent, ([\d.]+) MB without selection\n", out)
    assert line is not None, out
    assert accuracy_in(out) > 0.9, out
    assert float(line[1]) < 0.07 * float(line[2]), out


@pytest.mark.requires_cuda
def test_kernels_alone_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    assert run([sys.executable, str(EXAMPLES / "kernels_numpy.py")]).startswith("cupy: accuracy ")


class TestWhatIsMissing:
    """A line says it, and the exit code is 1."""

    def said(self, example: str, patch: pytest.MonkeyPatch, *options: str, **variables: str) -> str:
        """Return what an example says that ends at once. It is started here, where torch is imported already."""
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [f"examples/{example}", *options])
        patch.syspath_prepend(str(EXAMPLES))
        patch.delitem(sys.modules, "common", raising=False)
        patch.chdir(ROOT)
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(f"examples/{example}", run_name="__main__")
        patch.delitem(sys.modules, "common", raising=False)
        assert isinstance(caught.value.code, str)  # which Python prints to stderr, and ends with 1
        return caught.value.code

    @pytest.mark.parametrize("example", RANKS)
    def test_torchrun(self, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
        command = f"torchrun --nproc-per-node {RANKS[example]} examples/{example}"
        said = self.said(example, monkeypatch)
        assert said == f"examples/{example} needs torchrun, RANK is not set: {command}"

    def test_in_a_process_of_its_own(self) -> None:
        variables = {name: value for name, value in os.environ.items() if name != "RANK"}
        command = [sys.executable, str(EXAMPLES / "gossip.py")]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (1, "")
        command_line = "torchrun --nproc-per-node 2 examples/gossip.py"
        assert done.stderr == f"examples/gossip.py needs torchrun, RANK is not set: {command_line}\n"

    @pytest.mark.parametrize("example", [example for example, least in RANKS.items() if least > 1])
    def test_ranks(self, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        said = self.said(example, monkeypatch, **place)
        assert said.startswith(f"examples/{example} needs {RANKS[example]} ranks or more, not 1: torchrun "), said

    def test_the_port(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            rank_0 = self.said("gossip.py", monkeypatch, **place)
            starter = self.said("survive_and_join.py", monkeypatch, "--port", port)
        assert rank_0 == f"examples/gossip.py needs port {port}: Address already in use"
        assert starter == f"examples/survive_and_join.py needs port {port}: Address already in use"

    @pytest.mark.parametrize("example", [each for each in PROMISES if each not in TRAINERS])
    def test_scikit_learn(self, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn", None)
        place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        said = self.said(example, monkeypatch, **place)
        assert said == f"examples/{example} needs scikit-learn: pip install scikit-learn"

    @pytest.mark.parametrize("example", TRAINERS)
    def test_a_framework(self, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
        name = example.partition("/")[2].partition("_")[0]
        monkeypatch.setitem(sys.modules, name, None)
        install = "pip install -c constraints.txt '.[examples,frameworks]'"
        assert self.said(example, monkeypatch) == f"examples/{example} needs {name}: {install}"

    def test_muon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.delattr(torch.optim, "Muon", raising=False)
        said = self.said("sharded_muon.py", monkeypatch)
        assert re.fullmatch(r"examples/sharded_muon.py needs torch 2.9, not \S+: pip install 'torch>=2.9'", said)

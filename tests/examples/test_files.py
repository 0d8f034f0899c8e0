"""Beside the scripts: a batch script, an image, two containers and a notebook, without Slurm, Docker or Jupyter."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Block, blocks_of
from tests.docs.shell import check_shell, commands_of
from tests.examples.running import EXAMPLES, run

SBATCH = EXAMPLES / "slurm" / "train.sbatch"
DOCKER = EXAMPLES / "docker"


def test_the_batch_script_is_sound() -> None:
    checks = [["bash", "-n", str(SBATCH)]]
    if shutil.which("shellcheck") is not None:
        checks.append(["shellcheck", str(SBATCH)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    head = re.findall(r"^#     (sbatch .+)$", SBATCH.read_text(), re.MULTILINE)
    assert len(head) == 2
    for line in head:
        sbatch, script, *words = line.partition("  #")[0].split()
        assert (sbatch, ROOT / script) == ("sbatch", SBATCH)
        if words:
            check_shell(Block(str(SBATCH), 1, "sh", f"python {' '.join(words)}"))


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_batch_script_trains_on_all_nodes(tmp_path: Path) -> None:
    """``srun`` starts the task of each node here, and ``scontrol`` names this host twice."""
    pytest.importorskip("sklearn")
    program(tmp_path / "scontrol", "echo 127.0.0.1; echo 127.0.0.1")
    program(tmp_path / "srun", 'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" & wait -n && wait -n')
    program(tmp_path / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "nodes[0-1]", "SLURM_NNODES": "2"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = ["examples/two_hosts.py", "--epochs", "1"]
    out = run(["bash", str(SBATCH), *script], PATH=path, SLURM_CPUS_PER_TASK="1", **job)
    assert re.search(r"^epoch 0: accuracy [\d.]+, [\d.]+ kB sent per step$", out, re.MULTILINE), out


def instructions() -> list[tuple[str, str]]:
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_the_image_is_installed_as_the_readme_says() -> None:
    (install,) = [block for block in blocks_of("README.md") if block.code.endswith("\npycomm demo\n")]
    wanted = [words for line in install.code.splitlines() for words in commands_of(line)][:-1]
    made = [words for name, line in instructions() if name == "RUN" for words in commands_of(line)]
    assert [words for words in made if words[0] not in ("apt-get", "rm")] == wanted
    assert wanted[-1][:2] == ["pip", "install"]
    assert ("COPY", ". .") in instructions()
    for line in re.findall(r"^# +docker .+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        for path in re.findall(r"\S+/\S+", line):
            assert (ROOT / path).exists(), line


def test_what_the_image_leaves_out_is_not_needed() -> None:
    """Of the files that git has, none is left out."""
    patterns = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()[1:]
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    left_out = {path for path in kept for pattern in patterns if Path(path).match(pattern.removeprefix("**/"))}
    assert not left_out
    assert not {path.partition("/")[0] for path in kept} & set(patterns)


def test_two_containers_are_two_hosts() -> None:
    yaml = pytest.importorskip("yaml")
    compose: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert list(services) == ["first", "second"]
    for number, (name, service) in enumerate(services.items()):
        assert service["hostname"] == name
        build = service["build"]
        context = (DOCKER / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
        check_shell(Block("compose.yaml", 1, "sh", service["command"]))
        assert f"--nnodes 2 --node-rank {number} --master-addr first " in service["command"]
    assert services["first"]["image"] == services["second"]["image"]


@pytest.mark.timeout(150)
def test_the_notebook() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("cloudpickle")
    notebook = json.loads((EXAMPLES / "launch.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "clear its outputs"
    typed = "\n\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run(
        [sys.executable, "-"], input=typed, capture_output=True, text=True, timeout=110, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["True", "1 ValueError('a bug')"]
    reached = re.findall(r"^rank \d: accuracy ([\d.]+), [\d.]+ MB sent$", done.stdout, re.MULTILINE)
    assert len(reached) == 2
    assert reached[0] == reached[1]
    assert float(reached[0]) > 0.85

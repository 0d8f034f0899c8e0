"""docs/launching.md works as it stands: typed at a prompt, and as a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of

SEEN = "print([sorted(state) for state in states], torch.equal(states[0]['weight'], states[1]['weight']))\n"


def run(words: list[str], typed: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], input=typed, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    typed, script = (block.code for block in blocks_of("docs/launching.md") if block.language == "python")
    lines = run(["-"], typed + SEEN).splitlines()
    assert {"[rank 0] done", "[rank 1] done"} <= set(lines)
    assert lines[-1] == "[['bias', 'weight'], ['bias', 'weight']] True"
    assert any(line.startswith("20/20  loss ") for line in lines)
    path = tmp_path / "hello.py"
    path.write_text(script)
    said = sorted(run([str(path)], "").splitlines())
    assert said == [f"[rank {rank}] hello from rank {rank} of 3" for rank in range(3)]

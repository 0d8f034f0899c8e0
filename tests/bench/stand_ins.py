"""Programs that stand in for others."""

from __future__ import annotations

import sys
from pathlib import Path

HOUR = "import time; print('here', flush=True); time.sleep(3600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path

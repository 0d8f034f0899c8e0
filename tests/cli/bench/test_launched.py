"""Answers of launched ranks, in a store that others may reach."""

from __future__ import annotations

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pycomm.tools.cli.bench.workers import LaunchedWorkers


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ("{}", "it is an object, wanted a list"),
        ('[{"value": 1}]', "it is a list of 1, wanted one of 2"),
        ('[{"value": 1}, {"error": 5}]', r"\[1\]\.error is 5, wanted a string"),
    ],
)
def test_what_no_rank_has_answered_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    keeper = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("pycomm bench/answers", keeper).set("0", text)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(keeper.port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workers = LaunchedWorkers()
    workers.worker = "a"
    with pytest.raises(ValueError, match=f"answer '0' in the launcher's store .*{message}"):
        workers.call("upper")

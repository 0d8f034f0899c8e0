"""Answers of launched ranks, in a store that others may reach."""

from __future__ import annotations

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pycomm.tools.cli.bench.measure import Ranks
from pycomm.tools.launching import RankError


class Alone:
    """Team of one rank."""

    def call(self, method: str) -> list[str]:
        return [method]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "the message of rank 0 is nested too deeply"),
        ("[]", "the message of rank 0 .*it is a list, wanted an object"),
        ('{"problem": 5, "kind": "", "value": 1}', "problem is 5, wanted a string"),
        ('{"problem": "rank 0 failed: it is full", "kind": "OSError", "value": null}', "^rank 0 failed: it is full$"),
    ],
)
def test_what_no_rank_has_answered_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    keeper = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("pycomm bench", keeper).set("0 0", text)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(keeper.port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RankError), match=message):
        Ranks().ask(Alone(), "answer")

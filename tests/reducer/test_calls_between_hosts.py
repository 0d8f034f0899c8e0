"""Calls of Python on communication threads: each holds the interpreter's lock, which backward needs."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn

from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached

_MOST = 150  # per step


@on_ranks(2)
def test_few_calls_per_step() -> None:
    """29 parameters in four buckets, on two lanes."""
    layers = [nn.Linear(64, 64) for _ in range(14)]
    model = nn.Sequential(*layers, nn.Linear(64, 1, bias=False))
    calls: Counter[str] = Counter()
    counts = False

    def note(frame: Any, event: str, _: Any) -> None:
        if counts and event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    threading.setprofile(note)
    try:
        with on_hosts("ab"), attached(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=0.07) as reducer:
            assert reducer.stats()["num_buckets"] == 4, reducer.stats()
            for step in range(15):
                counts = step >= 8  # passes 9 to 15: parameters are compared after 8 and 16
                model(torch.ones(1, 64)).sum().backward()
                reducer.optimizer.step()
                reducer.optimizer.zero_grad()
            counts = False
    finally:
        threading.setprofile(None)
    per_step = sum(calls.values()) / 7
    assert 0 < per_step <= _MOST, (per_step, calls.most_common())

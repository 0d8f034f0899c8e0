"""Planning: what methods cost on a described network, and where they break even."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pycomm.compression.methods.powersgd import LowRankCodec
from pycomm.schedule.network import Link, Network, load
from pycomm.training.cost import planning


def test_planning() -> None:
    link = Link(alpha=1e-4, beta=1e-6, gamma=0.0)  # so slow that no load on this machine matters
    slow = planning.price(4, 4e6, Network(name="modem", within_host=link, between_hosts=link))
    assert slow["dense"].link == pytest.approx(1.5 * 4e6 * 1e-6, rel=0.15)
    assert slow["dgc(0.1%)"].seconds() < 0.5 * slow["dense"].seconds()
    assert slow["fp16"].link == pytest.approx(slow["dense"].link / 2, rel=0.1)
    assert slow["dgc(0.1%)"].break_even > 1e6
    fast = planning.price(4, 4e6, load("infiniband-400g"))
    # What is computed here takes a time of this machine's, which may have been busy.
    for name, priced in fast.items():
        if name != "dense":
            pays = priced.seconds() < fast["dense"].seconds()
            assert pays == (priced.break_even > 400e9 / 8), name


def test_plans_follow_a_method_that_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    network = load("ethernet-1g")
    fast = planning.price(4, 4e6, network)["powersgd(4)"]
    send = LowRankCodec.send

    def slowly(self: LowRankCodec, *arguments: Any) -> Any:
        time.sleep(0.3)
        return send(self, *arguments)

    monkeypatch.setattr(LowRankCodec, "send", slowly)
    slow = planning.price(4, 4e6, network)
    assert slow["powersgd(4)"].local > fast.local + 0.2
    assert slow["powersgd(4)"].break_even < fast.break_even
    assert min(slow, key=lambda name: slow[name].seconds()) != "powersgd(4)"

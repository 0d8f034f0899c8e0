"""Planning: what methods cost on a described network, and where they break even."""

from __future__ import annotations

import pytest

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

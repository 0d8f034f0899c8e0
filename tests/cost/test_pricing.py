"""Pricing: rehearsals send what the method sends, and measured links are lines."""

from __future__ import annotations

import pytest
import torch

from pycomm.collectives.bucket import FINGERPRINT_PLACES
from pycomm.training.cost import planning
from pycomm.training.cost.pricing import PricedLine, rehearse


def test_lines() -> None:
    line = PricedLine.through((100, 1100), [1.0, 2.0])
    assert (line.at(100), line.at(1100), line.at(2100)) == pytest.approx((1.0, 2.0, 3.0))
    assert PricedLine.through((100, 1100), [2.0, 1.0]) == PricedLine(2.0, 0.0)


@pytest.mark.parametrize("size", [1, 2, 4, 9])
@pytest.mark.parametrize("name", planning.METHODS)
def test_a_rehearsal_sends_what_the_method_sends(size: int, name: str) -> None:
    costs = rehearse(planning.METHODS[name], [torch.zeros(200, 300), torch.zeros(50, 70)], size)
    n = 200 * 300 + 50 * 70
    assert costs.local > 0
    powersgd = 16 * 620 + 2 * 4 * FINGERPRINT_PLACES
    wanted = {"dense": 4 * n, "fp16": 2 * n, "int8": 1.03 * n, "powersgd(4)": powersgd, "dgc(1%)": 0.051 * n}
    wanted |= {"chunktopk(64)": 84 * n / 4096 + 128}
    if name in wanted:
        assert costs.num_bytes(size) == pytest.approx(wanted[name], rel=0.05)

"""What has to come of torch's suite on "pycomm": the page of the documentation is rendered from this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """How many tests a release of torch has, and how many of them pass here."""

    tests: int
    passed: int


COUNTS = {"2.13": Counts(285, 127), "2.15": Counts(285, 127)}
"""By torch's release."""

EXCEPTIONS: dict[str, str] = {}
"""Tests that run and fail on "pycomm", and why that is right or cannot be helped."""

LEFT_OUT = {
    r"CUDA|N(ccl|CCL)|nccl|[Aa]ccelerator": "wants GPUs, or is for NCCL alone",
    r"^https://github.com/pytorch/pytorch/issues/|failing|flak": "switched off in PyTorch itself, for every backend",
    r"^no torchvision$": "wants torchvision",
}
"""Reasons for which tests may be left out, as the suite words them, and what they come to."""

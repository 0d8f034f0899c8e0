"""Loops over the gradients of a bucket, and counts of them as backward accumulates them, in the extension.

A model of many small parameters has a hook called for each of them in each pass, and all gradients of a bucket looked
at several times. :class:`GradientCounter` makes the hook, which counts, or calls Python if there is more to do: for the
first gradient of a pass, and when a bucket is complete.
"""

from __future__ import annotations

from pycomm._native import (
    FirstKinds,
    GradientCounter,
    GradientCounts,
    PassGate,
    addresses_of,
    dropped_views,
    grads_of,
    hand_out_views,
    handler_of,
    references,
    show_views,
    trim_memory,
)

__all__ = [
    "FirstKinds",
    "GradientCounter",
    "GradientCounts",
    "PassGate",
    "addresses_of",
    "dropped_views",
    "grads_of",
    "hand_out_views",
    "handler_of",
    "references",
    "show_views",
    "trim_memory",
]

"""Counts of gradients as backward accumulates them, kept by the extension.

A model of many small parameters has a hook called for each of them in each pass. :class:`GradientCounter` counts, and
says whether there is more to do: for the first gradient of a pass, and when a bucket is complete.
"""

from __future__ import annotations

from pycomm._native import GradientCounter, GradientCounts, PassGate, handler_of

__all__ = ["GradientCounter", "GradientCounts", "PassGate", "handler_of"]

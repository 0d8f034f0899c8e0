"""Loops over the gradients of a bucket, and counts of them as backward accumulates them, in the extension.

A model of many small parameters has a hook called for each of them in each pass, and all gradients of a bucket looked
at several times. :class:`GradientCounter` makes the hook, which counts, or calls Python if there is more to do: for the
first gradient of a pass, and when a bucket is complete.
"""

from __future__ import annotations

from pycomm._native import FirstKinds as FirstKinds
from pycomm._native import GradientCounter as GradientCounter
from pycomm._native import GradientCounts as GradientCounts
from pycomm._native import PassGate as PassGate
from pycomm._native import addresses_of as addresses_of
from pycomm._native import dropped_views as dropped_views
from pycomm._native import grads_of as grads_of
from pycomm._native import hand_out_views as hand_out_views
from pycomm._native import handler_of as handler_of
from pycomm._native import references as references
from pycomm._native import show_views as show_views

"""Imported once, by the process that ranks are forked from."""

from __future__ import annotations

import ctypes
import gc
import signal

import torch._dynamo  # noqa: F401  # which an optimizer's first step would import, in every process

import pycomm.collectives.backend.process_group
import pycomm.training.checkpoint
import pycomm.training.cost.auto
import pycomm.training.reducer  # noqa: F401
import tests.chaos.ranks

# Ranks keep this process, as multiprocessing makes it, alive; so it must end with the judge, and they with it.
ctypes.CDLL(None).prctl(tests.chaos.ranks.PR_SET_PDEATHSIG, signal.SIGKILL)
# What is imported stays out of the collections of the ranks: each would take tenths of a second, and copy every page.
gc.collect()
gc.freeze()

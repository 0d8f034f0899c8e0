"""Pipelines as tables: generated, proven, priced, and exchanged with torch. Needs numpy only.

    table = pipeline.one_f_one_b(4, 16)                        # who does what, in which order
    proof = pipeline.verify(table)                             # everything once, in order, without a deadlock
    pipeline.simulate(table, forward=1.0, backward=2.0).bubble  # the fraction of time in which ranks idle

See docs/parallel.md.
"""

from pycomm.schedule.pipeline.cells import from_csv, to_csv
from pycomm.schedule.pipeline.dualpipe import dualpipe_v
from pycomm.schedule.pipeline.interleaved import interleaved
from pycomm.schedule.pipeline.names import by_name, names
from pycomm.schedule.pipeline.one_f_one_b import gpipe, one_f_one_b
from pycomm.schedule.pipeline.picture import picture
from pycomm.schedule.pipeline.simulate import Simulation, simulate
from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Action, Pipeline
from pycomm.schedule.pipeline.verify import Proof, verify
from pycomm.schedule.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_v
from pycomm.schedule.verify import ScheduleError

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "FORWARD",
    "WEIGHTS",
    "Action",
    "Pipeline",
    "Proof",
    "ScheduleError",
    "Simulation",
    "by_name",
    "dualpipe_v",
    "from_csv",
    "gpipe",
    "interleaved",
    "names",
    "one_f_one_b",
    "picture",
    "simulate",
    "to_csv",
    "verify",
    "zero_bubble_h1",
    "zero_bubble_v",
]

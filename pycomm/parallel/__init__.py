"""Models split over devices: inside an operator, between operators, and both together with data parallelism.

    mesh = pycomm.parallel.mesh(pp=2, dp=2, tp=2)                  # eight ranks
    pycomm.parallel.split(model, mesh, "auto")                     # layers over mesh["tp"]
    pycomm.attach(optimizer, model, process_group=mesh["dp"])      # gradients over mesh["dp"]

torch executes the model (DTensor, ``torch.distributed.tensor.parallel``, ``torch.distributed.pipelining``) over the
backend "pycomm". This package assigns the parts to devices, verifies schedules before they run, and predicts memory and
time. See docs/parallel.md.
"""

from pycomm.parallel import auto, functional
from pycomm.parallel.branches import Branches, Exchange
from pycomm.parallel.cut import cut
from pycomm.parallel.experts import Experts, ExpertsOutput, parameters_by_group
from pycomm.parallel.mesh import group_over, mesh
from pycomm.parallel.pipeline import Pipeline
from pycomm.parallel.plan import Plan
from pycomm.parallel.split import split

__all__ = [
    "Branches",
    "Exchange",
    "Experts",
    "ExpertsOutput",
    "Pipeline",
    "Plan",
    "auto",
    "cut",
    "functional",
    "group_over",
    "mesh",
    "parameters_by_group",
    "split",
]

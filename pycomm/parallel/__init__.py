"""Models split over devices: inside an operator, between operators, and both together with data parallelism.

    mesh = pycomm.parallel.mesh(pp=2, dp=2, tp=2)                  # eight ranks
    pycomm.parallel.split(model, mesh, "auto")                     # layers over mesh["tp"]
    pycomm.attach(optimizer, model, process_group=mesh["dp"])      # gradients over mesh["dp"]

torch executes the model (DTensor, ``torch.distributed.tensor.parallel``, ``torch.distributed.pipelining``) over the
backend "pycomm". This package assigns the parts to devices, and verifies schedules before they run. See
docs/parallel.md.
"""

from pycomm.checks import public_names as _public_names
from pycomm.parallel import auto as auto
from pycomm.parallel import functional as functional
from pycomm.parallel.branches import Branches as Branches
from pycomm.parallel.branches import Exchange as Exchange
from pycomm.parallel.cut import cut as cut
from pycomm.parallel.experts import Experts as Experts
from pycomm.parallel.experts import ExpertsOutput as ExpertsOutput
from pycomm.parallel.experts import parameters_by_group as parameters_by_group
from pycomm.parallel.mesh import group_over as group_over
from pycomm.parallel.mesh import mesh as mesh
from pycomm.parallel.pipeline import Pipeline as Pipeline
from pycomm.parallel.split import split as split

__all__ = _public_names(globals(), "auto", "functional")

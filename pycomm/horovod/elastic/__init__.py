"""Training that goes on when ranks are lost."""

from pycomm.horovod.basics import init, shutdown
from pycomm.horovod.elastic.running import run, run_fn
from pycomm.horovod.elastic.sampler import ElasticSampler
from pycomm.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]

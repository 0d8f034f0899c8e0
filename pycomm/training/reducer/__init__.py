"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.training.reducer.attach import attach as attach
from pycomm.training.reducer.autograd_hooks import FinalCallback as FinalCallback
from pycomm.training.reducer.module_buffers import AVERAGED as AVERAGED
from pycomm.training.reducer.module_buffers import BufferContent as BufferContent
from pycomm.training.reducer.module_buffers import BufferSync as BufferSync
from pycomm.training.reducer.module_buffers import synced_by as synced_by
from pycomm.training.reducer.parameters import Ignored as Ignored
from pycomm.training.reducer.reducer import AttachedTraining as AttachedTraining
from pycomm.training.reducer.reducer import Reducer as Reducer
from pycomm.training.reducer.settings import Sharding as Sharding
from pycomm.training.reducer.settings import Survive as Survive
from pycomm.training.reducer.settings import Tuning as Tuning
from pycomm.training.reducer.settings import checked_buffers as checked_buffers

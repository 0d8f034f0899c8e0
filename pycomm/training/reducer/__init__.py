"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.training.reducer.attach import attach as attach
from pycomm.training.reducer.autograd_hooks import FinalCallback as FinalCallback
from pycomm.training.reducer.module_buffers import AVERAGED as AVERAGED
from pycomm.training.reducer.module_buffers import BufferContent as BufferContent
from pycomm.training.reducer.module_buffers import BufferSync as BufferSync
from pycomm.training.reducer.module_buffers import synced_by as synced_by
from pycomm.training.reducer.parameters import Ignored as Ignored
from pycomm.training.reducer.rank_flags import ALIKE as ALIKE
from pycomm.training.reducer.rank_flags import RankFlags as RankFlags
from pycomm.training.reducer.rank_flags import Record as Record
from pycomm.training.reducer.rank_flags import SignalStop as SignalStop
from pycomm.training.reducer.rank_flags import StopRequest as StopRequest
from pycomm.training.reducer.rank_flags import loops_of as loops_of
from pycomm.training.reducer.rank_flags import raise_different_groups as raise_different_groups
from pycomm.training.reducer.rank_flags import raise_out_of_loop as raise_out_of_loop
from pycomm.training.reducer.rank_flags import stop_on_signal as stop_on_signal
from pycomm.training.reducer.reducer import AttachedTraining as AttachedTraining
from pycomm.training.reducer.reducer import Reducer as Reducer
from pycomm.training.reducer.replica_differences import Hashes as Hashes
from pycomm.training.reducer.replica_differences import ReplicaDifferences as ReplicaDifferences
from pycomm.training.reducer.replica_differences import StepEvidence as StepEvidence
from pycomm.training.reducer.replica_differences import is_comparison_due as is_comparison_due
from pycomm.training.reducer.settings import Sharding as Sharding
from pycomm.training.reducer.settings import Survive as Survive
from pycomm.training.reducer.settings import Tuning as Tuning
from pycomm.training.reducer.settings import checked_buffers as checked_buffers

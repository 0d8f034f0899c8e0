"""Horovod's interface to PyTorch, version 0.28.1, over pycomm.

    import pycomm.horovod as hvd

in place of ``import horovod.torch as hvd``; or :func:`install` once, before anything imports Horovod.
"""

from pycomm.checks import public_names as _public_names
from pycomm.horovod import elastic as elastic
from pycomm.horovod.basics import ccl_built as ccl_built
from pycomm.horovod.basics import cross_rank as cross_rank
from pycomm.horovod.basics import cross_size as cross_size
from pycomm.horovod.basics import cuda_built as cuda_built
from pycomm.horovod.basics import ddl_built as ddl_built
from pycomm.horovod.basics import gloo_built as gloo_built
from pycomm.horovod.basics import gloo_enabled as gloo_enabled
from pycomm.horovod.basics import init as init
from pycomm.horovod.basics import is_homogeneous as is_homogeneous
from pycomm.horovod.basics import is_initialized as is_initialized
from pycomm.horovod.basics import local_rank as local_rank
from pycomm.horovod.basics import local_size as local_size
from pycomm.horovod.basics import mpi_built as mpi_built
from pycomm.horovod.basics import mpi_enabled as mpi_enabled
from pycomm.horovod.basics import mpi_threads_supported as mpi_threads_supported
from pycomm.horovod.basics import nccl_built as nccl_built
from pycomm.horovod.basics import rank as rank
from pycomm.horovod.basics import rocm_built as rocm_built
from pycomm.horovod.basics import shutdown as shutdown
from pycomm.horovod.basics import size as size
from pycomm.horovod.basics import start_timeline as start_timeline
from pycomm.horovod.basics import stop_timeline as stop_timeline
from pycomm.horovod.collectives import poll as poll
from pycomm.horovod.collectives import synchronize as synchronize
from pycomm.horovod.functions import allgather_object as allgather_object
from pycomm.horovod.functions import broadcast_object as broadcast_object
from pycomm.horovod.functions import broadcast_optimizer_state as broadcast_optimizer_state
from pycomm.horovod.functions import broadcast_parameters as broadcast_parameters
from pycomm.horovod.installed import install as install
from pycomm.horovod.names import Adasum as Adasum
from pycomm.horovod.names import Average as Average
from pycomm.horovod.names import Compression as Compression
from pycomm.horovod.names import HorovodInternalError as HorovodInternalError
from pycomm.horovod.names import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from pycomm.horovod.names import InvalidRequestError as InvalidRequestError
from pycomm.horovod.names import Max as Max
from pycomm.horovod.names import Min as Min
from pycomm.horovod.names import Product as Product
from pycomm.horovod.names import Sum as Sum
from pycomm.horovod.operations import allgather as allgather
from pycomm.horovod.operations import allgather_async as allgather_async
from pycomm.horovod.operations import allreduce as allreduce
from pycomm.horovod.operations import allreduce_ as allreduce_
from pycomm.horovod.operations import allreduce_async as allreduce_async
from pycomm.horovod.operations import allreduce_async_ as allreduce_async_
from pycomm.horovod.operations import alltoall as alltoall
from pycomm.horovod.operations import alltoall_async as alltoall_async
from pycomm.horovod.operations import barrier as barrier
from pycomm.horovod.operations import broadcast as broadcast
from pycomm.horovod.operations import broadcast_ as broadcast_
from pycomm.horovod.operations import broadcast_async as broadcast_async
from pycomm.horovod.operations import broadcast_async_ as broadcast_async_
from pycomm.horovod.operations import grouped_allgather as grouped_allgather
from pycomm.horovod.operations import grouped_allgather_async as grouped_allgather_async
from pycomm.horovod.operations import grouped_allreduce as grouped_allreduce
from pycomm.horovod.operations import grouped_allreduce_ as grouped_allreduce_
from pycomm.horovod.operations import grouped_allreduce_async as grouped_allreduce_async
from pycomm.horovod.operations import grouped_allreduce_async_ as grouped_allreduce_async_
from pycomm.horovod.operations import grouped_reducescatter as grouped_reducescatter
from pycomm.horovod.operations import grouped_reducescatter_async as grouped_reducescatter_async
from pycomm.horovod.operations import join as join
from pycomm.horovod.operations import reducescatter as reducescatter
from pycomm.horovod.operations import reducescatter_async as reducescatter_async
from pycomm.horovod.operations import sparse_allreduce_async as sparse_allreduce_async
from pycomm.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from pycomm.horovod.process_sets import ProcessSet as ProcessSet
from pycomm.horovod.process_sets import add_process_set as add_process_set
from pycomm.horovod.process_sets import global_process_set as global_process_set
from pycomm.horovod.process_sets import remove_process_set as remove_process_set
from pycomm.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from pycomm.horovod.util import check_extension as check_extension

__all__ = _public_names(globals(), "elastic")

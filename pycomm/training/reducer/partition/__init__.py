"""The optimizer's step, divided among the ranks: each steps its own part, and sends the new values to all.

``attach`` imports it for ``shard=``.
"""

from pycomm.training.reducer.partition.comparison import settings_of as settings_of
from pycomm.training.reducer.partition.delivery import HostPartition as HostPartition
from pycomm.training.reducer.partition.delivery import SpreadPartition as SpreadPartition
from pycomm.training.reducer.partition.delivery import memory_of_all as memory_of_all
from pycomm.training.reducer.partition.independent import require_shardable as require_shardable
from pycomm.training.reducer.partition.sharding import StepPartition as StepPartition

"""Compression for models that torch itself makes data-parallel.

:func:`register` gives DistributedDataParallel a communication hook; :func:`register_hsdp` gives FSDP2's
``fully_shard`` an exchange between the replicas of its shards. Both use any method of
:mod:`pycomm.compression`, with state that is kept by parameter name and changes only in finite steps.
"""

from pycomm.ddp.hook import HookHandle, register
from pycomm.ddp.hsdp import HsdpHandle, register_hsdp

__all__ = ["HookHandle", "HsdpHandle", "register", "register_hsdp"]

"""``python -m bench.collectives``: all_reduce on one host. Others are ``.nccl_tests``, ``.choices`` and ``.scale``."""

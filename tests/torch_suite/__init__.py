"""torch's own tests of torch.distributed, run on a backend by name: ``python -m tests.torch_suite --backend pycomm``.

The tests come with torch (``torch.testing._internal.distributed.distributed_test``), which decides by the backend's
name what runs: under a name it does not know, next to nothing. Here it is told Gloo's while the tests are collected,
and the name of the backend under test afterwards; and the all-to-all tests for CPUs run, which it keeps for MPI.
"""

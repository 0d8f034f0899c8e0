"""Benches: ``python -m bench.kernels``, ``python -m bench.collectives``, ``python -m bench.training``.

Each verifies before it times, measures its peers and its floor in the same run, turn by turn, and
prints medians with their spread. ``--json FILE`` also writes the figures with the versions in use.
"""

"""Benches, a folder each: ``python -m bench.kernels``, ``.collectives``, ``.training``, ``.slow_network``,
``.between_hosts``, ``.growth``, ``.chaos``, ``.gpu``.

More of collectives: ``.nccl_tests``, ``pycomm bench`` with MPI and busy processes; ``.scale``, with many ranks;
``.choices``, what "auto" takes. ``bench.slow_network.link``: simulation against links made slow (root).

Each verifies before it times, measures its peers and its floor in the same run, turn by turn, and prints medians with
their spread. ``--json FILE`` also writes the figures with the versions in use. ``bench.gpu`` checks, too, and always
writes a report, which ``python -m bench.gpu.report`` prints again.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

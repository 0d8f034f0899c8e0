"""``python -m bench.kernels``: the CPU kernels against torch; the cases are also those of ``bench.gpu``."""

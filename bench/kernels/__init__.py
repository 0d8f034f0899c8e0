"""``python -m bench.kernels``: the CPU kernels against torch, of cases that are those of the GPU's bench, too.

``.host`` measures the host's work of a step.
"""

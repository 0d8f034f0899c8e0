"""``python -m bench.kernels``: the CPU kernels against torch, in the same cases as the GPU's bench.

``.host`` measures the host's work of a step.
"""

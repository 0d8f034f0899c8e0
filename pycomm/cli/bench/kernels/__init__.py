"""``pycomm bench kernels``: the CPU kernels against torch; the cases are also those of the GPU's bench."""

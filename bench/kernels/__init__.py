"""``python -m bench.kernels``: what ``pycomm bench kernels`` does; and ``.host``, the host's work of a step."""

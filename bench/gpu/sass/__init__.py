"""Checks of the machine code that the CUDA kernels become; see command.py."""

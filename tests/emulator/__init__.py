"""CUDA kernels on the host: emulator.h says how."""

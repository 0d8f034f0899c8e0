"""pycomm: fast data-parallel training for PyTorch."""
from pycomm import kernels

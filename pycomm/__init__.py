"""pycomm: fast data-parallel training for PyTorch."""
from pycomm import kernels
from pycomm.communicator import Communicator
from pycomm.errors import CommError

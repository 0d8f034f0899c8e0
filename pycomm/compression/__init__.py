"""How a bucket of gradients travels: one file per method.

A method is a frozen configuration (``NoCompression``, ``FP16``, ``TopK`` ...) that makes an
``Exchange`` for every bucket; the exchange holds the state, if there is any.
"""

from pycomm.compression.base import Compression
from pycomm.compression.half import BF16, FP16
from pycomm.compression.none import NoCompression
from pycomm.compression.topk import TopK

__all__ = ["BF16", "FP16", "Compression", "NoCompression", "TopK"]

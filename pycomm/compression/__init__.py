"""How a bucket of gradients travels: one file per method.

A method is a frozen configuration (``NoCompression``, ``FP16``, ``DGC`` ...) that makes an
``Exchange`` for every bucket; the exchange holds the state, if there is any. Methods with error
feedback are a ``FeedbackExchange`` (feedback.py) around a ``Wire`` of their own.
"""

from pycomm.compression.auto import Auto
from pycomm.compression.base import Compression
from pycomm.compression.dgc import DGC
from pycomm.compression.half import BF16, FP16
from pycomm.compression.int8 import Int8
from pycomm.compression.none import NoCompression
from pycomm.compression.onebit import OneBit
from pycomm.compression.powersgd import PowerSGD
from pycomm.compression.qsgd import QSGD
from pycomm.compression.randomk import RandomK
from pycomm.compression.terngrad import TernGrad
from pycomm.compression.topk import TopK

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "Auto",
    "Compression",
    "Int8",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "TernGrad",
    "TopK",
]

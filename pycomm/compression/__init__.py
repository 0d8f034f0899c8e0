"""Gradient compression: how a bucket of gradients is sent.

Four parts turn gradients into bytes:

- ``Bucket`` (pycomm/collectives/bucket.py): gradients that are sent together, in one flat piece of memory.
- ``Exchange`` (base.py): the reduction of one bucket, with the state it keeps between steps. It sends the
  gradients as they are (``DenseExchange``, dense.py), or adds them to the residual of earlier steps and
  sends a part of the sum (``CodecExchange``, feedback.py).
- ``BaseCodec`` (codec.py): the form in which that part is sent.
- ``Messages`` (messages.py): the bytes, gathered from all ranks (``GatheredMessages``) or summed over
  them (``SummedMessage``). Quantized ones are summed by ``TwoHopCodec`` (two_hop.py).

A method, such as ``FP16`` or ``DGC``, is a frozen configuration that makes the exchange of a bucket; see
``methods/``. ``sparse/`` has the codec for selected entries, and three ways to sum such entries over the
ranks. Custom methods derive from ``CodecMethod``, or from ``Method`` if they keep no state:
docs/extending/compression_method.md. ``pycomm.training.cost`` estimates what a method costs on a network.
"""

from pycomm.compression.base import Compression, Exchange, Method
from pycomm.compression.codec import Accumulated, BaseCodec
from pycomm.compression.dense import NoCompression
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import GatheredMessages, SummedMessage
from pycomm.compression.methods.chunktopk import ChunkTopK
from pycomm.compression.methods.dgc import DGC
from pycomm.compression.methods.half import BF16, FP16
from pycomm.compression.methods.onebit import OneBit
from pycomm.compression.methods.powersgd import PowerSGD
from pycomm.compression.methods.quantized import FP8, QSGD, Int4, Int8, TernGrad
from pycomm.compression.methods.randomk import RandomK
from pycomm.compression.methods.topk import TopK
from pycomm.compression.report import Report, Told

__all__ = [
    "BF16",
    "DGC",
    "FP8",
    "FP16",
    "QSGD",
    "Accumulated",
    "BaseCodec",
    "ChunkTopK",
    "CodecMethod",
    "Compression",
    "Exchange",
    "GatheredMessages",
    "Int4",
    "Int8",
    "Method",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Report",
    "SummedMessage",
    "TernGrad",
    "Told",
    "TopK",
]

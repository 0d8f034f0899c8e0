"""Gradient compression: how a bucket of gradients travels.

A gradient meets four things on its way to bytes:

- ``Bucket`` (pycomm/bucket.py): gradients that travel together, in one flat piece of memory.
- ``Exchange`` (base.py): one bucket's reduction, step by step, with the state it keeps between steps.
  Either it sends the gradients as they are (``DenseExchange``), or it adds them to what earlier steps
  left unsent and sends a part of the sum (``CodecExchange``, feedback.py).
- ``Codec`` (codec.py): the form in which that part is sent.
- ``Messages`` (messages.py): the bytes, gathered from all ranks (``GatheredMessages``) or summed over
  them (``SummedMessage``).

A method, such as ``FP16`` or ``DGC``, is a frozen configuration that makes the exchange of a bucket;
``methods/`` has a file for each. ``sparse/`` has the codec of those that send selected entries, and the
three ways to sum such entries over the ranks. A method of your own derives from ``CodecMethod``, or from
``Method`` if it keeps nothing from step to step: docs/extending/compression_method.md. What a method costs
on a network is pycomm.cost's subject.
"""

from pycomm.compression.base import Compression, Exchange, Method
from pycomm.compression.codec import Accumulated, BaseCodec
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import GatheredMessages, SummedMessage
from pycomm.compression.methods.dgc import DGC
from pycomm.compression.methods.half import BF16, FP16
from pycomm.compression.methods.int8 import Int8
from pycomm.compression.methods.none import NoCompression
from pycomm.compression.methods.onebit import OneBit
from pycomm.compression.methods.powersgd import PowerSGD
from pycomm.compression.methods.qsgd import QSGD
from pycomm.compression.methods.randomk import RandomK
from pycomm.compression.methods.terngrad import TernGrad
from pycomm.compression.methods.topk import TopK
from pycomm.compression.report import Report, Told

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "Accumulated",
    "BaseCodec",
    "CodecMethod",
    "Compression",
    "Exchange",
    "GatheredMessages",
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

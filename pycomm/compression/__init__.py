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
``methods/``. ``sparse/`` has the codec for selected entries, and two ways to sum such entries over the
ranks. Custom methods derive from ``CodecMethod``, or from ``Method`` if they keep no state:
docs/extending/compression_method.md. ``pycomm.training.cost`` estimates what a method costs on a network.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from pycomm.checks import lazy_names as _lazy_names

if _TYPE_CHECKING:  # imported at first use: `attach` needs few of them
    from pycomm.compression.base import Compression as Compression
    from pycomm.compression.base import Exchange as Exchange
    from pycomm.compression.base import Method as Method
    from pycomm.compression.codec import Accumulated as Accumulated
    from pycomm.compression.codec import BaseCodec as BaseCodec
    from pycomm.compression.dense import NoCompression as NoCompression
    from pycomm.compression.feedback import CodecMethod as CodecMethod
    from pycomm.compression.messages import GatheredMessages as GatheredMessages
    from pycomm.compression.messages import SummedMessage as SummedMessage
    from pycomm.compression.methods.chunktopk import ChunkTopK as ChunkTopK
    from pycomm.compression.methods.dgc import DGC as DGC
    from pycomm.compression.methods.half import BF16 as BF16
    from pycomm.compression.methods.half import FP16 as FP16
    from pycomm.compression.methods.onebit import OneBit as OneBit
    from pycomm.compression.methods.powersgd import PowerSGD as PowerSGD
    from pycomm.compression.methods.quantized import FP8 as FP8
    from pycomm.compression.methods.quantized import QSGD as QSGD
    from pycomm.compression.methods.quantized import Int4 as Int4
    from pycomm.compression.methods.quantized import Int8 as Int8
    from pycomm.compression.methods.quantized import TernGrad as TernGrad
    from pycomm.compression.methods.randomk import RandomK as RandomK
    from pycomm.compression.methods.topk import TopK as TopK
    from pycomm.compression.report import Report as Report
    from pycomm.compression.report import Told as Told

_HOMES = {
    "base": "Compression Exchange Method",
    "codec": "Accumulated BaseCodec",
    "dense": "NoCompression",
    "feedback": "CodecMethod",
    "messages": "GatheredMessages SummedMessage",
    "methods.chunktopk": "ChunkTopK",
    "methods.dgc": "DGC",
    "methods.half": "BF16 FP16",
    "methods.onebit": "OneBit",
    "methods.powersgd": "PowerSGD",
    "methods.quantized": "FP8 QSGD Int4 Int8 TernGrad",
    "methods.randomk": "RandomK",
    "methods.topk": "TopK",
    "report": "Report Told",
}

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())

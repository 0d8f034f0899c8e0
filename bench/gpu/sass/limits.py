"""Limits of each kernel's machine code: what it has reached, so that no change loses it unnoticed.

The first entry that fits a kernel's name is its; every kernel has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bench.gpu.sass.kernels import Kernel


@dataclass(frozen=True)
class Limit:
    """Limit of the kernels whose name fits ``pattern``."""

    pattern: str
    registers: int
    """Most registers."""
    blocks: int
    """Fewest blocks that run at once on a multiprocessor."""
    loads: int = 0
    """Fewest loads of 16 bytes before the first wait, in every loop that has any."""
    spilled: int = 0
    """Most bytes spilled."""
    stack: int = 0
    """Most bytes of stack."""

    def complaints(self, kernel: Kernel) -> Iterator[str]:
        """Yield which figures of ``kernel`` are beyond the limit."""
        found = kernel.resources
        if found.registers > self.registers:
            yield f"{kernel.name}: {found.registers} registers, at most {self.registers} are wanted"
        if found.blocks < self.blocks:
            yield f"{kernel.name}: {found.blocks} blocks per multiprocessor, at least {self.blocks} are wanted"
        if kernel.packet_loads < self.loads:
            yield f"{kernel.name}: {kernel.packet_loads} loads before a wait, at least {self.loads} are wanted"
        if found.spilled > self.spilled:
            yield f"{kernel.name}: {found.spilled} bytes spilled, at most {self.spilled} are wanted"
        if found.stack > self.stack:
            yield f"{kernel.name}: {found.stack} bytes of stack, at most {self.stack} are wanted"


# Registers have a little room: another release of nvcc gives them out otherwise.
LIMITS = (
    Limit("absmax/*", registers=40, blocks=6, loads=3),
    Limit("accumulate/*", registers=104, blocks=2, loads=8),
    Limit("chunks/pack_chunks_kernel", registers=80, blocks=3, loads=4),
    Limit("chunks/*", registers=40, blocks=6),
    Limit("entries/unpack_kernel<*>", registers=48, blocks=5),
    Limit("entries/*", registers=40, blocks=6),
    Limit("hashes/add_up_kernel<*>", registers=32, blocks=8),
    Limit("hashes/*", registers=48, blocks=5, loads=4),
    Limit("indices/*", registers=40, blocks=6),
    Limit("norms/add_up_kernel<*>", registers=32, blocks=8),
    Limit("norms/*", registers=40, blocks=6, loads=3),
    Limit("pack/unpack_kernel<float>", registers=64, blocks=4, loads=4),
    Limit("pack/*", registers=48, blocks=5, loads=4),
    Limit("quantize/dequantize_kernel<*>", registers=64, blocks=4),
    Limit("quantize/quantize_kernel<*,0>", registers=64, blocks=4, loads=4),
    Limit("quantize/quantize_kernel<*,1>", registers=48, blocks=5, loads=4),
    # Two packets of the remainder, and codes of four contributions, are 32 KiB each. With codes of 8 bits from 8 ranks
    # it reads 12 bytes per element and writes 5: it wants 12/17 of what command.py derives, 14.3 KiB.
    Limit("quantize/requantize_kernel<*>", registers=64, blocks=4, loads=2),
    Limit("reduce/reduce_kernel<OtherOp,*int8>", registers=64, blocks=4, loads=4),  # one packet at a time
    Limit("reduce/reduce_kernel<*,uint8>", registers=96, blocks=2, loads=6),
    Limit("reduce/reduce_kernel<AddOp,uint64>", registers=80, blocks=3, loads=6),
    Limit("reduce/*", registers=64, blocks=4, loads=3),
    Limit("scatter_add/*", registers=40, blocks=6),
    Limit("signs/pack_signs_kernel", registers=32, blocks=8, loads=4),
    Limit("signs/unpack_signs_kernel", registers=48, blocks=5),
    Limit("sparsify/*", registers=128, blocks=2, loads=4),
    Limit("step/add_up_kernel<*>", registers=32, blocks=8),
    Limit("step/count_kernel", registers=40, blocks=6),
    Limit("step/step_kernel<LambApply,*>", registers=64, blocks=4, loads=3),
    Limit("step/step_kernel<Momentum,float>", registers=64, blocks=4, loads=6),
    Limit("step/step_kernel<LambMoments,double>", registers=96, blocks=2, loads=5),
    Limit("step/step_kernel<*>", registers=80, blocks=3, loads=5),
    Limit("table/*", registers=32, blocks=8),
    Limit("topk/*", registers=128, blocks=2, loads=4),
)

AT_FULL_SPEED = (
    *("absmax/*", "accumulate/*", "hashes/h*", "norms/n*", "pack/*", "quantize/q*", "reduce/*", "signs/p*"),
    *(f"step/step_kernel<{rule},*>" for rule in ("Momentum", "Adam", "Rmsprop", "Adagrad", "LambApply")),
    "step/step_kernel<LambMoments,float>",
)
"""Kernels that are to move memory as fast as a copy does; the test asks of them for twice what command.py derives."""


def limit_of(kernel: Kernel) -> Limit | None:
    """Return the limit of ``kernel``, ``None`` if the table has forgotten it."""
    return next((limit for limit in LIMITS if fnmatchcase(kernel.name, limit.pattern)), None)

"""What the fuzz of the kernels holds against a call: results, errors, and memory that is none of its business."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

import pycomm._native as _native
from pycomm import kernels
from tests.kernels.fuzz_arrays import Slot, materialised
from tests.kernels.fuzz_calls import Call, Refusal, Wanted, assert_close
from tests.kernels.fuzz_junk import names_of
from tests.kernels.fuzz_memory import Block

_RAW = ("incompatible function arguments", "Invoked with", "Unable to cast", "pybind11", "_native")


class Violation(AssertionError):  # noqa: N818
    """Of the contract. ``kind``: in few words, the same for the same fault."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


def _clashes(call: Call, written: Slot, other: Slot) -> bool:
    first, last = written.span
    begin, end = other.span
    if written is other or not (written.is_dense and other.is_dense) or first >= end or begin >= last:
        return False
    if other.written and call.slots.index(other) < call.slots.index(written):
        return False  # found once is enough
    here = [at for a, b, at in call.shared if a is written and b is other]
    there = [-at for a, b, at in call.shared if a is other and b is written]
    return begin - first not in here + there


def overlaps(call: Call) -> list[Refusal]:
    """What the rule of overlaps says against the arrays of a call that has been placed."""
    slots = [slot for slot in call.slots if slot.count > 0]
    pairs = [(a, b) for a in slots if a.written for b in slots if _clashes(call, a, b)]
    return [Refusal(names_of(a.name, b.name), (ValueError,), "overlaps") for a, b in pairs]


class _Before:
    """The memory of a call before it."""

    def __init__(self, call: Call) -> None:
        blocks: dict[int, Block] = {}
        for slot in call.slots:
            assert slot.block is not None
            blocks[id(slot.block)] = slot.block
        self._kept = [(block, block.snapshot()) for block in blocks.values()]

    def read(self, slot: Slot) -> torch.Tensor:
        return slot.read(next(kept for block, kept in self._kept if block is slot.block))

    def require_unchanged(self, but: list[Slot], kind: str) -> None:
        """Of everything except some slots."""
        for block, kept in self._kept:
            now = block.snapshot()
            for slot in but:
                if slot.block is block:
                    part = slice(slot.offset, slot.offset + slot.extent * slot.itemsize)
                    now[part] = kept[part]
            where = np.nonzero(now != kept)[0]
            if len(where):
                raise Violation(kind, f"{len(where)} bytes from {where[0] - block.begin} on in {block.address:#x}")


def _names(message: str, names: tuple[str, ...]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names)


def _fits(error: Exception, refusal: Refusal) -> bool:
    kinds = (*refusal.kinds, MemoryError)
    message = str(error)
    return isinstance(error, kinds) and refusal.text in message and _names(message, refusal.names)


def _judge_error(error: Exception, refusals: list[Refusal], before: _Before, call: Call) -> None:
    kind, message = type(error).__name__, str(error)
    if type(error) not in (TypeError, ValueError, MemoryError):
        raise Violation(f"raised a {kind}", message) from error
    if any(text in message for text in _RAW):
        raise Violation("raised what pybind11 says", message) from error
    if not refusals:
        raise Violation(f"refused a valid call with a {kind}", message) from error
    matching = [refusal for refusal in refusals if _fits(error, refusal)]
    spoils = any(refusal.spoils for refusal in matching or refusals)
    before.require_unchanged([slot for slot in call.slots if slot.written and spoils], "wrote and then raised")
    if not matching:
        wanted = [(refusal.names, [k.__name__ for k in refusal.kinds], refusal.text) for refusal in refusals]
        named = any(_names(message, refusal.names) for refusal in refusals)
        fault = f"raised a {kind} that is not right" if named else "raised what names no argument"
        raise Violation(fault, f"{message!r}, wanted one of {wanted}") from error


def _judge_result(wanted: Wanted, result: Any, before: _Before) -> None:
    written = [out.slot for out in wanted.outputs]
    before.require_unchanged(written + wanted.unknown, "wrote where it must not")
    try:
        for out in wanted.outputs:
            should = (out.wanted if isinstance(out.wanted, torch.Tensor) else out.wanted()).flatten()
            assert_close(out.slot.read(), should, out.rtol)
        wanted.result(result)
    except AssertionError as error:
        raise Violation("wrong result", str(error)) from error


def check(call: Call) -> None:
    """Make a call that has been placed and filled. Violation if it does what it must not."""
    before = _Before(call)
    certain = call.refusals + overlaps(call)
    faults = [] if any(refusal.certain for refusal in certain) or call.vague else call.faults(before.read)
    refusals = certain + faults
    if call.vague:
        coding = call.function in ("pack_indices", "unpack_indices", "pack_entries", "unpack_entries")
        anything = names_of(*call.arguments, *(slot.name for slot in call.slots))
        refusals.append(Refusal(anything, certain=False, spoils=coding))
    arguments = {name: materialised(value) for name, value in call.arguments.items()}
    widest = _native.simd()
    kernels.set_num_threads(call.threads)
    _native.select_simd(call.simd or widest)
    try:
        result = getattr(kernels, call.function)(**arguments)
        if call.function == "set_num_threads" and not refusals:
            _judge_result(call.wanted(before.read), result, before)
    except Violation:
        raise
    except Exception as error:
        _judge_error(error, refusals, before, call)
        return
    finally:
        kernels.set_num_threads(None)
        _native.select_simd(widest)
    if any(refusal.certain for refusal in refusals):
        raise Violation("accepted what it must refuse", "; ".join(call.story))
    if call.vague:
        before.require_unchanged([slot for slot in call.slots if slot.written], "wrote where it must not")
    elif call.function != "set_num_threads":
        _judge_result(call.wanted(before.read), result, before)

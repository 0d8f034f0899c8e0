"""What the fuzz of the kernels does to valid calls: wrong arguments, arrays that are none, and overlaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from tests.kernels.fuzz_arrays import NUMPY, Slot, settle, some_values
from tests.kernels.fuzz_calls import Call, Refusal
from tests.kernels.fuzz_junk import DOUBTFUL, JUNK, LIARS, SIGNATURES, fields_of, names_of
from tests.kernels.fuzz_memory import Rng, block_of
from tests.kernels.reference import ALL_DTYPES

_STRANGE = (*ALL_DTYPES, torch.bool, torch.int16, torch.complex64)
_SCALES = ("scale", "factor")
_PLAIN = ("torch", "numpy", "dlpack", "interface", "memoryview")


def spoil(rng: Rng, call: Call) -> None:
    """Do one thing to a call that is neither settled nor placed yet."""
    while True:
        if rng.choice(_SPOILERS)(rng, call):
            return


def _refuse(call: Call, names: tuple[str, ...], story: str, **more: Any) -> bool:
    refusal = Refusal(names, **more)
    if not refusal.certain:  # what was wrong before may have been what is replaced now
        call.refusals = [replace(earlier, certain=False) for earlier in call.refusals]
        call.vague = True
    call.refusals.append(refusal)
    call.story.append(story)
    return True


def _some_junk(rng: Rng, function: str, name: str, kind: str) -> tuple[Any, bool] | None:
    """Something for an argument of that kind, and whether it must be refused."""
    plain = kind.rstrip("?")
    if plain in DOUBTFUL and rng.chance(0.25):
        return rng.choice(DOUBTFUL[plain])(), False
    if kind == plain and plain not in ("scratch", "bool") and rng.chance(0.15):
        return None, True
    if plain not in JUNK:
        return None
    value = rng.choice(JUNK[plain])()
    # In Python numbers have no end, and a step may have been counted in floats.
    endless = function == "sign_words" or name == "step"
    return value, not (endless and isinstance(value, int | float))


def _junk_argument(rng: Rng, call: Call) -> bool:
    name, kind = rng.choice(list(SIGNATURES[call.function].items()))
    found = _some_junk(rng, call.function, name, kind)
    if found is None:
        return False
    value, certain = found
    call.arguments = {**call.arguments, name: value}
    return _refuse(call, names_of(name), f"{name} is {value!r}", certain=certain)


def _junk_item(rng: Rng, call: Call) -> bool:
    items = [slot for value in call.arguments.values() if isinstance(value, list | tuple) for slot in value]
    items = [item for item in items if isinstance(item, Slot)]
    if not items:
        return False
    item = rng.choice(items)
    value = None if rng.chance(0.1) else rng.choice(JUNK["array"])()
    call.put(item, value)
    return _refuse(call, names_of(item.name), f"{item.name} is {value!r}")


def _junk_field(rng: Rng, call: Call) -> bool:
    names = [name for name, value in call.arguments.items() if is_dataclass(value) and not isinstance(value, Slot)]
    if not names:
        return False
    name = rng.choice(names)
    holder = call.arguments[name]
    field = rng.choice(fields(holder)).name
    found = _some_junk(rng, call.function, field, fields_of(call.function, name)[field])
    if found is None:
        return False
    value, certain = found
    call.arguments = {**call.arguments, name: replace(holder, **{field: value})}
    return _refuse(call, names_of(field, name), f"{name}.{field} is {value!r}", certain=certain)


def _some_slot(rng: Rng, call: Call, fits: Callable[[Slot], bool]) -> Slot | None:
    slots = [slot for slot in call.slots if slot.form is None and fits(slot)]
    return rng.choice(slots) if slots else None


def _first(call: Call, what: str) -> bool:
    """Whether a fault of that sort is the call's first: two may make good for one another."""
    first = what not in call.sorts
    call.sorts.add(what)
    return first


def _wrong_dtype(rng: Rng, call: Call) -> bool:
    names = {slot.name for slot in call.slots}

    def matters(slot: Slot) -> bool:
        """One array alone of its kind may say what the others' type is."""
        alone = slot.name.endswith("[0]") and slot.name.replace("[0]", "[1]") not in names
        return slot.name not in ("unless", "bits") and not alone

    slot = _some_slot(rng, call, matters)
    if slot is None or not _first(call, "dtype"):
        return False
    dtype = rng.choice([dtype for dtype in _STRANGE if dtype not in slot.only])
    slot.values = slot.values.to(dtype)
    slot.only = (dtype,)
    if slot.name in _SCALES:
        slot.form = "torch"  # numpy's numbers are numbers
    return _refuse(call, names_of(slot.name), f"{slot.name} has dtype {dtype}", kinds=(TypeError,))


def _wrong_size(rng: Rng, call: Call) -> bool:
    slot = _some_slot(rng, call, lambda slot: slot.sized)
    if slot is None:
        return False
    size = rng.choice([0, 1, slot.count + 1, max(slot.count - 1, 0), 2 * slot.count + 7])
    if size == slot.count or not _first(call, "size"):
        return False
    slot.values = some_values(rng, size, slot.dtype)
    if slot.name in _SCALES:
        slot.form = "torch"
    names = names_of(*(slot.name for slot in call.slots))
    return _refuse(call, names, f"{slot.name} has {size} elements", kinds=(ValueError,))


def _wrong_number(rng: Rng, call: Call) -> bool:
    names = [name for name in call.paired if isinstance(call.arguments.get(name), list)]
    if not names or not _first(call, "size"):
        return False
    name = rng.choice(names)
    items = call.arguments[name]
    if not items or (len(items) > 1 and rng.chance(0.5)):
        changed = items[:-1]
    else:
        last = items[-1]
        changed = [*items, replace(last, name=f"{name}[{len(items)}]") if isinstance(last, Slot) else last]
    call.arguments = {**call.arguments, name: changed}
    return _refuse(call, names_of(*call.arguments), f"{name} has {len(changed)} items", kinds=(ValueError, TypeError))


def _unwritable(rng: Rng, call: Call) -> bool:
    slot = _some_slot(rng, call, lambda slot: slot.written and slot.count > 1)
    if slot is None:
        return False
    ways = ["strided", "transposed", "expanded"]
    ways += ["negative"] if slot.dtype.is_floating_point else []
    ways += ["read-only", "read-only view", "reversed"] if slot.dtype in NUMPY else []
    ways += ["bytes"] if slot.dtype == torch.uint8 else []
    way = rng.choice(ways)
    if way in ("strided", "expanded", "reversed", "transposed"):
        slot.layout = way
        settle(rng, slot)
        if way == "transposed" and min(slot.shape) < 2:
            slot.layout, slot.form, slot.settled = None, None, False
            return False
    else:
        slot.layout, slot.form = "flat", way
    return _refuse(call, names_of(slot.name), f"{slot.name} cannot be written: {way}", kinds=(ValueError,))


def _liar(rng: Rng, call: Call) -> bool:
    slot = _some_slot(rng, call, lambda slot: True)
    if slot is None:
        return False
    kind = rng.choice(list(LIARS))
    which = rng.randrange(len(LIARS[kind]))
    call.put(slot, LIARS[kind][which](slot.values.clone()))
    # Nobody reads what an empty array has not; DLPack's word about devices need not be asked for.
    certain = slot.count > 0 and not (kind == "dlpack" and which >= 8)
    certain &= not (slot.name in ("unless", "bits", *_SCALES) and kind == "dtype")
    kinds = (TypeError,) if kind == "dtype" and certain else (TypeError, ValueError)
    return _refuse(call, names_of(slot.name), f"{slot.name} is a lie: {kind} {which}", certain=certain, kinds=kinds)


def _misaligned(rng: Rng, call: Call) -> bool:
    slot = _some_slot(rng, call, lambda slot: slot.alignment > 1 and slot.count > 0)
    if slot is None:
        return False
    slot.gap = rng.randrange(1, slot.alignment)
    slot.layout = "flat"
    slot.form = rng.choice(_PLAIN) if slot.dtype in NUMPY else "torch"
    story = f"{slot.name} is {slot.gap} bytes off"
    call.story.append(story)
    if slot.aligned is not False:
        certain = slot.aligned is True
        call.refusals.append(Refusal(names_of(slot.name), (ValueError,), "aligned", certain=certain))
    return True


def _overlap(rng: Rng, call: Call) -> bool:
    free = [slot for slot in call.slots if slot.form is None and slot.block is None and slot.count > 0]
    shared = [pair for pair in call.shared if pair[0] in free and pair[1] in free]
    if shared and rng.chance(0.5):
        first, second, by = rng.choice(shared)
        if rng.chance(0.15):
            by += rng.choice([-1, 1]) * first.itemsize
    else:
        free = [slot for slot in free if slot.dtype != torch.bool]
        written = [slot for slot in free if slot.written]
        if len(free) < 2 or not written:
            return False
        first = rng.choice(written if rng.chance(0.8) else free)
        second = rng.choice([slot for slot in free if slot is not first])
        by = _some_distance(rng, first, second)
    for slot in (first, second):
        slot.layout = "flat" if slot.written or slot.solid or rng.chance(0.9) else "strided"
        slot.form = rng.choice(_PLAIN) if slot.dtype in NUMPY else "torch"
        settle(rng, slot)
    _place_together(rng, first, second, by)
    call.story.append(f"{second.name} lies {by} bytes behind the beginning of {first.name}")
    return True


def _some_distance(rng: Rng, first: Slot, second: Slot) -> int:
    unit = max(first.alignment, second.alignment)
    sizes = [slot.count * slot.itemsize for slot in (first, second)]
    apart = [-(-size // unit) * unit for size in sizes]
    anywhere = rng.randrange(-apart[1], apart[0] + 1, unit)
    return rng.choice([0, 0, apart[0], -apart[1], apart[0] - unit, unit - apart[1], anywhere, anywhere])


def _place_together(rng: Rng, first: Slot, second: Slot, by: int) -> None:
    low = min(0, by)
    high = max(first.extent * first.itemsize, by + second.extent * second.itemsize)
    block = block_of(rng, -(-(high - low) // 8) * 8)
    first.block = second.block = block
    first.offset = block.begin - low
    second.offset = first.offset + by


_SPOILERS = [
    *(_junk_argument, _junk_argument, _junk_item, _junk_field, _wrong_dtype, _wrong_size, _wrong_number),
    *(_unwritable, _liar, _liar, _misaligned, _overlap, _overlap, _overlap, _overlap),
]

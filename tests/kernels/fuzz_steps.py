"""Valid calls of the kernels of training: accumulate, sparsify and the steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import kernels
from tests.kernels import test_chunks, test_low_rank, test_norms
from tests.kernels.bucket import Bucket
from tests.kernels.fuzz_arrays import Slot, some_size, some_values
from tests.kernels.fuzz_calls import (
    Call,
    Output,
    Read,
    Wanted,
    array,
    as_tensor,
    assert_close,
    expect,
    largest,
    number_of,
    output,
    several,
    some_scale,
)
from tests.kernels.fuzz_memory import Rng
from tests.kernels.reference import FLOATS
from tests.kernels.steps import Given, Kind, ratio

_HALVES = (torch.float16, torch.bfloat16)
_COUNTER: dict[str, Any] = {"written": True, "aligned": True}


@dataclass(frozen=True)
class AnyBucket(Bucket):
    """With any decay and momentum."""

    decay: float = 0.0
    momentum: float = 0.0


class _Accumulation:
    """The arguments that accumulate and sparsify share."""

    def __init__(self, rng: Rng, single: bool) -> None:
        sizes = [some_size(rng, 2000) for _ in range(1 if single else rng.choice([1, 2, 3, 5]))]
        dtype = rng.choice(FLOATS)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = sum(sizes)

        def flat(name: str, probability: float, written: bool = False) -> Any:
            if not rng.chance(probability):
                return None
            return array(name, some_values(rng, total, wide), written=written)

        self.single = single
        self.grads = several(rng, "grads", sizes, [dtype] * len(sizes), only=(dtype,))
        self.acc = output(rng, "acc", total, wide)
        self.residual = flat("residual", 0.6)
        self.velocity = flat("velocity", 0.5, written=True)
        self.old_velocity = None if self.velocity is None else flat("old_velocity", 0.7)
        self.weights = several(rng, "weights", sizes, [dtype] * len(sizes)) if rng.chance(0.4) else None
        self.clip = rng.choice([1e-20, 0.5, 3, 1e30]) if rng.chance(0.4) else None
        self.scale = some_scale(rng)
        self.decay = rng.choice([0.05, 0.0, -1.0, 3])
        self.factor = rng.choice([0.0, 0.9, rng.random()])
        self.nesterov = rng.chance(0.5)

    def arguments(self) -> dict[str, Any]:
        momentum = kernels.Momentum(self.velocity, self.old_velocity, self.factor, self.nesterov)
        return {
            "acc": self.acc,
            "residual": self.residual,
            "grads": self.grads[0] if self.single else self.grads,
            "scale": self.scale,
            "clip": self.clip,
            "momentum": None if self.velocity is None else momentum,
            "decay": None if self.weights is None else kernels.Decay(self.weights, self.decay),
        }

    def shared(self) -> list[tuple[Slot, Slot, int]]:
        pairs = [(self.acc, self.residual, 0), (self.velocity, self.old_velocity, 0)]
        at = 0
        for grad in self.grads:
            if grad.dtype == self.acc.dtype:
                pairs.append((self.acc, grad, at))
            at += grad.count * self.acc.itemsize
        return [(written, other, at) for written, other, at in pairs if other is not None]

    def sums(self, read: Read) -> tuple[list[Output], torch.Tensor]:
        """What is written to acc and velocity, and the former once more."""

        def maybe(slot: Slot | None) -> torch.Tensor | None:
            return None if slot is None else read(slot)

        velocity = None
        if self.velocity is not None:
            zeros = torch.zeros(self.acc.count, dtype=self.acc.dtype)
            velocity = zeros if self.old_velocity is None else read(self.old_velocity)
        made = AnyBucket(
            [read(grad) for grad in self.grads],
            scale=number_of(self.scale, read),
            residual=maybe(self.residual),
            weights=None if self.weights is None else [read(weight) for weight in self.weights],
            clip=self.clip,
            velocity=velocity,
            nesterov=self.nesterov,
            decay=self.decay,
            momentum=self.factor,
        )
        acc, new_velocity = made.sums()
        outputs = [Output(self.acc, acc)]
        if new_velocity is not None:
            outputs.append(Output(self.velocity, new_velocity))
        return outputs, acc

    def check_finite(self, flags: Any, acc: torch.Tensor) -> None:
        parts = torch.split(acc, [grad.count for grad in self.grads])
        wanted: Any = [bool(part.isfinite().all()) for part in parts]
        wanted = wanted[0] if self.single else wanted
        expect(as_tensor(flags).tolist() == wanted, f"finite is {flags}, wanted {wanted}")


def accumulate(rng: Rng) -> Call:
    given = _Accumulation(rng, single=rng.chance(0.25))

    def wanted(read: Read) -> Wanted:
        outputs, acc = given.sums(read)
        return Wanted(outputs, lambda result: given.check_finite(result, acc))

    paired = ("grads",) if given.weights is not None and not given.single else ()
    return Call("accumulate", given.arguments(), wanted, shared=given.shared(), paired=paired)


def sparsify(rng: Rng) -> Call:
    given = _Accumulation(rng, single=False)
    counts = [rng.choice([0, size, rng.randint(0, size), min(size, 2)]) for size in (g.count for g in given.grads)]
    k = sum(counts)
    values = output(rng, "values", k, given.acc.dtype, aligned=True)
    indices = output(rng, "indices", k, torch.int32, aligned=True)
    limits = some_values(rng, len(counts), torch.float32)
    thresholds = array("thresholds", limits, written=True, aligned=True)
    num_missed = most = None
    if rng.chance(0.5):
        num_missed = array("num_missed", torch.tensor([rng.randrange(99)], dtype=torch.int32), **_COUNTER)
    if given.acc.dtype == torch.float32 and rng.chance(0.5):
        most = array("largest", torch.tensor([rng.random()]), **_COUNTER)

    def wanted(read: Read) -> Wanted:
        outputs, acc = given.sums(read)
        at, where, kept = 0, [torch.zeros(0, dtype=torch.int32)], read(thresholds)
        for j, (grad, count) in enumerate(zip(given.grads, counts, strict=True)):
            part = acc[at : at + grad.count]
            if count > 0:
                chosen = largest(part, count)
                where.append(chosen.sort().values.int() + at)
                kept[j] = part[chosen[-1]].abs().float()
            at += grad.count
        places = torch.cat(where)
        selected = acc[places.long()]
        outputs += [Output(values, selected), Output(indices, places), Output(thresholds, kept)]
        if most is not None:
            outputs.append(Output(most, torch.cat([torch.zeros(1), selected.abs()]).max()))

        def check(result: Any) -> None:
            given.check_finite(result[0], acc)
            expect(as_tensor(result[1]).shape == (len(counts),), "missed has another shape")
            if num_missed is not None:
                grown = int(num_missed.read() - read(num_missed))
                expect(grown == int(as_tensor(result[1]).sum()), f"num_missed grew by {grown}, missed: {result[1]}")

        return Wanted(outputs, check, [] if num_missed is None else [num_missed])

    arguments = {**given.arguments(), "counts": counts, "out": (values, indices), "thresholds": thresholds}
    arguments |= {"num_missed": num_missed, "largest": most}
    return Call("sparsify", arguments, wanted, shared=given.shared(), paired=("grads", "counts"))


def _float32_accumulation(rng: Rng) -> _Accumulation:
    while True:
        given = _Accumulation(rng, single=False)
        if given.acc.dtype == torch.float32:
            return given


def accumulate_chunks(rng: Rng) -> Call:
    given = _float32_accumulation(rng)
    config, decay = kernels.Chunks(*rng.choice([(3, 64, 2), (64, 64, 8), (9, 1024, 4)])), rng.choice([1.0, 0.95, 0.0])
    out = output(rng, "words", config.num_words(given.acc.count), torch.int32, aligned=True)

    def wanted(read: Read) -> Wanted:
        outputs, acc = given.sums(read)
        if not bool(acc.isfinite().all()):
            return Wanted(outputs[1:], lambda result: given.check_finite(result, acc), [given.acc, out])
        words, meant = map(torch.from_numpy, test_chunks.defined(acc.numpy(), config))
        outputs[0] = Output(given.acc, (acc - meant) * torch.tensor(decay, dtype=torch.float32))
        return Wanted([*outputs, Output(out, words)], lambda result: given.check_finite(result, acc))

    arguments = {**given.arguments(), "config": config, "out": out, "packing_decay": decay}
    return Call("accumulate_chunks", arguments, wanted, shared=given.shared())


def accumulate_quantized(rng: Rng) -> Call:
    """By the two kernels that it stands for."""
    given = _float32_accumulation(rng)
    config = kernels.Quantization(*rng.choice([(64, 7, 4), (128, 127, 8), (64, 1, 2)]))
    total = given.acc.count
    cuts = sorted(rng.randint(0, total) for _ in range(4))
    parts = []
    for begin, end in ((cuts[0], cuts[1]), (cuts[2], cuts[3])):
        scales = output(rng, "scales", config.num_blocks(end - begin), torch.float32, aligned=True)
        codes = output(rng, "codes", config.code_bytes(end - begin), torch.uint8)
        parts.append((begin, end, None, scales, codes))

    def wanted(read: Read) -> Wanted:
        outputs, acc = given.sums(read)
        if not bool(acc.isfinite().all()):
            written = [given.acc, *(slot for _, _, _, *both in parts for slot in both)]
            return Wanted(outputs[1:], lambda result: given.check_finite(result, acc), written)
        rest = acc.clone()
        for begin, end, _, scales, codes in parts:
            if begin < end:
                coded = kernels.quantize(acc[begin:end], config, remainder=rest[begin:end])
                outputs += [Output(scales, coded[0]), Output(codes, coded[1])]
        outputs[0] = Output(given.acc, rest)
        return Wanted(outputs, lambda result: given.check_finite(result, acc))

    arguments = {**given.arguments(), "config": config, "parts": parts, "keeps": True}
    return Call("accumulate_quantized", arguments, wanted, shared=given.shared())


def _matrices(rng: Rng) -> tuple[kernels.LowRank, int]:
    shapes = [(rng.randint(1, 20), rng.randint(1, 70)) for _ in range(rng.choice([1, 2, 3]))]
    return kernels.LowRank(shapes, rng.choice([1, 2, 4, 5, 32])), sum(rows * columns for rows, columns in shapes)


def accumulate_low_rank(rng: Rng) -> Call:
    given = _Accumulation(rng, single=False)
    shapes = [(1, grad.count) for grad in given.grads]
    if not all(columns for _, columns in shapes):
        return accumulate_low_rank(rng)
    config = kernels.LowRank(shapes, rng.choice([1, 3]))
    q = array("q", some_values(rng, config.num_q, given.acc.dtype), aligned=True)
    p = output(rng, "p", config.num_p, given.acc.dtype, aligned=True)

    def wanted(read: Read) -> Wanted:
        outputs, acc = given.sums(read)
        pairs = zip(test_low_rank.cut(acc, shapes), test_low_rank.cut(read(q), config.q_shapes), strict=True)
        products = torch.cat([test_low_rank.row_products(*pair).flatten() for pair in pairs])
        return Wanted([*outputs, Output(p, products)], lambda result: given.check_finite(result, acc))

    arguments = {**given.arguments(), "config": config, "q": q, "p": p}
    return Call("accumulate_low_rank", arguments, wanted, shared=given.shared())


def split_low_rank(rng: Rng) -> Call:
    config, count = _matrices(rng)
    dtype = rng.choice([torch.float32, torch.float64])
    m = array("m", some_values(rng, count, dtype), written=True, aligned=True)
    p = array("p", some_values(rng, config.num_p, dtype), aligned=True)
    q = output(rng, "q", config.num_q, dtype, aligned=True)

    def wanted(read: Read) -> Wanted:
        rest, found = read(m).clone(), torch.empty(config.num_q, dtype=dtype)
        ps = test_low_rank.cut(read(p), config.p_shapes)
        for matrix, one, to in zip(
            test_low_rank.cut(rest, config.shapes), ps, test_low_rank.cut(found, config.q_shapes), strict=True
        ):
            to.copy_(test_low_rank.column_products(matrix, one))
            matrix.copy_(test_low_rank.with_outer_products(matrix, -one, to))
        return Wanted([Output(m, rest), Output(q, found)])

    return Call("split_low_rank", {"m": m, "config": config, "p": p, "q": q}, wanted)


def orthogonalize(rng: Rng) -> Call:
    """As in memory of torch, without threads."""
    config, _ = _matrices(rng)
    types = torch.float32, torch.float64
    p = array("p", some_values(rng, config.num_p, rng.choice(types)), written=True, aligned=True, only=types)

    def wanted(read: Read) -> Wanted:
        found = read(p).clone()
        kernels.orthogonalize(found, config)
        return Wanted([Output(p, found)])

    return Call("orthogonalize", {"p": p, "config": config}, wanted)


def expand_low_rank(rng: Rng) -> Call:
    config, count = _matrices(rng)
    dtype = rng.choice([torch.float32, torch.float64])
    out = output(rng, "out", count, dtype, aligned=True)
    p = array("p", some_values(rng, config.num_p, dtype), aligned=True)
    q = array("q", some_values(rng, config.num_q, dtype), aligned=True)
    scale = some_scale(rng)

    def wanted(read: Read) -> Wanted:
        factor = torch.tensor(number_of(scale, read), dtype=dtype)
        ps, qs = test_low_rank.cut(read(p) * factor, config.p_shapes), test_low_rank.cut(read(q), config.q_shapes)
        products = [test_low_rank.with_outer_products(None, *pair) for pair in zip(ps, qs, strict=True)]
        return Wanted([Output(out, torch.cat([product.flatten() for product in products]))])

    return Call("expand_low_rank", {"out": out, "config": config, "p": p, "q": q, "scale": scale}, wanted)


class _Step:
    """The arrays of one step."""

    def __init__(self, rng: Rng, rule: str, states: list[str], there: list[bool]) -> None:
        count = rng.choice([1, 1, 2, 3])
        self.rng = rng
        self.rule = rule
        self.sizes = [some_size(rng, 1500) for _ in range(count)]
        self.dtype = rng.choice([torch.float32, torch.float32, torch.float64])
        self.weights = self.each("weights", [self.dtype] * count, written=rule != "lamb_moments", solid=True)
        self.grads = self.each("grads", [rng.choice(FLOATS) for _ in range(count)], only=FLOATS)
        kept_up = rule != "lamb_apply"
        self.states = {
            name: self.each(name, [self.dtype] * count, written=kept_up, solid=True) if kept else None
            for name, kept in zip(states, there, strict=True)
        }
        for s, (name, arrays) in enumerate(self.states.items()):
            if "sq" in name or (rule in ("rmsprop", "adagrad") and s == 0):
                for state in arrays or []:
                    state.values = state.values.abs()  # means of squares
        has_copies = self.dtype == torch.float32 and rule != "lamb_moments" and rng.chance(0.5)
        copies = [rng.choice(_HALVES) for _ in range(count)]
        self.copies = self.each("copies", copies, written=True, only=_HALVES) if has_copies else None
        self.scale = some_scale(rng)

    def each(self, name: str, dtypes: list[torch.dtype], written: bool = False, **more: Any) -> list[Slot]:
        return several(self.rng, name, self.sizes, dtypes, aligned=True, written=written, **more)

    def rates(self) -> Slot:
        return array("rates", torch.rand(len(self.sizes)).double() * 0 + self.rng.random(), aligned=True)

    def given(self, read: Read, options: dict[str, Any], rates: Slot | None = None) -> Given:
        """As the references want it."""

        def each(slots: list[Slot] | None) -> Any:
            return None if slots is None else [read(slot) for slot in slots]

        rule = "lamb" if self.rule.startswith("lamb") else self.rule
        states = [each(slots) for slots in self.states.values()]
        kind = Kind(rule, tuple(state is not None for state in states), options)
        copies, held = each(self.copies), None if rates is None else read(rates)
        return Given(kind, each(self.weights), each(self.grads), states, copies, held, number_of(self.scale, read))

    def call(self, arguments: dict[str, Any], wanted: Callable[[Read], Wanted]) -> Call:
        names = [name for name, arrays in self.states.items() if arrays is not None]
        common: dict[str, Any] = {"weights": self.weights, **self.states}
        if self.rule != "lamb_apply":
            common |= {"grads": self.grads, "scale": self.scale}
        if self.rule != "lamb_moments":
            common |= {"copies": self.copies}
        names += [name for name in ("grads", "copies") if common.get(name) is not None]
        suffix = "" if self.rule.startswith("lamb") else "_step"
        return Call(self.rule + suffix, {**common, **arguments}, wanted, paired=("weights", *names))

    def outputs(self, after: list[torch.Tensor]) -> list[Output]:
        slots = [s for slots in (self.weights, *self.states.values(), self.copies) for s in slots or []]
        return [Output(slot, new) for slot, new in zip(slots, after, strict=True) if slot.written]


def _number(rng: Rng, *usual: float) -> float:
    return rng.choice([*usual, rng.random(), 0.0]) if rng.chance(0.9) else rng.choice([-0.5, 1e30, 1e-30, 2])


def _moments(rng: Rng) -> kernels.Moments:
    betas = rng.choice([(0.9, 0.999), (0.0, 0.0), (rng.random(), rng.random())])
    return kernels.Moments(betas, rng.choice([1e-8, 0.0, 1e-3]), rng.choice([1, 2, 3, 1000, 10**6]))


def momentum_step(rng: Rng) -> Call:
    step = _Step(rng, "momentum", ["buffers"], [rng.chance(0.7)])
    options = {"lr": _number(rng, 0.1), "momentum": _number(rng, 0.9), "dampening": _number(rng, 0.0, 0.3)}
    options |= {"weight_decay": _number(rng, 0.0, 0.01), "nesterov": rng.chance(0.3)}
    rates = step.rates() if rng.chance(0.4) else None

    def wanted(read: Read) -> Wanted:
        return Wanted(step.outputs(step.given(read, options, rates).wanted()[0]))

    call = step.call({**options, "rates": rates}, wanted)
    return call


def adam_step(rng: Rng) -> Call:
    step = _Step(rng, "adam", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"], [True, True, rng.chance(0.4)])
    options = {"lr": _number(rng, 0.1), "moments": _moments(rng), "weight_decay": _number(rng, 0.01)}
    options |= {"decoupled": rng.chance(0.5)}
    return step.call(options, lambda read: Wanted(step.outputs(step.given(read, options).wanted()[0])))


def rmsprop_step(rng: Rng) -> Call:
    names, there = ["square_avgs", "momentum_buffers", "grad_avgs"], [True, rng.chance(0.5), rng.chance(0.5)]
    step = _Step(rng, "rmsprop", names, there)
    options = {"lr": _number(rng, 0.1), "alpha": _number(rng, 0.95), "eps": rng.choice([1e-8, 0.0])}
    options |= {"momentum": _number(rng, 0.9), "weight_decay": _number(rng, 0.01)}
    return step.call(options, lambda read: Wanted(step.outputs(step.given(read, options).wanted()[0])))


def adagrad_step(rng: Rng) -> Call:
    step = _Step(rng, "adagrad", ["sums"], [True])
    options = {"lr": _number(rng, 0.1), "eps": rng.choice([1e-8, 0.0]), "weight_decay": _number(rng, 0.01)}
    return step.call(options, lambda read: Wanted(step.outputs(step.given(read, options).wanted()[0])))


def lamb_moments(rng: Rng) -> Call:
    step = _Step(rng, "lamb_moments", ["exp_avgs", "exp_avg_sqs"], [True, True])
    options = {"moments": _moments(rng), "weight_decay": _number(rng, 0.01)}

    def wanted(read: Read) -> Wanted:
        after, squares = step.given(read, options).wanted()
        return Wanted(step.outputs(after), lambda result: assert_close(as_tensor(result), squares, test_norms.CLOSE))

    return step.call(options, wanted)


def lamb_apply(rng: Rng) -> Call:
    step = _Step(rng, "lamb_apply", ["exp_avgs", "exp_avg_sqs"], [True, True])
    moments, weight_decay, rates = _moments(rng), _number(rng, 0.01), step.rates()

    def wanted(read: Read) -> Wanted:
        outputs = []
        for j, slot in enumerate(step.weights):
            w, (first, second) = read(slot), [read(states[j]) for states in step.states.values() if states]
            d = ratio(first, second, moments) + w * torch.tensor(weight_decay, dtype=w.dtype)
            new = w - read(rates)[j].to(w.dtype) * d
            outputs.append(Output(slot, new))
            if step.copies is not None:
                outputs.append(Output(step.copies[j], new.to(step.copies[j].dtype)))
        return Wanted(outputs)

    return step.call({"moments": moments, "weight_decay": weight_decay, "rates": rates}, wanted)

"""The compiled extension. Not public; ``stubtest`` compares this file with it in CI."""

from collections.abc import Sequence
from typing import Any

def build_info() -> dict[str, Any]: ...
def cuda_devices() -> tuple[int, str]: ...
def look(array: Any, name: str) -> tuple[int, str]: ...
def simd() -> str: ...
def select_simd(name: str) -> None: ...

class Scratch:
    def __init__(self) -> None: ...

def pack(
    tensors: Sequence[Any],
    out: Any,
    scale: Any,
    limit: float,
    finite: Any,
    unless: Any | None,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...
def unpack(flat: Any, tensors: Sequence[Any], scale: Any, scratch: Scratch | None, num_threads: int) -> None: ...
def reduce(out: Any, inputs: Sequence[Any], op: str, scratch: Scratch | None, num_threads: int) -> None: ...
def topk(
    x: Any,
    k: int,
    values: Any,
    indices: Any,
    threshold: Any | None,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...
def scatter_add(out: Any, indices: Any, values: Any, scale: Any, scratch: Scratch | None) -> None: ...
def accumulate(
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    clip: float | None,
    acc: Any,
    residual: Any | None,
    velocity: Any | None,
    old_velocity: Any | None,
    finite: Any,
    scale: Any,
    decay: float,
    momentum: float,
    nesterov: bool,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...
def sparsify(
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    clip: float | None,
    acc: Any,
    residual: Any | None,
    velocity: Any | None,
    old_velocity: Any | None,
    finite: Any,
    scale: Any,
    decay: float,
    momentum: float,
    nesterov: bool,
    counts: Sequence[int],
    values: Any,
    indices: Any,
    thresholds: Any,
    missed: Any,
    num_missed: Any | None,
    largest: Any | None,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...
def packed_words(limit: Any, count: Any) -> int: ...
def pack_indices(indices: Any, limit: Any, words: Any) -> None: ...
def unpack_indices(words: Any, limit: Any, count: Any, indices: Any, scratch: Scratch | None) -> None: ...
def quantize(
    x: Any,
    block: int,
    levels: int,
    bits: int,
    norm: str,
    seed: Any | None,
    scales: Any,
    codes: Any,
    remainder: Any | None,
    num_threads: int,
) -> None: ...
def dequantize(
    scales: Sequence[Any],
    codes: Sequence[Any],
    block: int,
    levels: int,
    bits: int,
    norm: str,
    out: Any,
    scale: Any,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...
def pack_signs(x: Any, magnitude: Any, words: Any, remainder: Any | None, num_threads: int) -> None: ...
def unpack_signs(
    words: Sequence[Any], magnitudes: Sequence[Any], out: Any, scale: Any, scratch: Scratch | None, num_threads: int
) -> None: ...
def absmax(tensors: Sequence[Any], out: Any, scratch: Scratch | None, num_threads: int) -> None: ...

class EntryLayout:
    @property
    def num_params(self) -> int: ...
    @property
    def num_bits(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def __init__(self, num_params: int, num_bits: int, count: int, limit: int, dtype: str, half: bool) -> None: ...
    def verdict_places(self, num_ranks: int) -> tuple[int, int, int, int, int]: ...

def pack_entries(
    layout: EntryLayout,
    message: Any,
    verdict: Any,
    num_ranks: int,
    values: Any,
    indices: Any,
    largest: Any | None,
    flat: Any,
    velocity: Any | None,
    keeps: Any | None,
    finite: Any,
    fingerprint: Any | None,
) -> None: ...
def unpack_entries(
    layout: EntryLayout,
    messages: Any,
    num_ranks: int,
    factor: Any,
    most: float,
    indices: Any,
    verdict: Any,
    scratch: Scratch | None,
) -> None: ...
def add_entries(
    layout: EntryLayout,
    messages: Any,
    num_ranks: int,
    indices: Any,
    factor: Any,
    out: Any,
    states: list[tuple[Any, Any]],
    finite: Any | None,
    used: Any | None,
    ends: Any | None,
    last_sources: Any | None,
    verdict: Any,
    num_threads: int,
) -> None: ...
def hashes(tensors: Sequence[Any], out: Any, scratch: Scratch | None, num_threads: int) -> None: ...
def norms(tensors: Sequence[Any], squares: Any, scratch: Scratch | None, num_threads: int) -> None: ...

class Coefficients:
    decay: float
    decoupled_decay: float
    lr: float
    momentum: float
    one_minus_dampening: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_bias_correction1: float
    inverse_sqrt_bias_correction2: float
    eps: float
    nesterov: bool
    corrects_bias: bool
    def __init__(self) -> None: ...

def step(
    rule: str,
    coefficients: Coefficients,
    weights: Sequence[Any],
    grads: Sequence[Any] | None,
    copies: Sequence[Any] | None,
    states: Sequence[Sequence[Any] | None],
    rates: Any | None,
    squares: Any | None,
    scale: Any,
    scratch: Scratch | None,
    num_threads: int,
) -> None: ...

class PreparedStep:
    taken: int
    def __init__(
        self,
        rule: str,
        weights: Sequence[Any],
        grads: Sequence[Any] | None,
        copies: Sequence[Any] | None,
        states: Sequence[Sequence[Any] | None],
        counts: Sequence[Any] | None,
    ) -> None: ...
    def run(
        self,
        rule: str,
        coefficients: Coefficients,
        rates: Any | None,
        squares: Any | None,
        scale: Any,
        divisor: Any | None,
        found: Any | None,
        scratch: Scratch | None,
        num_threads: int,
    ) -> None: ...
    def norms(self, squares: Any, scratch: Scratch | None, num_threads: int) -> None: ...

class PreparedGroup:
    def __init__(
        self, parts: Sequence[PreparedStep], keys: tuple[str | None, ...], has_counts: bool, same_counts: bool
    ) -> None: ...
    def remember(self, params: list[Any], state: dict[Any, Any], masters: Any | None, part_of: list[int]) -> bool: ...
    def renew(self, params: list[Any], state: dict[Any, Any], masters: Any | None) -> list[Any] | None: ...
    def release(self) -> None: ...

def shared_file_bytes(size: int) -> int: ...

class Block:  # has the buffer protocol
    ...

class Program:
    def __init__(self, words: Any, rank: int, size: int, name: str, digest: int) -> None: ...

class HostArray:  # has the buffer protocol
    def __init__(self, object: Any, name: str, writes: bool, moves: bool) -> None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def tag(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def elements(self) -> int: ...
    def overlaps(self, other: HostArray, rank: int, size: int) -> bool: ...

def process_state(pid: int) -> str: ...
def available_memory(root: str = "") -> int: ...

class SharedMemoryGroup:
    def __init__(
        self, rank: int, memory: list[int], sockets: list[int], file_bytes: int, names: Sequence[int] = ...
    ) -> None: ...
    def all_reduce(self, x: Any, op: str, timeout: float) -> None: ...
    def run(self, program: Program, x: Any, op: str, timeout: float) -> None: ...
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None: ...
    def all_gather(self, out: Any, x: Any, timeout: float) -> None: ...
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None: ...
    def broadcast(self, x: Any, src: int, timeout: float) -> None: ...
    def barrier(self, timeout: float) -> None: ...
    def refuse(self, reason: str, timeout: float) -> None: ...
    def allocate(self, num_bytes: int) -> Block: ...
    def close(self, why: str) -> None: ...

# Only in builds with CUDA.

def nccl_library(paths: list[str]) -> tuple[str, str]: ...
def nccl_version(paths: list[str]) -> tuple[str, str] | None: ...
def nccl_unique_id(paths: list[str]) -> bytes: ...

class NcclGroup:
    def __init__(
        self, rank: int, size: int, device: int, unique_id: bytes, ring: bool, timeout: float, paths: list[str]
    ) -> None: ...
    def all_reduce(self, x: Any, op: str, stream: int, timeout: float) -> None: ...
    def reduce_scatter(self, out: Any, x: Any, op: str, stream: int, timeout: float) -> None: ...
    def all_gather(self, out: Any, x: Any, stream: int, timeout: float) -> None: ...
    def broadcast(self, x: Any, src: int, stream: int, timeout: float) -> None: ...
    def send(self, x: Any, dst: int, stream: int, timeout: float) -> None: ...
    def recv(self, x: Any, src: int, stream: int, timeout: float) -> None: ...
    def group_start(self) -> None: ...
    def group_end(self, timeout: float) -> None: ...
    def group_abandon(self) -> None: ...
    def check(self) -> None: ...
    def close(self, why: str) -> None: ...

def require_no_capture(device: int, streams: Sequence[int], what: str, why: str) -> None: ...

class Moment:
    @property
    def is_captured(self) -> bool: ...
    def hold_back(self, stream: int) -> None: ...
    def has_passed(self) -> bool: ...

class CommStream:
    def __init__(self, device: int) -> None: ...
    @property
    def handle(self) -> int: ...
    def follow(self, stream: int) -> None: ...
    def now(self) -> Moment: ...

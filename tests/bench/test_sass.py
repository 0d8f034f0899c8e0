"""The check of the machine code: it reads what is there, and the kernels are within their limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from bench.gpu.sass import command, kernels, limits
from bench.gpu.sass.kernels import Kernel, Resources, compile_kernels, find_nvcc, parse_resources
from bench.gpu.sass.limits import AT_FULL_SPEED, LIMITS, Limit, limit_of
from bench.gpu.sass.machine_code import Run, decode, longest_runs, loops, runs, sections
from bench.gpu.sass.names import kernel_name

requires_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

LDG_64 = (0x0000080818187981, 0x000F62000C1E1B00)  # LDG.E.64 R24, desc[UR8][R24.64+0x8]
LD_128 = (0x0000000822089980, 0x000EA2000C101D00)  # @!P1 LD.E.128 R8, desc[UR8][R34.64]
LDG_U8 = (0x00001008080C7981, 0x000EA8000C1E1100)  # LDG.E.U8 R12, desc[UR8][R8.64+0x10]
LD_U16 = (0x00000008080A2980, 0x000EA2000C101500)  # @P2 LD.E.U16 R10, desc[UR8][R8.64]
LEA = (0x0000000302027211, 0x000FC800078F28FF)  # waits for nothing
BACK = (0xFFFFFFFC009C0947, 0x000FEA000383FFFF)  # @P0 BRA, 400 bytes back from behind it
AHEAD = (0x0000004800E80947, 0x000FEA0003800000)  # @P0 BRA, 0x4ba0 bytes ahead
EXIT = (0x000000000000794D, 0x000FEA0003800000)


def code_of(*words: tuple[int, int]) -> bytes:
    return b"".join(half.to_bytes(8, "little") for word in words for half in word)


def waiting(word: tuple[int, int], scoreboards: int) -> tuple[int, int]:
    """Return ``word`` waiting for ``scoreboards`` alone."""
    return word[0], word[1] & ~(0x3F << 52) | scoreboards << 52


def setting(word: tuple[int, int], scoreboard: int) -> tuple[int, int]:
    return word[0], word[1] & ~(7 << 46) | scoreboard << 46


def test_instructions() -> None:
    code = decode(code_of(LDG_64, LD_128, LDG_U8, LD_U16, LEA, EXIT))
    assert [i.loads for i in code] == [8, 16, 1, 2, 0, 0]
    assert [i.sets for i in code] == [1 << 5, 1 << 2, 1 << 2, 1 << 2, 0, 0]
    assert [i.ends for i in code] == [False] * 5 + [True]
    assert decode(code_of(*[LEA] * 42, BACK))[-1].target == 0x2A0 + 16 - 400
    assert decode(code_of(*[LEA] * 64, AHEAD))[-1].target == 0x4FB0
    assert not decode(code_of(BACK))[0].ends  # it has a predicate


def test_loads_are_counted_up_to_the_wait() -> None:
    use = waiting(LEA, 1 << 2)
    for words, expected in [
        ([LD_128, LD_128, LEA, LD_128, use, LD_128], Run(16, 3)),
        ([LD_128, use, LD_128, use], Run(16, 1)),
        ([LD_128, setting(LD_128, 3), use, LD_128, LD_128], Run(16, 3)),  # of the first two, one is still under way
        ([LD_128, EXIT, LD_128], Run(16, 1)),
        ([LDG_U8, LDG_U8, LD_128], Run(16, 1)),
        ([LD_128, waiting(LD_128, 1 << 2)], Run(16, 1)),  # its address is what the first has loaded
    ]:
        assert longest_runs(decode(code_of(*words)))[0] == expected
    assert longest_runs(decode(code_of(LDG_U8, LDG_64, LD_128))) == [Run(16, 1), Run(8, 1), Run(1, 1)]
    assert longest_runs(decode(code_of(LEA, EXIT))) == []


def branch(by: int) -> tuple[int, int]:
    """Return a branch to the instruction ``by`` behind the next."""
    distance = (4 * by) & ((1 << 56) - 1)
    return 0x0947 | (distance & 0xFF) << 16 | (distance >> 8 << 34) & ((1 << 64) - 1), 0x000FEA0003800000 | (
        distance >> 8 >> 30
    )


def test_loops() -> None:
    inner = [LD_128, LD_128, branch(-3)]
    code = decode(code_of(LDG_64, *inner, LDG_U8, branch(-6), EXIT))
    assert [[i.address for i in body] for body in loops(code)] == [[16, 32, 48]]
    assert runs(code) == [Run(16, 2)]
    assert runs(decode(code_of(LDG_64, LDG_64, EXIT))) == [Run(8, 2)]  # no loop


def test_names() -> None:
    anonymous = "39_GLOBAL__N__e5e11550_7_pack_cu_67e50e5e"
    for symbol, name in [
        (f"_ZN6pycomm4cuda{anonymous}11pack_kernelINS_4BF16EEEvNS0_5TableEPcNS0_5ScaleEdPbPKb", "pack_kernel<BF16>"),
        (f"_ZN6pycomm4cuda{anonymous}13reduce_kernelILNS_8ReduceOpE3EaEEvNS0_5TableEPcl", "reduce_kernel<Max,int8>"),
        (f"_ZN6pycomm4cuda{anonymous}11step_kernelILNS_4RuleE4EdEEvNS0_4PassE", "step_kernel<LambMoments,double>"),
        (f"_ZN6pycomm4cuda{anonymous}3addINS_3F16ES3_EEvPKi", "add<F16,F16>"),
        ("_ZN6pycomm4cuda13add_up_kernelILi1EmEEvNS0_5TableE", "add_up_kernel<1,uint64>"),
        ("_Z5probeILb1ELin2EEvPKf", "probe<1,-2>"),
        ("_Z5probePKf", "probe"),
        ("plain", "plain"),
    ]:
        assert kernel_name(symbol) == name


def test_resources() -> None:
    text = """ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    40 bytes stack frame, 24 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 40 bytes cumulative stack size, 18504 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
"""
    found = parse_resources(text)
    assert found == {"one": Resources(72, 84, 40, 18504), "two": Resources(20, 0, 0, 0)}
    assert [resources.blocks for resources in found.values()] == [3, 8]
    # CUDA's occupancy calculator says the same of these.
    for registers, shared, blocks in [(32, 0, 8), (33, 0, 6), (40, 0, 6), (64, 0, 4), (128, 0, 2), (16, 49152, 4)]:
        assert Resources(registers, 0, 0, shared).blocks == blocks


def test_limits_are_noticed() -> None:
    limit = Limit("a/*", registers=40, blocks=4, loads=4)
    good = Kernel("a/b", Resources(40, 0, 0, 0), [Run(16, 4), Run(16, 8), Run(4, 1)])
    assert list(limit.complaints(good)) == []
    assert good.bytes_in_flight == 6 * 256 * 4 * 16
    bad = Kernel("a/b", Resources(80, 4, 8, 0), [Run(16, 3), Run(16, 8)])
    assert [complaint.partition(": ")[2].partition(",")[0] for complaint in limit.complaints(bad)] == [
        "80 registers",
        "3 blocks per multiprocessor",
        "3 loads before a wait",
        "4 bytes spilled",
        "8 bytes of stack",
    ]
    assert command.complaints_about(Kernel("c/d", good.resources, [])) == ["c/d: no limit"]


PROBES = """
template <class T, int kLoads, bool kSerial>
__global__ void probe(const T* from, T* to, long rounds, int step) {
    for (long i = threadIdx.x; i < rounds; i += kLoads * step) {
        T values[kLoads];
        if (kSerial) {
            for (int u = 0; u < kLoads; ++u) {
                values[u] = from[i + u * step];
                to[i + u * step] = values[u];  // which might be what the next one loads
            }
        } else {
            for (int u = 0; u < kLoads; ++u) values[u] = from[i + u * step];
            for (int u = 0; u < kLoads; ++u) to[i + u * step] = values[u];
        }
    }
}
#define PROBE(T, loads, serial) template __global__ void probe<T, loads, serial>(const T*, T*, long, int);
PROBE(float4, 8, false)
PROBE(float4, 3, false)
PROBE(float4, 4, true)
PROBE(float2, 4, false)
PROBE(float, 6, false)
PROBE(short, 2, false)
__global__ void straight(const float4* from, float4* to) {
    float4 a = from[threadIdx.x], b = from[threadIdx.x + 256];
    to[threadIdx.x] = a;
    to[threadIdx.x + 256] = b;
}
__global__ void spill(const float* from, float* to, int n) {
    __shared__ float shared[64];
    float values[64] = {};
    for (int i = 0; i < 256; ++i) values[i * n % 64] += from[i];
    shared[threadIdx.x % 64] = values[0];
    __syncthreads();
    to[threadIdx.x] = values[n] + shared[n];
}
"""


@requires_nvcc
def test_probes(tmp_path: Path) -> None:
    source = tmp_path / "probes.cu"
    source.write_text(PROBES)
    nvcc = find_nvcc()
    assert nvcc is not None
    found = {kernel.name.removeprefix("probes/"): kernel for kernel in compile_kernels(nvcc, [source])}
    assert {name: kernel.runs[0] for name, kernel in found.items()} == {
        "probe<float4,8,0>": Run(16, 8),
        "probe<float4,3,0>": Run(16, 3),
        "probe<float4,4,1>": Run(16, 1),
        "probe<float2,4,0>": Run(8, 4),
        "probe<float,6,0>": Run(4, 6),
        "probe<int16,2,0>": Run(2, 2),
        "straight": Run(16, 2),
        "spill": found["spill"].runs[0],
    }
    assert found["spill"].resources.stack == 256
    assert found["spill"].resources.shared == 256


@requires_nvcc
def test_kernels_that_compile_fast() -> None:
    """Those of the rules among them, which the limits name."""
    nvcc = find_nvcc()
    assert nvcc is not None
    names = ("hashes", "step", "table")
    found = compile_kernels(nvcc, [kernels.SOURCES / f"{name}.cu" for name in names])
    assert not [complaint for kernel in found for complaint in command.complaints_about(kernel)]
    used = {limit_of(kernel) for kernel in found}
    assert not [limit.pattern for limit in LIMITS if limit.pattern.startswith(names) and limit not in used]


@pytest.fixture(scope="module")
def compiled() -> Sequence[Kernel]:
    nvcc = find_nvcc()
    assert nvcc is not None
    return compile_kernels(nvcc, sorted(kernels.SOURCES.glob("*.cu")))


@requires_nvcc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_are_within_their_limits(compiled: Sequence[Kernel]) -> None:
    assert len(compiled) > 60
    assert not [complaint for kernel in compiled for complaint in command.complaints_about(kernel)]


@requires_nvcc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_enough_is_under_way(compiled: Sequence[Kernel]) -> None:
    for pattern in AT_FULL_SPEED:
        found = {kernel.name: kernel.bytes_in_flight for kernel in compiled if fnmatchcase(kernel.name, pattern)}
        assert found
        assert {name: flight for name, flight in found.items() if flight < 2 * command.WANTED_IN_FLIGHT} == {}


@requires_nvcc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_limit_is_of_a_kernel(compiled: Sequence[Kernel]) -> None:
    used = {limit_of(kernel) for kernel in compiled}
    assert [limit.pattern for limit in LIMITS if limit not in used] == []


@requires_nvcc
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["sass", "table", "--output", str(path)])
    assert command.main() == 0
    assert "table/write_entries" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["kernels"]] == ["table/write_entries"]
    assert 20_000 < report["wanted_bytes_in_flight"] < 21_000
    monkeypatch.setattr(limits, "LIMITS", [Limit("table/*", registers=1, blocks=1)])
    assert command.main() == 1
    assert "registers, at most 1 are wanted" in capsys.readouterr().out


def test_wrong_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sass", "nothing"])
    monkeypatch.setattr(command, "find_nvcc", lambda: Path("/nvcc"))
    assert command.main() == 1
    assert "nothing.cu is not in" in capsys.readouterr().err
    monkeypatch.setattr(command, "find_nvcc", lambda: None)
    assert command.main() == 2
    assert "no nvcc on PATH" in capsys.readouterr().err
    with pytest.raises(ValueError, match="wanted an ELF file"):
        list(sections(b"#!/bin/sh"))


def test_nvcc_is_found_beside_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == tmp_path / "bin" / "nvcc"

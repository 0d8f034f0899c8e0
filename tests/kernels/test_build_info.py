"""What the compiled module says of itself."""

from __future__ import annotations

import pycomm._native as _native


def test_build_info() -> None:
    info = _native.build_info()
    assert {"version", "cuda", "simd", "compiler"} <= info.keys()
    assert info["simd"] == _native.simd()

"""Programs of tests/cpp/shadow_cases.h, compiled with the shadows of CUTLASS's headers and with the originals."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from typing import Any

from atomr_cutlass.generator import headers
from atomr_cutlass.jit.compiler import OPTIONS
from atomr_cutlass.jit.toolchain import CUTLASS, OURS, toolchain
from atomr_cutlass.jit.worker import Nvrtc

CASES = Path(__file__).resolve().parents[1] / "cpp"
CAPACITY = 16384

HOST = """
#include <cstdio>
#include <cstring>
#include "shadow_cases.h"
struct Printer {
  template <class T>
  void operator()(char const* name, T const& result) {
    shadow_cases::Numbers<256> numbers;
    numbers(name, result);
    std::printf("%s\\t%s\\t", name, std::strstr(__PRETTY_FUNCTION__, "T = "));
    for (int i = 2; i < numbers.count; ++i) std::printf("%lld ", (long long)numbers.value[i]);
    std::printf("\\n");
  }
};
int main(int argc, char**) {
  Printer record;
  shadow_cases::tuple_cases(record, argc + 1, (int64_t(argc) << 33) + argc);
  shadow_cases::tuple_cases(record, cute::Int<2>{}, cute::C<(int64_t(1) << 33) + 1>{});
  shadow_cases::layout_cases(record, argc + 1);
  shadow_cases::layout_cases(record, cute::Int<2>{});
  shadow_cases::packed_stride_cases(record, 4000 * argc, 200 * argc, 8 * argc);
}
"""

_INCLUDES = f"""
#ifdef __CUDACC_RTC__
#include "atomr_cutlass/nvrtc/prelude.h"
#endif
#include "shadow_cases.h"
using Found = shadow_cases::Numbers<{CAPACITY}>;
"""

KERNEL = f"""{_INCLUDES}
extern "C" __global__ void dynamic(Found* found, int two, int64_t big, int64_t n, int64_t h, int64_t w) {{
  shadow_cases::tuple_cases(*found, two, big);
  shadow_cases::layout_cases(*found, two);
  shadow_cases::packed_stride_cases(*found, n, h, w);
}}
"""
"""The cases with arguments that are known at run time; for NVRTC, which has no host."""

CONSTANTS = f"""{_INCLUDES}
__host__ __device__ constexpr Found tuples() {{
  Found found;
  shadow_cases::tuple_cases(found, cute::Int<2>{{}}, cute::C<(int64_t(1) << 33) + 1>{{}});
  shadow_cases::tuple_cases(found, 2, (int64_t(1) << 33) + 1);
  return found;
}}
__host__ __device__ constexpr Found layouts() {{
  Found found;
  shadow_cases::layout_cases(found, cute::Int<2>{{}});
  shadow_cases::layout_cases(found, 2);
  return found;
}}
extern "C" __device__ Found const static_tuples = tuples();
extern "C" __device__ Found const static_layouts = layouts();
"""
"""The cases with arguments that the compiler knows, static or not: their results are constants."""


def _layout(shapes: list[int], strides: list[int]) -> str:
    def tuple_of(template: str, values: list[int]) -> str:
        return f"{template}<{', '.join(f'Int<{value}>' for value in values)}>"

    return f"Layout<{tuple_of('Shape', shapes)}, {tuple_of('Stride', strides)}>{{}}"


def random_layouts(seed: int, count: int) -> str:
    """Cases of static layouts drawn at random: coalesced, composed and divided.

    What is composed divides: all extents are powers of two, but for a factor that the first mode and the strides share.
    """
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        rank = draw.randint(2, 5)
        shapes = [draw.choice([1, 1, 2, 3, 4, 6]) for _ in range(rank)]
        strides = [draw.choice([-4, 0, 1, 2, 3, 4, 6, 12]) for _ in range(rank)]
        # Half of them contiguous somewhere.
        for mode in range(1, rank):
            if draw.random() < 0.5:
                strides[mode] = shapes[mode - 1] * strides[mode - 1]
        lines.append(f"CASE(coalesce({_layout(shapes, strides)}));")
    for _ in range(count):
        rank, factor = draw.randint(2, 4), draw.choice([1, 1, 3, 5])
        shapes = [factor * 2 ** draw.randint(0, 4), *(2 ** draw.randint(0, 4) for _ in range(rank - 1))]
        strides = [draw.choice([-3, 0, 1, 2, 7, 64]) for _ in range(rank)]
        sign = draw.choice([1, 1, 1, -1])
        right = [(2 ** draw.randint(0, 4), sign * factor * 2 ** draw.randint(0, 6)) for _ in range(draw.randint(1, 3))]
        composed = _layout([shape for shape, _ in right], [stride for _, stride in right])
        lines.append(f"CASE(composition({_layout(shapes, strides)}, {composed}));")
    for _ in range(count // 2):
        rank = draw.randint(2, 4)
        shapes, strides, size = [2 ** draw.randint(0, 3) for _ in range(rank)], [0] * rank, 1
        for mode in draw.sample(range(rank), rank):
            strides[mode], size = size, size * shapes[mode]
        tile = f"Layout<Int<{2 ** draw.randint(0, 2)}>, Int<{2 ** draw.randint(0, 2)}>>{{}}"
        lines.append(f"CASE(logical_divide({_layout(shapes, strides)}, {tile}));")
    return "\n".join(lines) + "\n"


def include_options(folder: Path, compiler: str, *, shadowed: bool) -> list[str]:
    """The folders that a program of the cases is compiled with; writes the random cases into `folder`."""
    (folder / "shadow_layouts.h").write_text(random_layouts(seed=20, count=60))
    searched = headers.includes(CUTLASS, compiler, ours=OURS).folders
    assert any(path.name == "faster" for path in searched)
    kept = [path for path in searched if shadowed or path.name != "faster"]
    return [f"-I{path}" for path in (CASES, folder, *kept)]


def compile_with_nvrtc(source: str, folder: Path, arch: str, *, shadowed: bool) -> bytes:
    """A program for the device as PTX (`compute_90`) or as machine code (`sm_90`)."""
    cuda = [
        f"-I{path}" for path in toolchain().include if path not in headers.includes(CUTLASS, "nvrtc", ours=OURS).folders
    ]
    options = [f"--gpu-architecture={arch}", *OPTIONS, *include_options(folder, "nvrtc", shadowed=shadowed), *cuda]
    image = "ptx" if arch.startswith("compute") else "cubin"
    made, log = Nvrtc(str(toolchain().nvrtc)).compile("shadows.cu", source, options, image)
    assert made is not None, log[:4000]
    return made


def constants(ptx: str, name: str) -> list[list[int]]:
    """The results that the compiler found, from the constant of that name in PTX."""
    found = re.search(rf"\.(b8|u64|b64) {name}(?:\[\d+\])? = \{{([^}}]*)\}}", ptx)
    assert found, name
    values = [int(word) for word in found[2].split(",")]
    if found[1] == "b8":
        values += [0] * (CAPACITY * 8 + 8 - len(values))
        return unpacked(bytes(values))
    raise AssertionError(found[1])


def unpacked(numbers: bytes) -> list[list[int]]:
    """The records of a `Numbers`, case by case: the hash of the type, then the leaves."""
    count, cases = struct.unpack_from("<ii", numbers, CAPACITY * 8)
    assert 0 < count <= CAPACITY, count
    values = struct.unpack_from(f"<{count}Q", numbers)
    results: list[list[int]] = []
    for value in values:
        if value == 1000000000 + len(results):
            results.append([])
        else:
            results[-1].append(value)
    assert len(results) == cases
    return results


def names() -> dict[str, list[str]]:
    """The cases' expressions in order, by the function that has them."""
    text = (CASES / "shadow_cases.h").read_text()
    text = text.replace('#include "shadow_layouts.h"', random_layouts(seed=20, count=60))
    functions = re.split(r"void (\w+_cases)\(", text)
    return {
        function: re.findall(r"^ *CASE\((.*?)\);$", re.sub(r"\n {6,}", " ", body), re.MULTILINE)
        for function, body in zip(functions[1::2], functions[2::2], strict=True)
    }


def differing(ours: list[list[int]], theirs: list[list[int]], expressions: list[str]) -> dict[str, Any]:
    """The cases whose results are not the same, by expression."""
    assert len(ours) == len(theirs) == len(expressions)
    return {name: (a, b) for name, a, b in zip(expressions, ours, theirs, strict=True) if a != b}

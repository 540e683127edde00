"""Cases that `test_families.py` runs on a GPU that takes notes: calls that differ in extents and strides alone.

Those of a family whose plan follows from that of another are compared with themselves, planned anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_cases
import golden_gpu
from atomr_cutlass import SmArch
from atomr_cutlass.arrays import symbols
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.call import kept_plans

FAMILIES = int(os.environ.get("TEST_FAMILIES", "12"))
"""Of each operation."""
MEMBERS = 9
ODD_MEMBERS = 24
ARCHS = (SmArch.SM90A, SmArch.SM80)


GPU: golden_gpu.Gpu


class Member(golden_cases.Draw):
    """The draws of a family, but for the extents: a member's are a little larger, of every fourth quite other."""

    def __init__(self, family: str, number: int) -> None:
        super().__init__(family)
        self._alike = number % 4 != 3
        self._base = golden_cases.Draw(f"{family}/{'base' if self._alike else number}", most=5000)
        self._more = golden_cases.Draw(f"{family}/{number}")

    def of(self, values: Sequence[golden_cases.Value]) -> golden_cases.Value:
        extents = len(values) > 3 and all(isinstance(value, int) and value > 0 for value in values)
        if extents and 16 < max(values) < (100 if self._alike else 1000):  # type: ignore[type-var, operator]
            return self._more.of(values)
        return super().of(values)

    def extent(self, most: int = 9000) -> int:
        return min(most, self._base.extent(most) + self._alike * 16 * self._more.below(4))


def families(op: str) -> Iterator[list[golden_cases.Case]]:
    """Calls of an operation, family by family."""
    for number in range(FAMILIES):
        name = f"families/{op}/{GPU.arch.value}/{number}"
        yield [
            golden_cases._MAKERS[op](Member(name, member), f"{op}/{GPU.arch.value}/{number}", "full", GPU.arch)
            for member in range(MEMBERS)
        ]


class Odd:
    """Calls of a family whose arrays lie in any way: gaps, overlapping rows, columns first, backwards, broadcast.

    What all members have in common is drawn by `family`, the rest by `member`.
    """

    USUAL = (1, 1, 2, 8, 16, 16, 24, 64, 64, 100, 128, 128, 256, 512, 1000, 4096)
    RARE = (0, 0, 3, 7, 33, 2**16, 2**31 + 16, 2**40)

    def __init__(self, name: str, number: int) -> None:
        self.family, self.member = golden_cases.Draw(name), golden_cases.Draw(f"{name}/{number}")
        self.made, self.how = golden_cases.Operands(), {}
        self._gaps = self.family.chance(60)

    def extent(self) -> int:
        return self.member.of(self.RARE if self.member.chance(4) else self.USUAL)

    def strides(self, shape: Sequence[int], *, columns: bool) -> list[int]:
        """Mostly such as kernels take."""
        draw, strides, step = self.member, [0] * len(shape), 1
        axes = list(range(len(shape)))
        if len(shape) > 1 and columns != draw.chance(4):
            axes[-2:] = axes[:-3:-1]
        for axis in reversed(axes):
            strides[axis] = step
            step *= max(1, shape[axis])
            step += draw.of((0, 0, 0, 0, 8, 64, 1, -1 if step > 1 else 0)) if axis == axes[-1] and self._gaps else 0
        if draw.chance(4):
            axis = draw.below(len(shape))
            strides[axis] = draw.of((0, -strides[axis], 2 * strides[axis], strides[axis] + 1))
        return strides

    def put(self, name: str, dtype: str, *shape: int, often: int = 100) -> None:
        if not self.family.chance(often):
            return
        offset = 8 * self.family.chance(8)
        columns = self.family.chance(90 if name == "b" and dtype in ("e4m3", "i8") else 30)
        if self.member.chance(2):  # not what the others have, or is refused
            shape = (*shape[:-1], shape[-1] + 1)
        self.made.put(name, dtype, shape, self.strides(shape, columns=columns), offset=offset)

    def option(self, name: str, *values: Any) -> None:
        value = self.family.of(values)
        if value is not None:
            self.how[name] = value

    def case(self, function: Any, *positional: str) -> golden_cases.Case:
        return golden_cases._case("", "full", function, self.made, self.how, *positional)


def odd_gemm(odd: Odd) -> golden_cases.Case:
    family, (m, n, k, *batch) = odd.family, (odd.extent() for _ in range(5))
    dtype = family.of(("bf16", "bf16", "f16", "f32", "f64", "e4m3", "i8"))
    result = {"e4m3": "bf16", "i8": "i32"}.get(dtype, dtype)
    lead = tuple(batch[: family.of((0, 0, 1, 2))])
    odd.put("a", dtype, *lead, m, k)
    odd.put("b", dtype, *(lead if family.chance(50) else ()), k, n)
    odd.put("out", result, *lead, m, n, often=60)
    if family.chance(30):
        odd.put("c", result, *lead, m, n)
        odd.how["beta"] = 1
        if family.chance(50) and "out" in odd.made.arrays and odd.member.chance(50):
            odd.made.arrays["out"] = odd.made.arrays["c"]
    if dtype not in ("i8", "e4m3") and family.chance(40):
        odd.put("bias", result, n, often=70)
        odd.option("activation", "relu", "gelu", None)
    elif dtype == "e4m3" and family.chance(50):
        odd.put("scale_a", "f32", *family.of(((1,), (*lead, m, 1), (*lead, m, -(-k // 128)))))
        odd.put("scale_b", "f32", *family.of(((1,), (1, n), (-(-k // 128), -(-n // 128)))))
    odd.option("precision", *(("tf32", "3xtf32", None) if dtype == "f32" else (None,)))
    odd.option("alpha", None, None, 0, 2)
    odd.option("fast_accum", None, True)
    odd.option("jit", None, "off", "off")
    return odd.case(ac.gemm, "a", "b")


def odd_gemv(odd: Odd) -> golden_cases.Case:
    family, (m, k, *batch) = odd.family, (odd.extent() for _ in range(4))
    dtype, lead = family.of(("bf16", "f16", "f32")), tuple(batch[: family.of((0, 0, 1, 2))])
    odd.put("a", dtype, *lead, m, k)
    odd.put("x", dtype, *lead, k)
    odd.put("out", dtype, *lead, m, often=50)
    odd.option("jit", None, "off")
    return odd.case(ac.gemv, "a", "x")


def odd_gated_gemm(odd: Odd) -> golden_cases.Case:
    m, f, k = (odd.extent() for _ in range(3))
    dtype = odd.family.of(("bf16", "f16"))
    odd.put("a", dtype, m, k)
    odd.made.add("b", dtype, (k, 2 * f), columns=odd.family.chance(80), pad=odd.member.of((0, 0, 8)))
    odd.made.add("out", dtype, (m, f), pad=odd.member.of((0, 0, 0, 8, 1)))
    odd.option("activation", "silu", "gelu")
    odd.option("jit", None, "off")
    return odd.case(ac.gated_gemm, "a", "b")


def odd_grouped_gemm(odd: Odd) -> golden_cases.Case:
    family, (rows, n, k, groups) = odd.family, (odd.extent() for _ in range(4))
    groups = min(groups, 64)
    dtype, masked = family.of(("bf16", "f16", "e4m3")), family.chance(40)
    odd.put("a", dtype, *((groups, rows, k) if masked else (rows, k)))
    odd.put("b", dtype, groups, k, n)
    odd.made.add("counts" if masked or family.chance(40) else "offsets", "i32", (groups,))
    odd.put("bias", "bf16", *family.of(((n,), (groups, n))), often=25)
    odd.option("jit", None, "off")
    return odd.case(ac.grouped_gemm, "a", "b")


def odd_conv2d(odd: Odd) -> golden_cases.Case:
    family, op = odd.family, odd.family.of(("conv2d", "conv2d", "conv2d_dgrad", "conv2d_wgrad"))
    dtype, tap, nchw = family.of(("bf16", "f16", "f32", "e4m3")), family.of((1, 1, 3, 5)), family.chance(40)
    n, h, w, c, k = (min(odd.extent(), most) for most in (64, 100, 100, 1000, 1000))
    step, pad = family.of((1, 1, 2)), family.of((0, tap // 2))
    p, q = (max(0, extent + 2 * pad - tap) // step + 1 for extent in (h, w))
    groups = c if family.chance(15) else 1
    k = c if groups > 1 else k

    def put(name: str, shape: tuple[int, ...], element: str = dtype, often: int = 100) -> None:
        b, e, f, g = shape
        if odd.member.chance(8):
            odd.put(name, element, *((b, g, e, f) if nchw else shape), often=often)
        elif odd.family.chance(often):
            wide = g + odd.member.of((0, 0, 0, 8, 1))
            strides = (e * f * wide, f * wide, wide, 1)
            places = (0, 3, 1, 2) if nchw else (0, 1, 2, 3)
            odd.made.put(name, element, *([of[place] for place in places] for of in (shape, strides)))

    shapes = {"x": (n, h, w, c), "w": (k, tap, tap, c // max(1, groups)), "dy": (n, p, q, k)}
    first, second, last = {
        "conv2d": ("x", "w", "dy"), "conv2d_dgrad": ("dy", "w", "x"), "conv2d_wgrad": ("dy", "x", "w"),
    }[op]  # fmt: skip
    put(first, shapes[first])
    put(second, shapes[second])
    put("out", shapes[last], "bf16" if dtype == "e4m3" else dtype, often=40)
    if last != "dy":
        b, e, f, g = shapes[last]
        odd.how[f"{last}_shape"] = (b, g, e, f) if nchw else (b, e, f, g)
    if last == "dy":
        odd.put("bias", "bf16" if dtype == "e4m3" else dtype, k, often=30)
    odd.how |= {"stride": step, "padding": pad, "groups": groups, "layout": "nchw" if nchw else "nhwc"}
    odd.option("jit", None, "off")
    return odd.case(getattr(ac, op), first, second)


def odd_matmul(odd: Odd) -> golden_cases.Case:
    family, member, (m, n, k) = odd.family, odd.member, (min(odd.extent(), 2**20) for _ in "mnk")
    dtype, (transa, transb) = family.of(("bf16", "f16", "f32", "e4m3")), (family.chance(60), family.chance(40))
    result, masked = "bf16" if dtype == "e4m3" else dtype, family.chance(30)
    stored = {"a": (k, m) if transa else (m, k), "b": (n, k) if transb else (k, n), "c": (m, n), "d": (m, n)}

    def put(name: str, element: str, often: int = 100) -> bool:
        (rows, columns), given = stored[name], family.chance(often)
        pad, flat = member.of((0, 0, 0, 8, 16, 1)), family.chance(15)
        size = max(0, (columns - 1) * (rows + pad) + rows - member.chance(2))
        if given and flat:
            odd.made.put(name, element, (size,), (1,))
        elif given and member.chance(5):
            odd.made.put(name, element, (1, size), (size, 1))
        elif given:
            strides = [rows + pad, 1] if member.chance(95) else odd.strides((columns, rows), columns=False)
            odd.made.put(name, element, (columns, rows), strides)
        if given and (pad or member.chance(30)):
            odd.how[f"ld{name}"] = max(1, rows) + pad
        return given

    put("a", dtype)
    put("b", dtype)
    if put("c", result, 30):
        odd.how["beta"] = 1
    put("d", result, 60)
    epilogue = ac.MatmulEpilogue.DEFAULT
    if masked and dtype != "e4m3":
        epilogue = ac.MatmulEpilogue.RELU_AUX_BIAS
        odd.put("bias", result, m)
        odd.made.put("gelu_aux", "u8", (n, -(-m // 8)), (-(-m // 8), 1))
    elif family.chance(30):
        epilogue = ac.MatmulEpilogue.GELU_BIAS
        odd.put("bias", result, m)
    odd.option("jit", None, "off")
    odd.option("alpha", None, None, 0, 2)
    odd.how |= {"m": m, "n": n, "k": k, "transa": transa, "transb": transb, "epilogue": epilogue}

    def matmul(*arrays: Any, **given: Any) -> Any:
        return ac.matmul(ac.MatmulRequest(*arrays, **given))

    return odd.case(matmul, "a", "b")


def odd_families(make: Callable[[Odd], golden_cases.Case]) -> Iterator[list[golden_cases.Case]]:
    """Calls of an operation with odd arrays, family by family."""
    for number in range(FAMILIES):
        yield [make(Odd(f"{make.__name__}/{GPU.arch.value}/{number}", member)) for member in range(ODD_MEMBERS)]


def dense(op: str) -> Iterator[list[golden_cases.Case]]:
    """Calls whose arrays are dense and of any extents, all in one family."""

    def member(number: int) -> golden_cases.Case:
        draw, made = golden_cases.Draw(f"dense/{op}/{number}"), golden_cases.Operands()
        (m, n, k), how = (draw.extent(4000) for _ in "mnk"), {}
        n, k = 8 * n, 8 * k
        made.add("a", "bf16", (m, k))
        if op == "gemv":
            made.add("x", "bf16", (k,))
            return golden_cases._case("", "full", ac.gemv, made, how, "a", "x")
        made.add("b", "bf16", (k, n), columns=op != "gemm")
        if op == "fused":
            made.add("bias", "bf16", (n,))
            how = {"activation": "gelu"}
        made.add("out", "bf16", (m, n))
        return golden_cases._case("", "full", ac.gemm, made, how, "a", "b")

    yield [member(number) for number in range(2 * ODD_MEMBERS)]  # dozens of kernels share such calls


def compare(drawn: Iterator[list[golden_cases.Case]], least: int) -> None:
    """Compares; `least` is how many calls in a hundred are to be served without being parsed."""
    calls = derived = 0
    with fake_cases.parsed() as parsed:
        for members in drawn:
            kept_plans.clear()
            family, made = {case.text: case for case in members}.values(), []
            for case in family:
                before = len(parsed)
                made.append(GPU.record("full", case.call, case.operands, forgetting=False))
                derived += len(parsed) == before
                calls += 1
            for case, found in zip(family, made, strict=True):
                anew = GPU.record("full", case.call, case.operands)
                assert found == anew, f"{case.text}: {found} in place of {anew}"
    assert 100 * derived >= least * calls, f"{derived} of {calls}"


def case_gemm() -> None:
    compare(families("gemm"), 20)


def case_dense_gemm() -> None:
    compare(dense("gemm"), 15)


def case_dense_gemm_with_bias_and_activation() -> None:
    compare(dense("fused"), 50)


def case_dense_gemv() -> None:
    compare(dense("gemv"), 60)


def case_gemm_with_epilogues() -> None:
    compare(families("gemm_epilogue"), 0)


def case_gemm_with_scales() -> None:
    compare(families("gemm_scaled"), 0)


def case_fp4() -> None:
    compare(families("gemm_fp4"), 0)


def case_gated_gemm() -> None:
    compare(families("gated_gemm"), 0)


def case_gemv() -> None:
    compare(families("gemv"), 10)


def case_grouped_gemm() -> None:
    compare(families("grouped_gemm"), 5)


def case_conv2d() -> None:
    compare(families("conv2d"), 1)


def case_conv2d_dgrad() -> None:
    compare(families("conv2d_dgrad"), 0)


def case_conv2d_wgrad() -> None:
    compare(families("conv2d_wgrad"), 0)


def case_matmul() -> None:
    compare(families("matmul"), 0)


def case_quantize() -> None:
    compare(families("quantize"), 0)


def case_gemm_of_odd_arrays() -> None:
    compare(odd_families(odd_gemm), 0)


def case_gemv_of_odd_arrays() -> None:
    compare(odd_families(odd_gemv), 0)


def case_gated_gemm_of_odd_arrays() -> None:
    compare(odd_families(odd_gated_gemm), 0)


def case_grouped_gemm_of_odd_arrays() -> None:
    compare(odd_families(odd_grouped_gemm), 0)


def case_lists_of_many_matrices() -> None:
    """Programs as long as these would be are not kept."""
    for count in (2, 40, 600):
        members = []
        for number in range(4):
            made = golden_cases.Operands()
            for name in "ab":
                for place in range(count):
                    made.add(
                        name,
                        "bf16",
                        (64 + 16 * (number + place) % 256, 128) if name == "a" else (128, 64),
                        number=place,
                    )
            members.append(golden_cases._case("", "full", ac.grouped_gemm, made, {"jit": "off"}, "a", "b"))
        compare(iter([members]), 0)


def rows_of(count: int) -> golden_cases.Case:
    """A product of so many rows, which one kernel serves."""
    made = golden_cases.Operands()
    made.add("a", "bf16", (count, 512))
    made.add("b", "bf16", (512, 1024))
    return golden_cases._case("", "full", ac.gemm, made, {"jit": "off"}, "a", "b")


def served_anew(cases: Sequence[golden_cases.Case]) -> int:
    """How many of these calls are parsed."""
    with fake_cases.parsed() as parsed:
        for case in cases:
            GPU.record("full", case.call, case.operands, forgetting=False)
    return len(parsed)


def case_a_family_begins_anew_where_kernels_are_ranked_anew() -> None:
    kept_plans.clear()
    assert 0 < served_anew([rows_of(rows) for rows in range(4096, 4416, 8)]) < 10
    assert served_anew([rows_of(rows) for rows in range(4100, 4400, 24)]) == 0
    select._rosters.clear()
    # The old programs go on: they rank the same kernels.
    assert served_anew([rows_of(rows) for rows in range(4102, 4400, 24)]) == 0
    # What none of them serves is ranked anew, and noted with that.
    assert served_anew([rows_of(rows) for rows in (1, 2, 4, 8, 16, 32)]) > 0
    assert 0 < served_anew([rows_of(rows) for rows in range(4101, 4416, 8)]) < 12
    assert served_anew([rows_of(rows) for rows in range(4106, 4400, 24)]) == 0


def case_a_family_whose_programs_serve_no_other_call_learns_no_more() -> None:
    def call(number: int) -> golden_cases.Case:
        made = golden_cases.Operands()
        for name, shape in (("a", (8 + number, 128)), ("b", (128, 64))):
            for place in range(2):
                made.add(name, "bf16", shape, number=place)
        return golden_cases._case("", "full", ac.grouped_gemm, made, {"jit": "off"}, "a", "b")

    kept_plans.clear()
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbols, "tracing", lambda inputs, of=symbols.tracing: (traced.append(inputs), of(inputs))[1])
        assert served_anew([call(number) for number in range(200)]) > 150
    assert 0 < len(traced) <= 100


def case_matmul_of_odd_arrays() -> None:
    compare(odd_families(odd_matmul), 0)


def case_convolutions_of_odd_arrays() -> None:
    compare(odd_families(odd_conv2d), 0)


def case_batch_invariant_convolutions() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOMR_CUTLASS_BATCH_INVARIANT", "1")
        compare(families("conv2d"), 1)
        compare(odd_families(odd_conv2d), 0)
    kept_plans.clear()


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), devices.require_arch(devices.get(0)))
    fake_cases.run(globals())

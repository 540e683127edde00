"""Rules that several families share: reasons for refusals, and the element types of products."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .dtypes import CutlassDtype
from .epilogue.lower import LINEAR, SCALED, SOURCE, has_tree, is_common, is_gated, operand_kinds, split
from .epilogue.tree import MATRIX, SCALAR, EpilogueVisitorTree
from .epilogue.tree import ROW as ROW_KIND
from .key import ANYWHERE, COLUMN, DIRECT, ROW, KernelKey, turned_layouts

D = CutlassDtype

LAYOUTS = (ROW + ROW, ROW + COLUMN, COLUMN + ROW, COLUMN + COLUMN)
COMMON_LAYOUTS = (ROW + ROW, ROW + COLUMN)

HALF_TYPES = (D.F16, D.BF16)
FP8_TYPES = (D.F8E4M3, D.F8E5M2)

FEW = "few"
"""The mainloop of kernels for products with few rows or columns of D only."""

SPLIT = "split"
"""The mainloop of kernels whose thread blocks divide K as well as D."""

SLICED = "sliced"
"""The scheduler of kernels that add up K in slices, one after the other."""

BLOCKWISE = (1, 128, 128)
"""Block scales of fp8: one float for 1x128 elements of A, and one for 128x128 of B."""


@dataclass(frozen=True)
class Status:
    """Whether something is supported.

    Attributes:
        ok: whether it is.
        reason: why it is not, and the cure.
        passed: the number of rules that it meets before the one that refuses it, as a measure of nearness.
    """

    ok: bool
    reason: str = ""
    passed: int = 0

    def __bool__(self) -> bool:
        return self.ok


OK = Status(True)


def no(reason: str, passed: int = 0) -> Status:
    """A refusal."""
    return Status(False, reason, passed)


# --------------------------------------------------------------------------------------------------------------------
# Rules over element types. (a, b, math) -> the output types that exist.

GEMM_OUTPUTS: dict[tuple[D, D, str], tuple[D, ...]] = {
    (D.F16, D.F16, "default"): (D.F16, D.F32, D.BF16),
    (D.BF16, D.BF16, "default"): (D.BF16, D.F32, D.F16),
    (D.F32, D.F32, "ieee"): (D.F32, D.F16, D.BF16),
    (D.F32, D.F32, "tf32"): (D.F32, D.F16, D.BF16),
    (D.F32, D.F32, "3xtf32"): (D.F32, D.F16, D.BF16),
    (D.F64, D.F64, "default"): (D.F64,),
    (D.I8, D.I8, "default"): (D.I32,),
    **{
        (a, b, math): (D.BF16, D.F16, D.F32, D.F8E4M3, D.F8E5M2)
        for a in FP8_TYPES
        for b in FP8_TYPES
        for math in ("default", "fast")
    },
    (D.F4E2M1, D.F4E2M1, "default"): (D.BF16, D.F16, D.F32),
}

MATHS = ("default", "ieee", "tf32", "3xtf32", "fast")


TREE_OUTPUTS: dict[D, tuple[D, ...]] = {
    D.F16: (D.F8E4M3, D.F8E5M2, D.I8),
    D.BF16: (D.F8E4M3, D.F8E5M2, D.I8),
    D.F32: (D.F8E4M3, D.F8E5M2, D.I8),
    D.I8: (D.F32, D.F16, D.BF16, D.I8),
}
"""By the type of A: the element types of D that an epilogue tree allows beyond GEMM_OUTPUTS."""


def gemm_types(a: D, b: D, d: D, math: str, *, tree: bool = False) -> Status:
    """Whether a GEMM over these element types exists anywhere in the matrix.

    Args:
        a: element type of A.
        b: of B.
        d: of D.
        math: of the kernel's key.
        tree: whether an epilogue tree makes D.
    """
    outputs = GEMM_OUTPUTS.get((a, b, math))
    if outputs is not None and tree:
        outputs += TREE_OUTPUTS.get(a, ())
    if outputs is None:
        if a != b and not (a in FP8_TYPES and b in FP8_TYPES):
            return no(f"no kernel multiplies {a.value} by {b.value}: A and B must have one dtype (or be fp8 both)")
        maths = sorted(m for x, _, m in GEMM_OUTPUTS if x is a)
        if maths:
            return no(f"math {math!r} does not apply to {a.value}; valid: {', '.join(maths)}")
        pairs = ", ".join(sorted({x.value for x, _, _ in GEMM_OUTPUTS}))
        return no(f"no GEMM kernel takes {a.value} operands; valid: {pairs}")
    if d not in outputs:
        return no(f"{a.value} operands give {', '.join(o.value for o in outputs)}, not {d.value}")
    return OK


CONV_OUTPUTS: dict[tuple[D, D, str], tuple[D, ...]] = {
    (D.F16, D.F16, "default"): (D.F16, D.F32),
    (D.BF16, D.BF16, "default"): (D.BF16, D.F32),
    (D.F32, D.F32, "ieee"): (D.F32,),
    (D.F32, D.F32, "tf32"): (D.F32,),
    (D.F32, D.F32, "3xtf32"): (D.F32,),
    **{(a, b, "fast"): (D.BF16, D.F16, D.F32) for a in FP8_TYPES for b in FP8_TYPES},
}


def conv_types(op: str, a: D, b: D, d: D, math: str, *, tree: bool = False) -> Status:
    """Whether a convolution over these element types exists anywhere in the matrix.

    Args:
        op: operation of the kernel's key.
        a: element type of A.
        b: of B.
        d: of D.
        math: of the kernel's key.
        tree: whether an epilogue tree makes D.
    """
    if a in FP8_TYPES and b in FP8_TYPES:
        if op != "conv2d_fprop":
            return no("CUTLASS has fp8 convolutions forward only")
        if math != "fast":
            return no("fp8 convolutions accumulate in the tensor cores alone: their math is 'fast'")
    outputs = CONV_OUTPUTS.get((a, b, math))
    if outputs is not None and tree:
        outputs += TREE_OUTPUTS.get(a, FP8_TYPES if a in FP8_TYPES else ())
    if outputs is None:
        if a != b:
            return no(f"no convolution of {a.value} with {b.value}: both operands have one dtype (or are fp8 both)")
        maths = sorted(m for x, _, m in CONV_OUTPUTS if x is a)
        if maths:
            return no(f"math {math!r} does not apply to convolutions of {a.value}; valid: {', '.join(maths)}")
        valid = ", ".join(sorted({x.value for x, _, _ in CONV_OUTPUTS}))
        return no(f"no convolution takes {a.value} operands; valid: {valid}")
    if d not in outputs:
        return no(f"convolutions of {a.value} give {', '.join(o.value for o in outputs)}, not {d.value}")
    return OK


def accumulator(a: D) -> D:
    """The accumulator's element type for operands of type `a`."""
    return {D.F64: D.F64, D.I8: D.I32}.get(a, D.F32)


def epilogue_compute(acc: D, *, tree: bool = False) -> D:
    """The type in which alpha, beta and the epilogue are evaluated: the accumulator's; for trees a floating one."""
    return D.F32 if tree and acc is D.I32 else acc


def supports_layouts(generation: str, a: D, layout_a: str, layout_b: str) -> Status:
    """Whether a generation supports these A and B layouts; a refusal names the transpose as a cure.

    WGMMA itself reads 8-bit and tf32 operands contiguous along K only: for the other layouts CUTLASS's sm90 builder
    passes A, or B with the operands swapped, through registers (the RS mainloop).
    """
    if generation == "sm90" and a in (D.I8, D.F32, *FP8_TYPES) and (layout_a, layout_b) == (COLUMN, ROW):
        return no(
            "8-bit and tf32 kernels of the sm90 generation need A or B contiguous along K (CUTLASS 4.2's transposing "
            "mainloop faults with int8 and spills with tf32): make B contiguous along K, for example "
            "b = b.T.contiguous().T"
        )
    if generation == "sm80" and a.bits == 8 and (layout_a, layout_b) != (ROW, COLUMN):
        return along_k("8-bit kernels of the sm80 generation", layout_a, layout_b)
    return OK


def is_fallback(key: KernelKey) -> bool:
    """Whether a kernel is a slow fallback for operands that others cannot read: unaligned, or of any channels.

    False for kernels that never use wider loads, whatever the alignment: IEEE fp32, fp64, direct kernels, casts.
    """
    if key.is_elementwise or key.mainloop in (DIRECT, *ANYWHERE) or key.math == "ieee":
        return False
    single = min(key.align_a, key.align_b) == 1 and key.a is not CutlassDtype.F64
    return single or key.mainloop == "twostage" or key.iterator == "analytic"


def serves_usual_case(key: KernelKey, fallback: KernelKey) -> bool:
    """Whether a kernel serves the problems of a fallback of its op whose operands are aligned, for D or D^T."""
    alike = ("op", "arch", "a", "b", "d", "math", "group_mode", "scale_type")
    layouts = key.layout_a + key.layout_b + key.layout_d
    served = (layouts, turned_layouts(layouts)) if key.a is key.b else (layouts,)
    return (
        not is_fallback(key)
        and key.mainloop not in (FEW, SPLIT, *ANYWHERE)
        and key.scheduler != SLICED
        and all(getattr(key, name) == getattr(fallback, name) for name in alike)
        and fallback.layout_a + fallback.layout_b + fallback.layout_d in served
        and key.epilogue in (fallback.epilogue, SCALED if fallback.epilogue == LINEAR else fallback.epilogue)
        # A kernel for strides also serves strides of one.
        and (fallback.stride_support != "strided" or key.stride_support == "strided")
    )


def along_k(who: str, layout_a: str, layout_b: str) -> Status:
    """The refusal of kernels that need both operands contiguous along K."""
    wrong = [name for name, layout, need in (("A", layout_a, ROW), ("B", layout_b, COLUMN)) if layout != need]
    return no(
        f"{who} need A row-major and B column-major (both contiguous along K): "
        f"make {' and '.join(wrong)} contiguous along K, for example "
        + " and ".join(f"{n.lower()} = {n.lower()}.T.contiguous().T" for n in wrong)
    )


NOT_GATED = no("gated results are those of sm_90a's dense kernels: gate the product afterwards")


def supports_gemm(key: KernelKey, epilogues: tuple[str, ...], layouts_d: tuple[str, ...] = (ROW,)) -> Status:
    """Whether a key meets the rules that all families of dense GEMM share.

    Args:
        key: the key.
        epilogues: ids of the family's epilogues.
        layouts_d: of D, those of the family.
    """
    base, program = split(key.epilogue)
    if base not in epilogues and is_gated(key.epilogue):
        return NOT_GATED
    if base not in epilogues:
        return no(f"unknown epilogue {key.epilogue!r}; valid: {', '.join(epilogues)}")
    types = gemm_types(key.a, key.b, key.d, key.math, tree=has_tree(key.epilogue))
    if not types:
        return types
    if program:
        if is_gated(key.epilogue) and operand_kinds(program) != ([], []):
            return no("the tree of a gated epilogue has no operands and writes D alone")
        tree = supports_tree(program, key.acc, key.d)
        if not tree:
            return tree
    if is_common(key.epilogue) and (key.acc is not D.F32 or key.scale_type):
        return no("the common epilogue is for products in f32 without block scales")
    if key.acc is not accumulator(key.a):
        return no(f"{key.a.value} operands accumulate in {accumulator(key.a).value}, not {key.acc.value}")
    if key.layout_d not in layouts_d:
        return no("D is row-major in cells of this family; a column-major D is computed as D^T = B^T A^T")
    return supports_layouts(key.generation, key.a, key.layout_a, key.layout_b)


@functools.cache
def supports_tree(program: str, acc: D, d: D) -> Status:
    """Whether a tree can be lowered on top of an accumulator.

    Args:
        program: of the tree; an input may be the source, which is loaded as the C operand.
        acc: element type of the accumulator.
        d: element type of C and D.
    """
    try:
        EpilogueVisitorTree.parse(program.replace(f"input:{SOURCE}:", f"input:{MATRIX}:"))
    except ValueError as error:
        return no(str(error))
    if d is D.I32:
        return no("epilogue trees compute in f32, which does not hold every i32: ask for f32, f16, bf16 or i8 as D")
    inputs, outputs = operand_kinds(program)
    sources = [dtype for kind, dtype in inputs if kind == SOURCE]
    if len(sources) > 1 or any(dtype != d.value for dtype in sources):
        return no("only one matrix, of D's element type, is loaded as the C operand")
    reduced_in = D.F64 if acc is D.F64 else D.F32
    for _, dtype, reduction in outputs:
        if reduction and dtype != reduced_in.value:
            return no(f"a tree over {acc.value} accumulators reduces in {reduced_in.value}, not {dtype}")
    return OK


NO_EPILOGUE_OF_WGRAD = no(
    "the gradient of a filter has no epilogue: its columns are taps and channels, several dimensions, where kernels' "
    "epilogues know one"
)


def supports_conv_tree(key: KernelKey) -> Status:
    """Whether a convolution's kernel can evaluate a tree over its pixels and channels.

    Args:
        key: of a convolution, whose epilogue has a tree.
    """
    if key.op == "conv2d_wgrad":
        return NO_EPILOGUE_OF_WGRAD
    if key.generation != "sm90":
        return no(
            "epilogue trees of convolutions are those of sm_90a's TMA kernels: implicit GEMM of CUTLASS 2.x has no "
            "visitors, but bias and activation"
        )
    return OK if is_common(key.epilogue) else supports_tree(split(key.epilogue)[1], key.acc, key.d)


def supports_grouped_tree(epilogue: str) -> Status:
    """Whether a grouped kernel can evaluate the tree of an epilogue, if it has one, for groups of any extents.

    Args:
        epilogue: of a key that `supports_gemm` accepts.
    """
    program = split(epilogue)[1]
    if not program:
        return OK
    inputs, outputs = operand_kinds(program)
    if outputs:
        return no(
            "grouped kernels store D alone: of what a tree stores or reduces beside it, each group would have its own"
        )
    others = sorted({kind for kind, _ in inputs} - {ROW_KIND, SCALAR})
    if others:
        return no(
            f"the trees of grouped kernels read rows and scalars, not a {others[0]}: where the rows of a group begin "
            "is known on the device only"
        )
    return OK

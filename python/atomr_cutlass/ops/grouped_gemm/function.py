"""`grouped_gemm`: several products of different extents in one call."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.layouts import MatrixSpec
from ...arrays.numerics import AnyArray, math_mode, numpy_dtype
from ...checks import NUMBERS, check_extents, check_options
from ...epilogue.bind import BoundEpilogue, bind, refuse_scale_d
from ...epilogue.results import GroupedResult, Views, common_dtype
from ...epilogue.trace import Traced
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ...generator.rules import FP8_TYPES, accumulator
from ...pipeline import reduction
from ...pipeline.call import Call, Invocation, Result, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan
from ..product import Product
from .kernels import make
from .problem import ALONG_K, CONTIGUOUS, LIST, MASKED, GroupedProblem, GroupScale, Shape, following, scale_forms

CHECK = "ATOMR_CUTLASS_CHECK"

Extents = tuple[int, int, int]

_PRODUCT = ("a", "b", "c", "offsets", "counts", "scale_a", "scale_b")
"""Operands in the order of a plan's call, before those of the epilogue and the result."""


@stored(CHECK, reduction.VARIABLE, a="a", b="b", c="c", offsets="offsets", counts="counts", bias="bias")
@documented
def grouped_gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    offsets: Any = None,
    counts: Any = None,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
    batch_invariant: bool | None = None,
    check: bool | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """D[g] = saturating_cast(scale_d * act(alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g] + bias[g])).

    All products are computed in one launch. With `epilogue`, D[g] is the result of its tree.

    | form | a | b | result | who belongs to group g |
    |---|---|---|---|---|
    | contiguous | (rows, K) | (G, K, N) | (rows, N) | rows offsets[g - 1] (0 for the first) to offsets[g] |
    | masked | (G, rows, K) | (G, K, N) | (G, rows, N) | of a[g], the first counts[g] rows |
    | along K | (M, total K) | (total K, N) | (G, M, N) | columns of a and rows of b, by offsets |
    | lists | list of (M, K) | list of (K, N) | list of (M, N) | the g-th of each list; extents may differ |

    Groups may be empty, and need not fill the rows. `offsets` and `counts` are where a and b are: a GPU's are read
    there, when the kernel runs, and never by the host. A call does not synchronize, may be captured into a CUDA graph,
    and replays with the values that are there then. So they cannot be refused either: **on a GPU they are not
    checked**. Negative sizes, and ends that decrease, make a group empty; rows beyond the last are cut off; where
    ends decrease, the groups around may overlap and write the same rows. Nothing outside the operands is read or
    written. `check=True` looks at them first. Those of host arrays are always checked.

    Rows of the result that no group has keep the values of `out`, and are unspecified in a new result. An empty group
    along K leaves act(beta * C + bias).

    Args:
        a: see the table. Anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back).
            Kernels read fp16, bf16 and fp8; rows are contiguous, and along K columns are.
        b: see the table. fp8 kernels need it contiguous along K.
        c: of the result's shape and dtype (a list for lists); needed exactly when `beta` is not 0.
        offsets: (G,) int32: cumulative ends of the groups. Not for the masked form and lists.
        counts: (G,) int32: sizes of the groups, instead of offsets; needed for the masked form.
        out: written in place and returned, its rows contiguous; may be `c` itself. A list for lists. Not for JAX.
        bias: added to every row: (N,) for all groups or (G, N), a list of (N,) for lists; of a floating dtype. Kernels
            of the sm80 generation, which serve GPUs before sm_90 and operands that are not aligned to 16 bytes, read
            it in the place of `c`: of the result's dtype, contiguous, and without a `c`.
        epilogue: function of the products, instead of bias and activation: an `EpilogueVisitorTree`, or a Python
            function such as `lambda acc, bias, scale: silu(acc + bias) * scale`, which is traced at every call, as for
            `gemm`. `acc` is alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g]. It reads rows and scalars and
            writes D alone, whose element type it may decide. Kernels of the sm80 generation evaluate act(acc + bias).
        scale_a: factors of a: a number, or float32 on the operands' device: one element, (G,) one for each group, one
            for each row ((rows, 1); masked (G, rows, 1); along K (M, 1) or (G, M, 1)), or in blocks of 128 along K
            ((rows, ceil(K / 128)); masked (G, rows, ceil(K / 128))). A list for lists, or one for all. Arrays are for
            fp8.
        scale_b: factors of b: a number, one element, (G,), (G, 1, N), with block scales
            (G, ceil(K / 128), ceil(N / 128)); along K (1, N) or (G, 1, N). A list for lists, or one for all.
        scale_d: factor of the results, a number; not after bias, activation or an epilogue.
        check: whether to copy offsets or counts to the host, which waits for the GPU, and refuse those that are
            negative, decrease or exceed the rows. For debugging; not while a CUDA graph is captured. None leaves it
            to the environment variable ATOMR_CUTLASS_CHECK (1 is yes, but for calls that are captured).
        operands_of_epilogue: the operands of `epilogue` by their names, on the device of `a`: rows, (N,) for all groups
            or (G, N) or (G, 1, N), and scalars of one element for all groups or (G, 1, 1). For lists, a list with one
            for each; a scalar may be one array for all. Of a function also numbers, which become constants of its
            kernel.

    Returns:
        `out`, or a new array (list of arrays) of the kind of `a`.

    Raises:
        InvalidOperandError: operands of no form, or one of the wrong shape, dtype, strides, device or overlap; with
            `check` or host arrays, the first of offsets or counts that is wrong.
        UnsupportedError: no kernel can serve the call, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {
        "a": a, "b": b, "c": c, "offsets": offsets, "counts": counts, "scale_a": _one_number(scale_a),
        "scale_b": _one_number(scale_b), "scale_d": scale_d, "bias": bias,
    }  # fmt: skip
    options = CallOptions.of(locals())
    check_options(check=check)
    checks = os.environ.get(CHECK) == "1" if check is None else bool(check)
    call = Call(_parse, arrays, out, options, epilogue, operands_of_epilogue, (check,), parsed=checks)
    if _is_list(a) and _is_list(b) and not a and not b:
        call.check("grouped_gemm")
        return [] if out is None else out
    return call


def _is_list(array: Any) -> bool:
    return isinstance(array, (list, tuple))


def _one_number(scale: Any) -> Any:
    """The number of a list of equal numbers; any other scale unchanged."""
    if not _is_list(scale) or not scale or not isinstance(scale[0], NUMBERS):
        return scale
    if all(isinstance(value, NUMBERS) and np.array_equal(value, scale[0], equal_nan=True) for value in scale):
        return scale[0]
    raise UnsupportedError("scales of a list that are numbers must be the same: give different ones as arrays")


@dataclass(frozen=True, kw_only=True)
class _GroupedGemm(Product):
    """Products of groups, parsed.

    Attributes:
        labels: the labels of the arrays of each of the product's operands, in the order of a plan's call.
        divided: `offsets` or `counts`, whichever is given; None for lists.
        scale_forms: the forms of `scale_a` and `scale_b`, where they are arrays.
        tree: the epilogue tree; None where kernels without trees compute D.
    """

    form: str
    labels: dict[str, tuple[str, ...]]
    divided: str | None
    epilogue: BoundEpilogue
    scale_forms: dict[str, str]
    tree: EpilogueVisitorTree | None

    @property
    def empty(self) -> bool:
        return self.epilogue.result.number == 0 or all(0 in result.shape for result in self.results.values())

    def check_kernels(self) -> None:
        """Checks offsets or counts of host arrays and, with `check`, of GPU arrays."""
        (check,) = self.call.own
        if self.divided is None or (self.on_gpu and not self.call.parsed):
            return
        if not self.on_gpu or not _core.capturing(self.first.device, operands.launch_stream().handle):
            self._bounds()
        elif check:
            raise UnsupportedError("check copies to the host, which a stream that is captured cannot: leave it out")

    def _bounds(self) -> list[tuple[int, int]]:
        """The begin and end of each group; checks offsets or counts."""
        from .reference import group_bounds  # launches do not need it

        name, (*_, rows, columns) = str(self.divided), self.first.shape
        values = self.fetch(self.inputs[name])
        return group_bounds(name, values, columns if self.form == ALONG_K else rows, self.form)

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        labels, result, tree = self.labels, self.epilogue.result, self.tree
        if self.divided is not None and result.number > 1 and views[self.divided].strides != (1,):
            raise UnsupportedError(f"{self.divided} has strides {views[self.divided].strides}: make it contiguous")

        def specs(labels: Iterable[str]) -> tuple[MatrixSpec, ...]:
            return tuple(MatrixSpec.of(views[label], label) for label in labels)

        problem = GroupedProblem(
            form=self.form, groups=result.number, a=specs(labels["a"]), b=specs(labels["b"]),
            c=specs(labels.get("c", ())), d=specs(self.results), counted=self.divided == "counts", math=self.math,
            device=views[labels["a"][0]].device, fusion=None if tree is None else result.fusion(tree, views),
            **{name: GroupScale(specs(labels[name]), scaling) for name, scaling in self.scale_forms.items()},
        )  # fmt: skip
        return make(problem, like=like, stream=stream, **self.call.planning)

    def order(self, made: Any) -> tuple[str, ...]:
        return (*itertools.chain(*self.labels.values()), *self.epilogue.inputs, *self.results)

    def uploaded(self) -> dict[str, _core.Operand]:
        # Kernels read B of fp8, and A of groups along K, column-major.
        fp8 = operands.dtype_of(self.first, "a") in FP8_TYPES
        columns = self.labels["b"] if fp8 else self.labels["a"] if self.form == ALONG_K else ()
        host = {label: operands.to_numpy(view) for label, view in self.inputs.items()} | self._before()
        return {label: operands.upload(array, 0, columns=label in columns) for label, array in host.items()}

    def _before(self) -> dict[str, AnyArray]:
        """Host copies of D before the call, by label; refuses results that share memory, as plans do."""
        operands.check_apart({label: view for label, view in self.views.items() if label in self.results}, {})
        return {
            label: np.zeros(result.shape, numpy_dtype(self.result)) if result.view is None else self.fetch(result.view)
            for label, result in self.results.items()
        }

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from .reference import grouped_gemm as compute

        alpha, beta = self.call.scalars
        given = {name: [host[label] for label in of] for name, of in self.labels.items() if name != self.divided}
        computed = compute(
            self.form, [] if self.form == LIST else self._bounds(), given, self.scale_forms, self.tree,
            self.epilogue.result.of_groups(self.epilogue.tree, host), list(self._before().values()),
            out_dtype=self.result, alpha=alpha, beta=beta, math=self.math,
        )  # fmt: skip
        return dict(zip(self.results, computed, strict=True))


def _parse(call: Call) -> Invocation:
    call.check("grouped_gemm")
    options, arrays = call.options, call.arrays
    of_d = "grouped kernels read no scale of D, give a number, or multiply in an epilogue"
    call.refuse_scale_arrays(of_d, ("scale_d",))
    if call.follows:
        refuse_scale_d(arrays["scale_d"])
    outs = {f"{RESULT}[{g}]": out for g, out in enumerate(call.out)} if _is_list(call.out) else {RESULT: call.out}
    for label, array in outs.items():
        operands.refuse_jax_out(array, label)
    given = {name: arrays[name] for name in _PRODUCT if name not in call.numbers} | {"c": call.c, RESULT: call.out}
    _check_kinds(given if call.epilogue is not None else {**given, "bias": arrays["bias"]})
    lists = {name for name, array in {**arrays, **call.others, RESULT: call.out}.items() if _is_list(array)}
    listed = "a" in lists
    over = GroupedResult(len(arrays["a"]) if listed else 0, (), {*lists, RESULT} if listed else lists)
    views = {name: over.view(array, name) for name, array in given.items() if array is not None}
    form, number, extents, shapes = _list_form(views) if listed else _array_form(views)
    over = replace(over, number=number, members=shapes)
    every = over.labelled(views)
    for label, view in every.items():
        check_extents(view.shape, label)
    operands.check_devices(every)
    for name in ("c", RESULT):
        for (label, view), shape in zip(over.labelled({name: views.get(name, ())}).items(), over.members, strict=False):
            if view.shape != shape:
                raise InvalidOperandError(f"{label} has shape {view.shape}; expected {shape}")
    divided = None if listed else _divided_by(views, number, form)
    alike = (name for name in ("a", "b", "c", RESULT) if name in views)
    dtype, other, *_ = (common_dtype(over.labelled({name: views[name]})) for name in alike)
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one dtype, but for two of fp8"
        )
    out_dtype = operands.result_dtype({name: some[0] for name, some in views.items()}, options.out_dtype, dtype)
    taken = {*_PRODUCT, "scale_d"} - {"c"}
    epilogue = bind(call, over, views, taken=taken, out_dtype=out_dtype, acc=accumulator(dtype))
    traced = epilogue.traced
    return _GroupedGemm(
        call=call,
        inputs={label: view for label, view in every.items() if label not in over.shapes} | epilogue.inputs,
        results={
            label: Result(shape, epilogue.dtype.dlpack, outs.get(label), every.get(label))
            for label, shape in over.shapes.items()
        },
        arrange=functools.partial(_arranged, traced, tuple(over.shapes)) if listed else traced.arranger,
        form=form,
        labels={name: tuple(over.labelled({name: views[name]})) for name in _PRODUCT if name in views},
        divided=divided,
        result=epilogue.dtype,
        math=math_mode(dtype, None, fast_accum=options.fast_accum),
        epilogue=epilogue,
        scale_forms=_forms_of(over, form, extents, views),
        tree=following(epilogue.tree, dtype, epilogue.dtype),
    )  # fmt: skip


def _arranged(traced: Traced, labels: Sequence[str], results: Mapping[str, Any]) -> Any:
    """The function's return value, from arrays by label; D is the caller's list where there is one."""
    if results[RESULT] is None:
        results = {**results, RESULT: [results[label] for label in labels]}
    return traced.arrange(results)


def _check_kinds(arrays: Mapping[str, Any]) -> None:
    """Refuses lists beside arrays, and arrays beside lists."""
    for name in "ab":
        if arrays[name] is None:
            raise InvalidOperandError(f"{name} is None; expected an array, or a list of them")
    listed = _is_list(arrays["a"])
    for name, array in arrays.items():
        if array is None:
            continue
        divides = name in ("offsets", "counts")
        if divides and listed:
            raise InvalidOperandError(f"{name} divides arrays; lists of matrices are divided already")
        if not listed and _is_list(array):
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected an array")
        if listed and not _is_list(array) and name not in ("scale_a", "scale_b"):
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected a list, one for each group")
        # NumPy's default integers are int64.
        if divides and isinstance(array, np.ndarray) and array.dtype != np.int32:
            raise InvalidOperandError(f"{name} has elements of {array.dtype}; expected int32")


def _list_form(views: dict[str, Views]) -> tuple[str, int, list[Extents], list[Shape]]:
    """(form, number of groups, (M, N, K) of each, shapes of D's arrays) of lists."""
    every = []
    for index, (a, b) in enumerate(zip(views["a"], views["b"], strict=True)):
        for name, view in (("a", a), ("b", b)):
            if len(view.shape) != 2:
                raise InvalidOperandError(f"{name}[{index}] has shape {view.shape}; expected a matrix")
        if a.shape[1] != b.shape[0]:
            raise InvalidOperandError(f"a[{index}] has K = {a.shape[1]} (shape {a.shape}), b[{index}] has {b.shape[0]}")
        every.append((a.shape[0], b.shape[1], a.shape[1]))
    return LIST, len(every), every, [(m, n) for m, n, _ in every]


def _array_form(views: dict[str, Views]) -> tuple[str, int, list[Extents], list[Shape]]:
    """(form, number of groups, (M, N, K), shape of D) of arrays, each in a list of one."""
    a, b = views["a"][0].shape, views["b"][0].shape
    form = {(2, 3): CONTIGUOUS, (3, 3): MASKED, (2, 2): ALONG_K}.get((len(a), len(b)))
    if form is None:
        raise InvalidOperandError(
            f"a has shape {a} and b {b}; expected (rows, K) and (G, K, N), (G, rows, K) and (G, K, N), "
            "(M, total K) and (total K, N), or two lists"
        )
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"a has K = {a[-1]} (shape {a}), b has K = {b[-2]} ({b})")
    extents = [(a[-2], b[-1], a[-1])]
    if form == ALONG_K:
        divider = views.get("offsets") or views.get("counts")
        groups = divider[0].shape[0] if divider and len(divider[0].shape) == 1 else 0
        return form, groups, extents, [(groups, a[0], b[1])]
    if form == MASKED and a[0] != b[0]:
        raise InvalidOperandError(f"a has {a[0]} groups (shape {a}), b has {b[0]}")
    return form, b[0], extents, [(*a[:-1], b[2])]


def _divided_by(views: dict[str, Views], groups: int, form: str) -> str:
    """The name of the given one of offsets and counts; refuses both, the wrong one, and other shapes and dtypes."""
    given = [name for name in ("offsets", "counts") if name in views]
    if form == MASKED and given != ["counts"]:
        raise InvalidOperandError("a 3-D a takes counts, the rows of each group that are there, and no offsets")
    if len(given) != 1:
        raise InvalidOperandError("offsets and counts say the same: give exactly one of them")
    name = given[0]
    view = views[name][0]
    if view.dtype != CutlassDtype.I32.dlpack:
        code, bits = view.dtype
        found = {0: f"int{bits}", 1: f"uint{bits}", 2: f"float{bits}"}.get(code, f"DLPack type {code}")
        raise InvalidOperandError(f"{name} has elements of {found}; expected int32")
    if len(view.shape) != 1 or view.shape[0] != groups:
        expected = "(G,)" if form == ALONG_K else f"({groups},)"
        raise InvalidOperandError(f"{name} has shape {view.shape}; expected {expected}, one for each group")
    return name


def _forms_of(result: GroupedResult, form: str, extents: list[Extents], views: Mapping[str, Views]) -> dict[str, str]:
    """The forms of the scales that are arrays, by name; see `scale_forms`."""
    scales = {name: result.labelled({name: views[name]}) for name in ("scale_a", "scale_b") if name in views}
    for label, view in (pair for arrays in scales.values() for pair in arrays.items()):
        dtype = operands.dtype_of(view, label)
        if dtype is not CutlassDtype.F32:
            raise InvalidOperandError(f"{label} is {dtype.value}; expected float32")
    shapes = {name: [view.shape for view in arrays.values()] for name, arrays in scales.items()}
    found = scale_forms(form, result.number, extents, shapes.get("scale_a", ()), shapes.get("scale_b", ()))
    return {name: scaling for name, scaling in zip(("scale_a", "scale_b"), found, strict=True) if name in scales}

"""`grouped_gemm`: several products of different extents in one call."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ...arrays import numerics, operands
from ...arrays.arguments import (
    check_backend,
    check_devices,
    check_followers,
    check_scalars,
    on_reference,
    refuse_jax_out,
    result_dtype,
)
from ...arrays.numerics import FAST, math_mode
from ...arrays.operands import CPU, CUDA
from ...checks import NUMBERS, check_extents, check_number, check_options
from ...epilogue import EpilogueVisitorTree
from ...epilogue.bind import BoundEpilogue, bind
from ...epilogue.bound import GroupedFusion
from ...epilogue.common import common
from ...epilogue.groups import GroupedResult, Views, check_bias
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import FP8_TYPES, accumulator
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan import BACKENDS as GPU_BACKENDS
from ...pipeline.plan_cache import PlanCache
from ...pipeline.problem import MatrixSpec
from ...reference.epilogue import check_activation
from . import reference as grouped_reference
from .kernels import make
from .problem import ALONG_K, CONTIGUOUS, GROUP, LIST, MASKED, GroupedProblem, GroupScale, does_nothing, scale_forms

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 512
CHECK = "ATOMR_CUTLASS_CHECK"

_SCALARS = frozenset({int, float})
_WORDS = frozenset({str, type(None)})
_PRODUCT = ("a", "b", "c", "offsets", "counts", "scale_a", "scale_b")
"""As the slots of a plan are; what the epilogue reads comes then, and the result."""

_plans: PlanCache[OpPlan] = PlanCache(PLANS_KEPT)

Values = np.ndarray[Any, Any]


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
    out_dtype: CutlassDtype | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    check: bool | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """D[g] = saturating_cast(act(alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g] + bias[g])), in one launch.

    Or what `epilogue` makes of the products.

    | form | a | b | result | who belongs to group g |
    |---|---|---|---|---|
    | contiguous | (rows, K) | (G, K, N) | (rows, N) | rows offsets[g - 1] (0 for the first) to offsets[g] |
    | masked | (G, rows, K) | (G, K, N) | (G, rows, N) | of a[g], the first counts[g] rows |
    | along K | (M, total K) | (total K, N) | (G, M, N) | columns of a and rows of b, by offsets |
    | lists | list of (M, K) | list of (K, N) | list of (M, N) | the g-th of each list; extents may differ |

    Groups may be empty, and need not fill the rows. `offsets` and `counts` lie where a and b do: on a GPU they are read
    there, when the kernel runs, and never by the host. A call does not synchronize, may be captured into a CUDA graph,
    and replays with the values that are there then. So they cannot be refused either: **on a GPU they are not
    checked**. Negative sizes, and ends that go back, make a group empty; what lies beyond the rows is cut off; where
    ends go back, the groups around may overlap and write the same rows. Nothing outside the operands is read or
    written. `check=True` looks at them first. Those of host arrays are always checked.

    Rows of the result that no group has keep what `out` holds, and are unspecified in a new result. An empty group
    along K leaves act(beta * C + bias).

    Args:
        a: see the table. Anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back).
            Kernels read fp16, bf16 and fp8; rows are contiguous, and along K columns are.
        b: see the table. fp8 kernels want it contiguous along K.
        c: of the result's shape and dtype (a list for lists); needed exactly when `beta` is not 0.
        offsets: (G,) int32: cumulative ends of the groups. Not for the masked form and lists.
        counts: (G,) int32: sizes of the groups, instead of offsets; needed for the masked form.
        out: written in place and returned, its rows contiguous; may be `c` itself. A list for lists. Not for JAX.
        alpha: factor of every product.
        beta: factor of c. With 0, there is no C.
        bias: added to every row: (N,) for all groups or (G, N), a list of (N,) for lists; of a floating dtype. Kernels
            of the sm80 generation, which serve GPUs before sm_90 and operands that are not aligned to 16 bytes, read
            it in the place of `c`: of the result's dtype, contiguous, and without a `c`.
        activation: a name of `reference.ACTIVATIONS`.
        epilogue: what follows the products, in the place of bias and activation: an `EpilogueVisitorTree`, or a Python
            function such as `lambda acc, bias, scale: silu(acc + bias) * scale`, which is traced at every call, as for
            `gemm`. `acc` is alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g]. It reads rows and scalars and
            writes D alone, whose element type it may decide. Kernels of the sm80 generation evaluate act(acc + bias).
        scale_a: factors of a: a number, or float32 on the operands' device: one element, (G,) one for each group, one
            for each row ((rows, 1); masked (G, rows, 1); along K (M, 1) or (G, M, 1)), or in blocks of 128 along K
            ((rows, ceil(K / 128)); masked (G, rows, ceil(K / 128))). A list for lists, or one for all. Arrays are for
            fp8.
        scale_b: factors of b: a number, one element, (G,), (G, 1, N), with block scales
            (G, ceil(K / 128), ceil(N / 128)); along K (1, N) or (G, 1, N). A list for lists, or one for all.
        out_dtype: element type of the result; defaults to a's (bf16 for fp8).
        fast_accum: lets fp8 products be added up in the tensor cores alone: faster, and less exact for long sums.
        stream: where to launch; defaults to the current stream of the framework of `a`.
        backend: as for `gemm`.
        jit: as for `gemm`.
        check: whether to copy offsets or counts to the host, which waits for the GPU, and refuse those that are
            negative, go back or lie beyond the rows. For debugging; not while a CUDA graph is captured. None leaves it
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
    if check is not None:
        check_options(check=check)
    factor = 1.0
    if scale_a is not None or scale_b is not None:
        scale_a, number_a = _number(scale_a, "scale_a")
        scale_b, number_b = _number(scale_b, "scale_b")
        factor = number_a * number_b
    options = _Options(
        alpha, beta, factor, activation, epilogue, out_dtype, fast_accum, stream, backend, jit, check,
        bool(check) if check is not None else os.environ.get(CHECK) == "1",
    )  # fmt: skip
    named = operands_of_epilogue
    if bias is not None:
        named = {**named, "bias": bias}
    if epilogue is not None and c is not None and beta == 0:
        named, c = {**named, "c": c}, None
    arrays = {"a": a, "b": b, "c": c, "offsets": offsets, "counts": counts, "scale_a": scale_a, "scale_b": scale_b}
    key = options.key(arrays, named, out)
    found = None if key is None or options.checked else _plans.get(key)
    if found is not None:
        check_scalars(alpha, beta, c)
        return _repeat(found, arrays, named, out, options)
    with operands.launching(stream, a):
        return _Call(arrays, named, out, options, key).run()


class _Options(NamedTuple):
    """Everything of a call but its arrays. `factor` is the product of the scales that are numbers."""

    alpha: float
    beta: float
    factor: float
    activation: str | None
    epilogue: Any
    out_dtype: CutlassDtype | None
    fast_accum: bool
    stream: Any
    backend: str
    jit: str | None
    check: bool | None
    checked: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """What follows the products reads, in its order; of a function that is not known before it has been called."""
        return _inputs_of(self.epilogue) if type(self.epilogue) is EpilogueVisitorTree else ("bias",)

    def key(self, arrays: Mapping[str, Any], named: Mapping[str, Any], out: Any) -> Any:
        """What a kept plan is found by, without a look at what the arguments mean; None for calls that are not kept.

        Functions are not: they may compute something else next time.
        """
        if self.epilogue is not None and (
            type(self.epilogue) is not EpilogueVisitorTree or self.activation is not None
        ):
            return None
        if (
            self.out_dtype is not None or type(self.backend) is not str or self.backend not in GPU_BACKENDS
            or not (self.fast_accum is False or self.fast_accum is True)
            or type(self.jit) not in _WORDS or type(self.activation) not in _WORDS
            or type(self.alpha) not in _SCALARS or type(self.beta) not in _SCALARS
        ):  # fmt: skip
            return None
        reads = self.reads
        if not named.keys() <= set(reads):
            return None
        first = arrays["a"]
        lengths: tuple[int, ...] = ()
        flat = [*arrays.values(), *map(named.get, reads), out]
        if type(first) in (list, tuple):
            lengths = tuple(len(one) if type(one) in (list, tuple) else -1 for one in flat)
            flat = _flat(flat)
            if not first:
                return None
            first = first[0]
        if out is None and not _core.has_exchange_api(first):
            return None
        seen = _core.signature(*flat)
        if seen is None:
            return None
        what = self.activation if self.epilogue is None else self.epilogue
        return (seen, lengths, what, bool(self.fast_accum), self.beta == 0, self.backend, self.jit)


@functools.lru_cache(64)
def _inputs_of(tree: EpilogueVisitorTree) -> tuple[str, ...]:
    return tuple(one.name for one in tree.inputs)


def _flat(arrays: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for one in arrays:
        if type(one) in (list, tuple):
            found += one
        else:
            found.append(one)
    return found


def _number(scale: Any, name: str) -> tuple[Any, float]:
    """(the scale where it is an array, the factor where it is a number, or a list of the same number)."""
    if isinstance(scale, NUMBERS):
        check_number(scale, name)
        return None, float(scale)
    if type(scale) in (list, tuple) and scale and isinstance(scale[0], NUMBERS):
        if all(isinstance(one, NUMBERS) and one == scale[0] for one in scale):
            check_number(scale[0], name)
            return None, float(scale[0])
        raise UnsupportedError("scales of a list that are numbers must be the same: give different ones as arrays")
    return scale, 1.0


def _repeat(plan: OpPlan, arrays: Mapping[str, Any], named: Mapping[str, Any], out: Any, options: _Options) -> Any:
    """Launches a kept plan."""
    given = [array for array in (*arrays.values(), *map(named.get, options.reads)) if array is not None]
    how = {"alpha": options.alpha * options.factor, "beta": options.beta, "stream": options.stream}
    a, b = arrays["a"], arrays["b"]
    if type(a) not in (list, tuple):
        return plan(*given, out=out, **how)
    results = out
    if results is None:
        dtype = plan.result[1].dlpack
        shapes = [(int(one.shape[0]), int(other.shape[1])) for one, other in zip(a, b, strict=True)]
        with operands.launching(options.stream, a):
            results = [operands.empty_of(shape, dtype, plan.device, a[0])[0] for shape in shapes]
            plan(*_flat(given), *results, **how)
        return results
    plan(*_flat(given), *results, **how)
    return results


class _Call(NamedTuple):
    """One call that no kept plan serves: checked in full before anything is allocated or launched.

    Attributes:
        arrays: of the product, by name.
        named: what is for the epilogue, by name.
        out: of the call.
        options: everything else of it.
        key: what its plan is kept by, if it is.
    """

    arrays: dict[str, Any]
    named: Mapping[str, Any]
    out: Any
    options: _Options
    key: Any

    def run(self) -> Any:
        options, out = self.options, self.out
        check_options(
            backend=options.backend, jit=options.jit, activation=options.activation, out_dtype=options.out_dtype,
            fast_accum=options.fast_accum, alpha=options.alpha, beta=options.beta,
        )  # fmt: skip
        check_backend(options.backend, BACKENDS)
        for name in ("a", "b"):
            if self.arrays[name] is None:
                raise InvalidOperandError(f"{name} is None; expected an array, or a list of them")
        strays = (name for name in self.named if name != "bias")
        check_followers("grouped_gemm", options.epilogue, options.activation, strays)
        check_activation(options.activation)
        check_scalars(options.alpha, options.beta, self.arrays["c"])
        for one in out if isinstance(out, (list, tuple)) else (out,):
            refuse_jax_out(one)
        a, b = self.arrays["a"], self.arrays["b"]
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and not a and not b:
            return [] if out is None else out
        what = _operation(self.arrays, self.named, out, options)
        first = what.views["a"][0]
        if on_reference(options.backend, first, stacklevel=5):
            return self._on_reference(what)
        return self._on_host(what) if first.device_type == CPU else self._on_gpu(what)

    @property
    def _first(self) -> Any:
        """The array that results are made like."""
        a = self.arrays["a"]
        return a[0] if isinstance(a, (list, tuple)) else a

    def _on_gpu(self, what: _Operation) -> Any:
        options, first, epilogue = self.options, self._first, what.epilogue
        device = what.views["a"][0].device
        stream = operands.launch_stream().handle
        if options.checked:
            self._check(what, device, stream)
        arrays, results = epilogue.allocate(device, first)
        views = {**what.every, RESULT: tuple(results.values())}
        problem = what.problem(views)
        if not problem.empty:
            kept = None if self.key is None else _plans.get(self.key)
            plan = self._launch(what, problem, views, first, stream, kept)
            if self.key is not None and kept is None and plan.checked:
                _plans.insert(plan, self.key)
        return epilogue.finish(arrays, results, stream)

    def _check(self, what: _Operation, device: int, stream: int) -> None:
        """The debug switch."""
        if what.divided is None:
            return
        if _core.capturing(device, stream):
            if self.options.check:
                raise UnsupportedError("check copies to the host, which a stream that is captured cannot: leave it out")
            return
        what.check(operands.download(what.views[what.divided][0]))

    def _on_host(self, what: _Operation) -> Any:
        """Host operands: copied to GPU 0, computed there, and the result copied back."""
        if what.divided is not None:
            what.check(operands.to_numpy(what.views[what.divided][0]))
        _refuse_shared(what)
        # The copies may lie as kernels like them.
        columns = {"a"} if what.form == ALONG_K else set()
        if operands.dtype_of(what.views["b"][0], "b") in FP8_TYPES:
            columns = {"b"}
        views = {
            name: tuple(operands.upload(operands.to_numpy(one), 0, columns=name in columns) for one in given)
            for name, given in what.every.items()
        }
        if RESULT not in views:
            dtype = numerics.numpy_dtype(what.epilogue.dtype)
            shapes = what.epilogue.result.members
            views[RESULT] = tuple(operands.upload(np.zeros(shape, dtype), 0) for shape in shapes)
        problem = what.problem(views)
        if not problem.empty:
            self._launch(what, problem, views, None, 0, None)
        computed = [operands.download(view) for view in views[RESULT]]
        return what.epilogue.deliver(what.labelled(computed), self._first)

    def _launch(
        self,
        what: _Operation,
        problem: GroupedProblem,
        views: Mapping[str, Views],
        like: Any,
        stream: int,
        plan: OpPlan | None,
    ) -> OpPlan:
        options = self.options
        if plan is None:
            plan = make(problem, like=like, backend=options.backend, jit=options.jit, stream=stream)
        given = [
            one
            for name in (*_PRODUCT, *(operand.name for operand in what.epilogue.tree.inputs), RESULT)
            for one in views.get(name, ())
        ]
        plan(*given, alpha=options.alpha * options.factor, beta=options.beta, stream=stream)
        return plan

    def _on_reference(self, what: _Operation) -> Any:
        options, epilogue = self.options, what.epilogue
        _refuse_shared(what)
        on_gpu = what.views["a"][0].device_type == CUDA
        fetch = operands.download if on_gpu else operands.to_numpy
        host: dict[str, Any] = {name: [fetch(one) for one in given] for name, given in what.views.items()}
        if what.divided is not None:
            what.check(host[what.divided][0])
        for name, form in zip(("scale_a", "scale_b"), what.scale_forms, strict=True):
            if form == GROUP:
                host[name] = [_spread(name, host[name][0], what, host)]
        chosen = {name: given if name in what.listed else given[0] for name, given in host.items()}
        tree = epilogue.tree
        read = {label: fetch(view) for label, view in epilogue.inputs.items()}
        computed: Any = grouped_reference.grouped_gemm(
            chosen.pop("a"),
            chosen.pop("b"),
            chosen.pop("c", None),
            alpha=options.alpha * options.factor,
            beta=options.beta,
            tree=None if does_nothing(tree, operands.dtype_of(what.views["a"][0], "a"), epilogue.dtype) else tree,
            operands=epilogue.result.of_groups(tree, read),
            out_dtype=epilogue.dtype,
            math=what.math,
            **chosen,
        )
        results = what.labelled(computed if what.form == LIST else [computed])
        if not on_gpu:
            return epilogue.deliver(results, self._first)
        return epilogue.copy_in(results, what.views["a"][0].device, self._first)


def _spread(name: str, scale: Values, what: _Operation, host: dict[str, Any]) -> Values:
    """Scales of groups as the reference takes them: for each row of A, or of a shape that broadcasts along B."""
    each = scale.reshape(-1, 1, 1)
    a, b = host["a"][0], host["b"][0]
    if name == "scale_b":
        return np.broadcast_to(each, (what.groups, 1, b.shape[-1])) if what.form == ALONG_K else each
    if what.form != CONTIGUOUS:
        return np.broadcast_to(each, (what.groups, a.shape[-2], 1))
    rows = np.ones((a.shape[0], 1), np.float32)
    given = {name: host[name][0] for name in ("offsets", "counts") if name in host}
    for one, (start, end) in zip(scale, grouped_reference.group_bounds(what.groups, a.shape[0], **given), strict=True):
        rows[start:end] = one
    return rows


def _refuse_shared(what: _Operation) -> None:
    """Refuses results of a list that share memory, which plans do themselves."""
    for (i, one), (j, other) in itertools.combinations(enumerate(what.views.get("out", ())), 2):
        if _core.overlap(one, other):
            raise InvalidOperandError(f"out[{i}] overlaps out[{j}]: give separate memory")


class _Operation(NamedTuple):
    """What the operands say.

    Attributes:
        form: contiguous, masked, along K or lists.
        groups: how many there are.
        extents: (M, N, K), of a list for each.
        views: of the product and the result, by name: one array, or those of a list.
        divided: `offsets` or `counts`, whichever is given; None for lists.
        math: math mode of the kernel key.
        epilogue: what follows the products, with its arrays.
        scale_forms: what the scales of A and B are.
        listed: the names of what is given as lists.
    """

    form: str
    groups: int
    extents: list[tuple[int, int, int]]
    views: dict[str, Views]
    divided: str | None
    math: str
    epilogue: BoundEpilogue[GroupedResult]
    scale_forms: tuple[str, str]
    listed: frozenset[str]

    @property
    def every(self) -> dict[str, Views]:
        """What is read and written, by name."""
        result, inputs = self.epilogue.result, self.epilogue.inputs
        return self.views | {one.name: result.of_operand(one.name, inputs) for one in self.epilogue.tree.inputs}

    def labelled(self, results: Sequence[Values]) -> dict[str, Values]:
        """Results by label."""
        return dict(zip(self.epilogue.result.shapes, results, strict=True))

    def fusion(self, views: Mapping[str, Views]) -> GroupedFusion | None:
        """What follows the product, of arrays on the GPU by name; None where the result is the product."""
        result, tree = self.epilogue.result, self.epilogue.tree
        if does_nothing(tree, *(operands.dtype_of(views[name][0], name) for name in ("a", RESULT))):
            return None
        found: dict[str, _core.Operand] = {}
        for operand in tree.inputs:
            found |= result.labelled(operand.name, views[operand.name])
        return result.fusion(tree, found)

    def check(self, values: Values) -> None:
        """Refuses offsets or counts that go back, are negative or lie beyond the rows; names the first."""
        m, _, k = self.extents[0]
        if self.form != MASKED:
            given = {str(self.divided): values}
            grouped_reference.group_bounds(self.groups, k if self.form == ALONG_K else m, **given)
            return
        for index, number in enumerate(values.tolist()):
            if not 0 <= number <= m:
                raise InvalidOperandError(f"counts[{index}] is {number}; a group has 0 to {m} rows")

    def problem(self, views: Mapping[str, Views]) -> GroupedProblem:
        """What kernels are chosen for, of these views."""

        def specs(name: str) -> tuple[MatrixSpec, ...]:
            return tuple(
                MatrixSpec(one.shape, one.strides, operands.dtype_of(one, name), one.alignment)
                for one in views.get(name, ())
            )

        if self.divided is not None and self.groups > 1 and views[self.divided][0].strides != (1,):
            raise UnsupportedError(f"{self.divided} has strides {views[self.divided][0].strides}: make it contiguous")
        scales = {
            name: GroupScale(specs(name), form) if name in views else None
            for name, form in zip(("scale_a", "scale_b"), self.scale_forms, strict=True)
        }
        return GroupedProblem(
            form=self.form,
            groups=self.groups,
            a=specs("a"),
            b=specs("b"),
            c=specs("c"),
            d=specs("out"),
            counted=self.divided == "counts",
            math=self.math,
            device=views["a"][0].device,
            fusion=self.fusion(views),
            **scales,
        )


def _operation(arrays: dict[str, Any], named: Mapping[str, Any], out: Any, options: _Options) -> _Operation:
    views, listed = _views({**arrays, "out": out})
    numbers = {name: one for name, one in named.items() if isinstance(one, NUMBERS)}
    others = _views_of_epilogue({name: one for name, one in named.items() if name not in numbers}, arrays["a"], options)
    names = {
        f"{name}[{index}]" if listed else name: one
        for some in (views, others)
        for name, given in some.items()
        for index, one in enumerate(given)
    }
    for name, view in names.items():
        check_extents(view.shape, name)
    check_devices(names)
    form, count, extents, shapes = _list_form(views) if listed else _array_form(views)
    for name in ("c", "out"):
        for index, (one, shape) in enumerate(zip(views.get(name, ()), shapes, strict=False)):
            if one.shape != shape:
                raise InvalidOperandError(f"{_member(name, index, listed)} has shape {one.shape}; expected {shape}")
    divided = None if listed else _divided(views, count, form)
    dtype, other = (_common_dtype(name, views[name], listed) for name in "ab")
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one dtype, but for two of fp8"
        )
    result = _result(views, options.out_dtype, dtype)
    over = GroupedResult(count, [(m, n) for m, n, _ in extents], shapes, listed)
    follows = options.epilogue
    if follows is None:
        bias = others.get("bias", ())
        follows = common(check_bias(bias, over) if bias else None, options.activation)
    epilogue = bind(
        follows, {**others, **numbers}, over, views,
        taken={*_PRODUCT} - ({"c"} if "c" not in views else set()), out=out, out_dtype=result,
        fixed=options.out_dtype is not None or "out" in views or "c" in views, acc=accumulator(dtype),
    )  # fmt: skip
    for name in ("scale_a", "scale_b"):
        for index, one in enumerate(views.get(name, ())):
            if operands.dtype_of(one, name) is not CutlassDtype.F32:
                found = operands.dtype_of(one, name).value
                raise InvalidOperandError(f"{_member(name, index, listed)} is {found}; expected float32")
    forms = scale_forms(
        form,
        count,
        extents,
        [one.shape for one in views["scale_a"]] if "scale_a" in views else None,
        [one.shape for one in views["scale_b"]] if "scale_b" in views else None,
    )
    math = FAST if options.fast_accum and dtype in FP8_TYPES else math_mode(dtype, None)
    members = frozenset(name for name, given in {**arrays, "out": out}.items() if isinstance(given, (list, tuple)))
    return _Operation(form, count, extents, views, divided, math, epilogue, forms, members)


def _member(name: str, index: int, listed: bool) -> str:
    return f"{name}[{index}]" if listed else name


def _views(arrays: dict[str, Any]) -> tuple[dict[str, Views], bool]:
    """(the arrays of the product and the result by name, whether a and b are lists)."""
    listed = isinstance(arrays["a"], (list, tuple))
    if listed != isinstance(arrays["b"], (list, tuple)):
        one, other = ("a", "b") if listed else ("b", "a")
        raise InvalidOperandError(
            f"{one} is a list and {other} is a {type(arrays[other]).__name__}: give two of a kind"
        )
    views: dict[str, Views] = {}
    for name, given in arrays.items():
        if given is None:
            continue
        if not isinstance(given, (list, tuple)):
            if listed and name in ("offsets", "counts"):
                raise InvalidOperandError(f"{name} divides arrays; lists of matrices are divided already")
            if listed and name not in ("scale_a", "scale_b"):
                raise InvalidOperandError(f"{name} is a {type(given).__name__}; expected a list, one for each group")
            _refuse_wide(name, given)
            views[name] = (operands.as_operand(given, name),)
            continue
        if name in ("offsets", "counts"):
            raise InvalidOperandError(f"{name} is a {type(given).__name__}; expected an array")
        views[name] = _members(name, given, arrays["a"])
    return views, listed


def _views_of_epilogue(named: Mapping[str, Any], a: Any, options: _Options) -> dict[str, Views]:
    """The arrays for the epilogue by name. Of lists, a scalar may be one for all; a bias is a list."""
    views: dict[str, Views] = {}
    for name, given in named.items():
        if isinstance(given, (list, tuple)):
            views[name] = _members(name, given, a)
            continue
        if isinstance(a, (list, tuple)) and options.epilogue is None:
            raise InvalidOperandError(f"{name} is a {type(given).__name__}; expected a list, one for each group")
        views[name] = (operands.as_operand(given, name),)
    return views


def _members(name: str, given: Sequence[Any], a: Any) -> Views:
    """The members of a list, as many as `a` has."""
    if not isinstance(a, (list, tuple)):
        raise InvalidOperandError(f"{name} is a {type(given).__name__}; expected an array")
    if len(given) != len(a):
        raise InvalidOperandError(f"{name} has {len(given)} members; a has {len(a)}")
    return tuple(operands.as_operand(one, f"{name}[{i}]") for i, one in enumerate(given))


def _refuse_wide(name: str, given: Any) -> None:
    """The integers that NumPy makes unasked are none that kernels know: says what was expected."""
    if name in ("offsets", "counts") and isinstance(given, np.ndarray) and given.dtype != np.int32:
        raise InvalidOperandError(f"{name} has elements of {given.dtype}; expected int32")


def _list_form(
    views: dict[str, Views],
) -> tuple[str, int, list[tuple[int, int, int]], list[tuple[int, ...]]]:
    extents: list[tuple[int, int, int]] = []
    for index, (a, b) in enumerate(zip(views["a"], views["b"], strict=True)):
        for name, one in (("a", a), ("b", b)):
            if len(one.shape) != 2:
                raise InvalidOperandError(f"{name}[{index}] has shape {one.shape}; expected a matrix")
        if a.shape[1] != b.shape[0]:
            raise InvalidOperandError(f"a[{index}] has K = {a.shape[1]} (shape {a.shape}), b[{index}] has {b.shape[0]}")
        extents.append((a.shape[0], b.shape[1], a.shape[1]))
    return LIST, len(extents), extents, [(m, n) for m, n, _ in extents]


def _array_form(
    views: dict[str, Views],
) -> tuple[str, int, list[tuple[int, int, int]], list[tuple[int, ...]]]:
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


def _divided(views: dict[str, Views], groups: int, form: str) -> str:
    """Which of offsets and counts is given.

    Raises:
        InvalidOperandError: not exactly one, the wrong one, or of a wrong shape or dtype.
    """
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


def _common_dtype(name: str, views: Views, listed: bool) -> CutlassDtype:
    found = [operands.dtype_of(one, _member(name, index, listed)) for index, one in enumerate(views)]
    for index, one in enumerate(found):
        if one is not found[0]:
            raise InvalidOperandError(f"{name}[{index}] is {one.value}, and {name}[0] {found[0].value}: give one dtype")
    return found[0]


def _result(views: dict[str, Views], asked: CutlassDtype | None, dtype: CutlassDtype) -> CutlassDtype:
    members = max(len(views.get("out", ())), len(views.get("c", ())), 1)
    found = [
        result_dtype({name: views[name][index] for name in ("out", "c") if name in views}, asked, dtype)
        for index in range(members)
    ]
    if any(one is not found[0] for one in found):
        raise InvalidOperandError("the members of out have different element types: give them one")
    return found[0]

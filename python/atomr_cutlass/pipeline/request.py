"""Requests: the fields, keys and checks that all operations share, and requests from command line options."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays.numerics import PRECISIONS, default_out_dtype, math_mode
from ..checks import check_options, expect, shown
from ..errors import InvalidOperandError, UnsupportedError, require
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.common import bias_and_activation
from ..generator.epilogue.lower import SOURCE, split
from ..generator.epilogue.ops import ACTIVATIONS
from ..generator.epilogue.tree import MATRIX, EpilogueVisitorTree
from ..generator.key import KernelKey
from ..generator.render import render
from ..generator.rules import Status, accumulator, supports_tree
from . import devices, select
from .devices import Device
from .heuristic import KernelUse
from .plan_cache import Extents, PlanKey
from .tuning import identity

if TYPE_CHECKING:
    from .search import KernelSearch

T = TypeVar("T")

_BIAS_TYPES = (CutlassDtype.F64, CutlassDtype.F32, CutlassDtype.F16, CutlassDtype.BF16)
"""Element types of a result that its bias shares; the bias of any other result is float32."""


@dataclass(frozen=True)
class GemmEpilogue:
    """The epilogue of a request: D = act(alpha * AB + beta * C + bias), or a tree.

    Attributes:
        alpha: scalar.
        beta: scalar; with 0 there is no C.
        bias: whether a row is added, one element for each column of D (of a convolution, for each channel). That of a
            GEMM is of D's element type where that is F64, F32, F16 or BF16, else F32.
        activation: a name of `reference.ACTIVATIONS`.
        tree: instead of bias and activation, the tree that is evaluated on alpha * AB + beta * C: made by `EvtBuilder`,
            or of a traced function (`epilogue.trace(...).tree`).

    Raises:
        InvalidOperandError: a value is not of its kind, or a tree is given beside a bias or an activation.
    """

    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    activation: str | None = None
    tree: EpilogueVisitorTree | None = None

    def __post_init__(self) -> None:
        check_options(alpha=self.alpha, beta=self.beta, activation=self.activation, bias=self.bias)
        if self.tree is None:
            return
        if not isinstance(self.tree, EpilogueVisitorTree):
            raise InvalidOperandError(
                f"tree is a {type(self.tree).__name__}; expected an EpilogueVisitorTree: EvtBuilder puts one together, "
                "epilogue.trace makes one of a function"
            )
        if self.bias or self.activation is not None:
            other = "bias" if self.bias else "activation"
            raise InvalidOperandError(f"tree and {other} are given: have the tree compute it, or leave the tree out")

    @property
    def kind(self) -> str:
        """The operations without their scalars, as `linear+c+bias+relu`; a tree by its id."""
        tree = "" if self.tree is None else self.tree.id
        words = ("linear", "c" if self.beta != 0 else "", "bias" if self.bias else "", self.activation or "", tree)
        return "+".join(filter(None, words))

    @property
    def follows(self) -> bool:
        """Whether a bias, an activation or a tree follows the product."""
        return self.bias or self.activation is not None or self.tree is not None

    def tree_for(self, result: CutlassDtype) -> EpilogueVisitorTree | None:
        """The tree after a product of this element type: the given one, or that of bias and activation, or None."""
        if self.tree is not None or not self.follows:
            return self.tree
        element = result if result in _BIAS_TYPES else CutlassDtype.F32
        return bias_and_activation(element if self.bias else None, self.activation)


@dataclass(frozen=True, kw_only=True)
class Request(KernelUse, ABC):
    """A request that plans are made from, without arrays; each operation's requests add their own layouts.

    Attributes:
        dtype: element type of the operands. TF32 means float32 operands multiplied in TF32.
        arch: target; None is the arch of the GPU that the plan is made for. An older target than the GPU's is served
            by cells that carry PTX.
        epilogue: scalars, bias and activation, or a tree.
        out_dtype: element type of the result (and C); None is the choice of the epilogue's tree, else the operands',
            BF16 for fp8 and fp4, and for I8 I32, or F32 where a bias, an activation or a tree follows.
        binding: name under which a plan of this request keeps an operand, such as a layer's weight: requests that
            differ in it alone have separate plans.
        shape: extents, in the operation's dataclass.
    """

    dtype: CutlassDtype
    arch: SmArch | None = None
    epilogue: GemmEpilogue = field(default_factory=GemmEpilogue)
    out_dtype: CutlassDtype | None = None
    binding: str | None = None
    shape: Any

    @property
    def operand_dtype(self) -> CutlassDtype:
        """The element type of the operands in memory."""
        return self.dtype.storage

    @property
    def result_dtype(self) -> CutlassDtype:
        """The element type of the result."""
        epilogue = self.epilogue
        decided = epilogue.tree.result_dtype if epilogue.tree is not None else None
        return self.out_dtype or decided or default_out_dtype(self.operand_dtype, fused=epilogue.follows)

    @functools.cached_property
    def tree(self) -> EpilogueVisitorTree | None:
        """The tree after the product: the epilogue's, or that of its bias and activation; None for neither."""
        return self.epilogue.tree_for(self.result_dtype)

    @property
    @abstractmethod
    def math(self) -> str:
        """The math mode of the kernel's key."""

    @abstractmethod
    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU."""

    def key_of(self, op: str, shape: Extents, layouts: tuple[str, ...], **more: Any) -> PlanKey:
        """The key of a plan of an operation; `more` are fields that differ from those of most requests."""
        fields: dict[str, Any] = {
            "dtypes": (self.operand_dtype, self.operand_dtype, self.result_dtype), "math": self.math,
            "epilogue": self.epilogue.kind, "arch": self.arch, "binding": self.binding,
        }  # fmt: skip
        return PlanKey(op=op, shape=shape, layouts=layouts, **(fields | more))

    def check_fields(self, **kinds: type) -> None:
        """Checks the fields that all requests have, and those in `kinds`, which may not be None."""
        for name, kind in {"dtype": CutlassDtype, "epilogue": GemmEpilogue, **kinds}.items():
            expect(getattr(self, name), kind, name)
        check_options(arch=self.arch, out_dtype=self.out_dtype)
        if self.binding is not None and (not isinstance(self.binding, str) or not self.binding):
            raise InvalidOperandError(f"binding is {shown(self.binding)}; expected a name, or None")

    def expect_served(self, op: str, dtypes: Collection[CutlassDtype], archs: Collection[SmArch]) -> None:
        """Refuses a dtype or a target that an operation has no kernels for."""
        for value, served in ((self.dtype, dtypes), (self.arch, archs)):
            if value is not None and value not in served:
                valid = ", ".join(member.name for member in served)
                raise UnsupportedError(f"{op} has no kernels for {value.name}; valid: {valid}")

    def refuse_tree(self, tree: EpilogueVisitorTree, product: Iterable[str]) -> None:
        """Refuses a tree that does not fit the request; `product` names the product's operands except `c`."""
        result = self.result_dtype
        if tree.result_dtype not in (None, result):
            raise InvalidOperandError(
                f"the epilogue casts D to {tree.result_dtype.value}; out_dtype says {result.value}"
            )
        taken = {*product, *(["c"] if self.epilogue.beta != 0 else [])}
        for name in [operand.name for operand in tree.inputs] + [output.name for output in tree.outputs]:
            if name in taken:
                raise InvalidOperandError(
                    f"the epilogue has an operand {name!r}, which is the name of one of the product's: rename it"
                )
        require(self.lowers(tree))

    def lowers(self, tree: EpilogueVisitorTree) -> Status:
        """Whether there are kernels that compute the tree."""
        return supports_tree(tree.program, accumulator(self.operand_dtype), self.result_dtype)

    @abstractmethod
    def search(self, device: Device) -> KernelSearch[Any]:
        """The kernels for the request on a device; refuses a request that no kernel can serve."""

    @property
    def heuristic_key(self) -> str:
        """The problem, which is the same on every GPU; refuses a request that no kernel can serve."""
        return identity(self.search(devices.imagined(self.arch or SmArch.SM90A)).tuned_problem)

    def render_cu(self) -> tuple[str, str]:
        """The source for NVRTC of the matrix's best cell for this request, whether or not it is built in.

        Nothing is compiled. A request that names its arch needs no GPU: the cell is chosen for `devices.imagined` of
        that arch, so that it is the same everywhere.

        Returns:
            (source text, name of the kernel that does the products).

        Raises:
            InvalidOperandError: the request names no arch, and there is no GPU to take it from.
            UnsupportedError: no cell of the matrix serves the request; the reason names the cure.
        """
        device = devices.for_arch(None) if self.arch is None else devices.imagined(self.arch)
        return render(select.best_key(self.search(device)), flavour="nvrtc")


def sampled(key: KernelKey, epilogue: str) -> dict[str, Any]:
    """The fields of a request for a kernel: element types, and the tree of one of its epilogues."""
    program = split(epilogue)[1].replace(f"input:{SOURCE}:", f"input:{MATRIX}:")
    tree = EpilogueVisitorTree.parse(program)
    return {"dtype": key.a, "out_dtype": key.d, "epilogue": GemmEpilogue(tree=tree)}


def precision_of(key: KernelKey) -> str | None:
    """The `precision` of calls that a kernel serves; None where its element types leave no choice."""
    return key.math if key.math in PRECISIONS else None


def expect_extent(value: Any, name: str, least: int = 0) -> None:
    """Refuses a value that is no extent of a dimension, or too large for kernels."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected an integer from {least} to 2^31 - 1")


def expect_extents(shape: Any, names: Iterable[str], label: str = "", least: int = 0) -> None:
    """Checks attributes of a shape as `expect_extent` does; errors name them after a label."""
    for name in names:
        expect_extent(getattr(shape, name), f"{label}{name}", least)


def math_of(dtype: CutlassDtype, precision: str | None, *, fast_accum: bool = False) -> str:
    """The math mode of the kernel's key, for a request's dtype (TF32 included), precision and fp8 accumulation."""
    check_options(precision=precision)
    if dtype is CutlassDtype.TF32 and precision not in (None, "tf32"):
        raise InvalidOperandError(f"dtype TF32 means precision='tf32', not {precision!r}")
    return math_mode(dtype.storage, "tf32" if dtype is CutlassDtype.TF32 else precision, fast_accum=fast_accum)


@dataclass(frozen=True)
class Option:
    """An option of requests, of the type of its default; a default of None is an integer of at least `least`."""

    name: str
    help: str
    default: str | float | bool | None = ""
    least: int = 1


COMMON = (
    Option("dtype", f"Element type of the operands: {', '.join(d.value for d in CutlassDtype)}.", "bf16"),
    Option("arch", f"Target: {', '.join(arch.target for arch in SmArch)}; empty: the GPU's own."),
    Option("out_dtype", "Element type of the result; empty: the operands', or i32 for i8, bf16 for fp8, fp4."),
    Option("alpha", "Factor of the product.", 1.0),
    Option("beta", "Factor of C; 0: there is no C.", 0.0),
    Option("bias", "Add a bias: one for each column, of convolutions channel, of D.", default=False),
    Option("activation", f"After it: {', '.join(ACTIVATIONS)}; empty: none."),
)
"""Options of every operation."""


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request, and the extent of every dimension that is not given.

    Options that were not given have their default in `values`, or are absent.
    """

    extent: int
    values: Mapping[str, Any]

    def given(self, name: str) -> Any:
        """The value of an option, or None where it was not given."""
        value = self.values.get(name)
        return None if value in ("", False) else value

    def flag(self, name: str) -> bool:
        """Whether an option without a value was given."""
        return bool(self.given(name))

    def size(self, name: str) -> int:
        """An extent."""
        value = self.given(name)
        return self.extent if value is None else int(value)

    def numbers(self, name: str, default: str, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Whole numbers, whose count is one of `counts`."""
        text = self.given(name) or default
        words = text.split(",")
        if len(words) not in counts or not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
            wanted = " or ".join(map(str, counts))
            raise InvalidOperandError(f"--{name} is {text!r}; expected {wanted} whole numbers, comma-separated")
        return tuple(map(int, words))

    @property
    def dtype(self) -> CutlassDtype:
        """The element type of the operands."""
        if self.values.get("dtype") == "":
            raise InvalidOperandError("--dtype is empty")
        return self.parsed("dtype", CutlassDtype.parse) or CutlassDtype.BF16

    def parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """The value of an option, parsed, such as an element type; None where it was not given."""
        text = self.given(name)
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise InvalidOperandError(f"--{name.replace('_', '-')}: {error}") from error

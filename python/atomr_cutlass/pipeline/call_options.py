"""The options that calls of all operations share, and docstrings completed from their texts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..generator.dtypes import CutlassDtype

DescribedT = TypeVar("DescribedT", bound=Callable[..., Any])


class CallOptions(NamedTuple):
    """The options that functions share; a function may have some of them only.

    Attributes:
        activation: a name of `reference.ACTIVATIONS`.
        out_dtype: element type of the result; defaults to that of the first operand, bf16 for fp8 and fp4.
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        fast_accum: lets fp8 products be added up in the tensor cores alone, which is faster and keeps about 14 bits;
            ignored for other dtypes.
        backend: `auto` (a GPU kernel, prebuilt or compiled; without a GPU the reference, warning once), `prebuilt`,
            `jit` or `reference`.
        jit: `auto` and `background` compile a kernel that the table lacks, `off` raises. If the table has a kernel, but
            the model expects another to be faster, `background` compiles that meanwhile, and launches switch to it when
            it is ready; `auto` does so if it expects twice the speed, and `off` then warns, once. None leaves it to
            ATOMR_CUTLASS_JIT.
        workspace_size: bytes of device memory that a call may use beside its arrays; a kernel that needs more is
            replaced by another of the table, or refused with the bytes it needs. None is no limit.
        batch_invariant: whether each row of the result has the same bits whatever the other rows and their number, for
            the same N, K, element types, layouts, alignments, epilogue and model of GPU, and the same installed
            kernels; slower for few rows. Results that are reduced over elements of D are refused. Without effect on the
            reference. None leaves it to ATOMR_CUTLASS_BATCH_INVARIANT (1 is yes).
        alpha: scalar.
        beta: scalar. With 0, there is no C.
        stream: where to launch: an integer handle or a stream object; defaults to the current stream of the framework
            of the first operand.
    """

    activation: str | None = None
    out_dtype: CutlassDtype | None = None
    precision: str | None = None
    fast_accum: bool = False
    backend: str = "auto"
    jit: str | None = None
    workspace_size: int | None = None
    batch_invariant: bool | None = None
    alpha: float = 1.0
    beta: float = 0.0
    stream: Any = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **fixed: Any) -> CallOptions:
        """The options among the arguments of a function, its `locals()`; `fixed` are those that it does not offer."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments}, **fixed)


_SECTION = re.compile(r"(?<=\nArgs:\n).+?(?=\n\n\S|\Z)|(?<=\nAttributes:\n).+?(?=\n\n\S|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""The section of arguments of a cleaned docstring, and an entry in it."""


def documented(described: DescribedT, own: Callable[..., Any] | None = None) -> DescribedT:
    """Completes the docstring of a function or dataclass with texts of others, so that each text has one source.

    Parameters that its section Args (of a class Attributes) leaves out are added in the order of the signature, with
    the texts of `CallOptions`, of `own` (a class or a documented function) or of a class's parents, the last that has
    one. `{name}` stands for such a text, to which the docstring adds something.
    """
    if described.__doc__:
        docstring = inspect.cleandoc(described.__doc__)
        parents = described.__mro__[:0:-1] if isinstance(described, type) else ()
        sources = [inspect.cleandoc(source.__doc__ or "") for source in (CallOptions, own, *parents) if source]
        entries = {name: entry for source in sources for name, entry in _entries(source).items()}
        texts = {name: entry.partition(": ")[2] for name, entry in entries.items()}

        def completed(section: re.Match[str]) -> str:
            found = entries | _entries(section[0])
            lines = dict.fromkeys(found[name] for name in inspect.signature(described).parameters)
            return re.sub(r"\{(\w+)\}", lambda name: texts[name[1]], "\n".join(lines))

        described.__doc__ = _SECTION.sub(completed, docstring, count=1)
    return described


def _entries(section: str) -> dict[str, str]:
    """The entries of a section by parameter."""
    return {name: found[0] for found in _ENTRY.finditer(section) for name in found[1].split(", ")}

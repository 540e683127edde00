"""Tuned choices: the kernels that were measured to be fastest, which the selection prefers to those of the model.

A file of tuned choices is a file of keys (`generator.key_file`), so that a build can compile its kernels; `tuned`
of each line has the problem and GPU for which the kernel was the fastest, and the launch options. `tune` writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from .. import _core
from ..arrays import symbols
from ..errors import CutlassError, InvalidOperandError
from ..generator import key_file
from ..generator.epilogue.tree import EpilogueVisitorTree
from ..generator.key import KernelKey

T = TypeVar("T")

VARIABLE = "ATOMR_CUTLASS_TUNED"
VERSION = 1


@dataclass(frozen=True)
class TuneRecord:
    """The kernel that was measured as the fastest for a problem on one model of GPU.

    Attributes:
        gpu: the model, as its driver names it.
        problem: extents, element types, layouts, strides and alignments, as JSON (see `identity`).
        key: of the kernel.
        formulation: the position of the kernel's formulation among those of the problem.
        split_k, swizzle, raster, width: launch options (see `Candidate`).
        microseconds: median of one launch, its operands not in L2.
        chosen: name of the kernel that the model chooses.
        chosen_microseconds: `microseconds` of that kernel.
        tried: how many kernels and launch options were timed.
        timings: (digest of its key, microseconds) of each kernel, with its fastest launch options: a build chooses
            kernels for a budget by them (`generator.cover`).
    """

    gpu: str
    problem: str
    key: KernelKey
    formulation: int
    split_k: int
    swizzle: int
    raster: int
    microseconds: float
    chosen: str
    chosen_microseconds: float
    tried: int
    timings: tuple[tuple[str, float], ...] = ()
    width: int = 0

    @property
    def options(self) -> tuple[int, int, int, int]:
        """The launch options; see `Candidate.options`."""
        return self.split_k, self.swizzle, self.raster, self.width

    def line(self) -> str:
        """The record as a line of a file, without the newline."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "key"}
        values |= {"problem": json.loads(self.problem), "timings": dict(self.timings)}
        return key_file.line(self.key, tuned={"version": VERSION, **values})

    @property
    def rank(self) -> tuple[Any, ...]:
        """Orders the records for one problem and GPU, of which that of the least rank is kept."""
        return (self.microseconds, self.key.name, self.formulation, self.options)


def timings(measured: Iterable[tuple[KernelKey, float]]) -> tuple[tuple[str, float], ...]:
    """The least time of each kernel, by the digest of its key, the fastest first."""
    best: dict[str, float] = {}
    for key, microseconds in sorted(measured, key=lambda pair: pair[1]):
        best.setdefault(key.digest, round(microseconds, 3))
    return tuple(best.items())


def identity(problem: Any) -> str:
    """A problem as JSON, without the index of the GPU and the strides of dimensions of one element."""
    return json.dumps(normalised(fields_of(problem)), sort_keys=True, separators=(",", ":"))


def fields_of(value: Any) -> Any:
    """A problem, or a part of one, as values of JSON, without the index of the GPU; a tree is its id.

    Extents are not compared: those of a traced plan (`arrays.symbols`) stay what they are.
    """
    if isinstance(value, EpilogueVisitorTree):
        return value.id
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: fields_of(held) for name, held in value.items() if name != "device"}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [fields_of(item) for item in value]
    return value


def normalised(value: Any) -> Any:
    """The fields of a problem with stride 0 for dimensions of one element, where arrays may have any."""
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {name: normalised(held) for name, held in value.items()}
    shape, strides = named.get("shape"), named.get("strides")
    if isinstance(shape, list) and isinstance(strides, list):
        named["strides"] = [0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=False)]
    return named


class RecordedProblem:
    """The problem of a plan as recordings (`ac.record`) have it, from which `tune` makes a request.

    Its JSON is made where something is recorded: most processes record nothing.
    """

    def __init__(self, op: str, problem: Any, tree: EpilogueVisitorTree | None = None) -> None:
        """A problem that tuned choices of an operation are stored under; `tree` is its tree if it has the id alone."""
        self._op, self._problem, self._tree = op, problem, tree

    def traced(self) -> RecordedProblem:
        """The problem of a traced plan, with symbols for the numbers of its trace."""
        tree = next(_trees_in(self._problem), None)
        return RecordedProblem(self._op, symbols.symbolic(fields_of(self._problem)), tree)

    def facts(self) -> list[_core.Symbol]:
        """The numbers that the blueprint of a `traced` plan keeps for `text`: its symbols, in order."""
        return list(symbols.symbols_in(self._problem))

    def text(self, facts: Sequence[int] = ()) -> str:
        """The problem as JSON, given its `facts` as a blueprint for some extents has them."""
        problem = normalised(symbols.filled(fields_of(self._problem), iter(facts)))
        values = {"version": VERSION, "op": self._op, "problem": problem}
        tree = self._tree or next(_trees_in(self._problem), None)
        if tree is not None:
            decided = tree.result_dtype
            names = [operand.name for operand in tree.inputs] + [output.name for output in tree.outputs]
            values["tree"] = {"program": tree.program, "names": names, "out_dtype": decided and decided.value}
        return json.dumps(values)


def _trees_in(value: Any) -> Iterator[EpilogueVisitorTree]:
    if isinstance(value, EpilogueVisitorTree):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _trees_in(getattr(value, field.name))


def parse(values: Any) -> TuneRecord:
    """The record of a line's JSON; ValueError if it is none, or of another version."""
    key = key_file.parse(values)
    tuned = values.get("tuned")
    if not isinstance(tuned, Mapping):
        raise ValueError(f"{key.name} has no object `tuned`: this is a file of keys, and none of tuned choices")  # noqa: TRY004
    if tuned.get("version") != VERSION:
        raise ValueError(f"version is {tuned.get('version')!r}; expected {VERSION}: tune again")
    read: dict[str, Any] = {"key": key, "problem": identity(tuned.get("problem"))}
    for field in dataclasses.fields(TuneRecord):
        if field.name not in read and field.type in _KINDS:
            kind, expected = _KINDS[field.type]
            value = tuned.get(field.name, field.default)  # the default, for options that older records lack
            if not isinstance(value, kind) or isinstance(value, bool):
                shown = json.dumps(tuned.get(field.name))[:60]
                raise ValueError(f"{field.name} is {shown}; expected {expected}")
            read[field.name] = value
    times = tuned.get("timings", {})
    if not isinstance(times, Mapping) or not all(isinstance(took, (int, float)) for took in times.values()):
        raise ValueError(f"timings is {json.dumps(times)[:60]}; expected an object of numbers")
    return TuneRecord(**read, timings=tuple(times.items()))


_KINDS: dict[Any, tuple[Any, str]] = {
    "str": (str, "a string"), "int": (int, "an integer"), "float": ((int, float), "a number"),
}  # fmt: skip


def read(path: Path) -> list[TuneRecord]:
    """The records of a file."""
    return read_lines(path, parse)


def read_lines(path: Path, parsed: Callable[[Any], T]) -> list[T]:
    """The parsed JSON of each line that is not blank; errors name the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # not a path, or not text
        raise InvalidOperandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                found.append(parsed(json.loads(text)))
            except (ValueError, RecursionError) as error:
                raise InvalidOperandError(f"{path}:{number}: {error}") from error
    return found


Records: TypeAlias = dict[tuple[str, str], TuneRecord]
"""The fastest record of each GPU and problem, by its model's name and the problem's `identity`."""

_records: Records = {}
_tried: ContextVar[tuple[str, TuneRecord] | None] = ContextVar("tried", default=None)
_lock = threading.Lock()


def add(records: Iterable[TuneRecord], known: Records = _records) -> None:
    """Adds records to those of this process, or to `known`; the faster of two for one problem stays."""
    with _lock:
        for record in records:
            place = (record.gpu, record.problem)
            if place not in known or record.rank < known[place].rank:
                known[place] = record


def clear() -> None:
    """Drops all records, those of ATOMR_CUTLASS_TUNED too."""
    _start_from_environment()
    _records.clear()


def find(gpu: str, problem: Any) -> TuneRecord | None:
    """The record of a problem on a model of GPU."""
    tried = _tried.get()
    if tried is not None:
        return tried[1] if tried[0] == identity(problem) else None
    _start_from_environment()
    # Most processes have no records: they need no identity.
    return _records.get((gpu, identity(problem))) if _records else None


def is_trying() -> bool:
    """Whether `trying` is active in this thread."""
    return _tried.get() is not None


@contextlib.contextmanager
def trying(problem: Any, record: TuneRecord) -> Iterator[None]:
    """Makes the selection use this record for a problem, and no other record, in this thread."""
    token = _tried.set((identity(problem), record))
    try:
        yield
    finally:
        _tried.reset(token)


@functools.cache
def _start_from_environment() -> None:
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        try:
            add(read(Path(path)))
        except CutlassError as error:  # noqa: PERF203 - the other files may be in order
            warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=5)

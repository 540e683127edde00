"""Requests of recorded calls: the problems that `ac.record` notes, as `tune` takes them."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..checks import shown
from ..errors import CutlassError, InvalidOperandError
from ..generator import key_file
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import EpilogueVisitorTree
from . import devices, tuning
from .operation import PlannedOperation, planned_operations
from .request import Request

_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""The errors of reading JSON that no recording has."""


class Recorded(NamedTuple):
    """The problems of a recording.

    Attributes:
        requests: the requests, each once, in the order of the file.
        left_out: a sentence for each operation with problems that no request has.
    """

    requests: list[Request]
    left_out: list[str]


def recorded_requests(path: str | os.PathLike[str]) -> list[Request]:
    """The requests of recorded calls and plans, such as `tune` takes them; of each problem one.

    Problems that no request has are left out with a warning: arrays of requests are dense and aligned to 16 bytes, with
    at most one dimension of batches, and those of groups are lists.

    Args:
        path: a file that `record` has written.

    Raises:
        InvalidOperandError: `path` is no path, the file cannot be read or is no recording, or an older version of the
            package has recorded it: delete it, and record again.
    """
    try:
        found = read(Path(path))
    except TypeError:
        raise InvalidOperandError(f"path is {shown(path)}; expected the path of a file of keys") from None
    for sentence in found.left_out:
        warnings.warn(f"{path}: {sentence}", RuntimeWarning, stacklevel=2)
    return found.requests


def read(path: Path) -> Recorded:
    """The problems of a recording; raises InvalidOperandError as `recorded_requests` does."""
    requests: dict[Request, None] = {}
    left_out: collections.Counter[str] = collections.Counter()
    of_lines = tuning.read_lines(path, lambda values: list(_requests_of_line(values)))
    for op, request in (pair for pairs in of_lines for pair in pairs):
        if request is None:
            left_out[op] += 1
        else:
            requests.setdefault(request)
    if not of_lines:
        raise InvalidOperandError(f"{path} holds no key: expected what ac.record has written")
    return Recorded(list(requests), [_sentence(op, count) for op, count in left_out.items()])


def _sentence(op: str, count: int) -> str:
    many = f"{count} problem{'s' if count > 1 else ''} of {op}"
    if not _operations_of(op):
        return f"{many} left out: no requests describe that operation"
    return (
        f"{many} left out: no request has such arrays; they must be dense and aligned to 16 bytes, batches (one "
        "dimension at most) outermost, groups in lists"
    )


def _requests_of_line(values: Any) -> Iterator[tuple[str, Request | None]]:
    """(operation, request) of each problem of a line; ValueError if the line is not of a recording."""
    key = key_file.parse(values)
    problems = values.get("problems")
    if not isinstance(problems, list):
        raise ValueError(  # noqa: TRY004
            f"{key.name} has no list `problems`, which ac.record writes since it serves tuning: delete the file, and "
            "record again"
        )
    for problem in problems:
        version = problem.get("version") if isinstance(problem, Mapping) else None
        if version != tuning.VERSION:
            raise ValueError(f"version of a problem is {version!r}; expected {tuning.VERSION}: record again")
        try:
            op, wanted, tree = problem["op"], problem["problem"], _tree_of(problem.get("tree"))
            yield op, _request_of(op, wanted, tree)
        except _MALFORMED as error:
            raise ValueError(f"a problem of {key.name} is malformed ({error!r}): record again") from error


def _tree_of(values: Mapping[str, Any] | None) -> EpilogueVisitorTree | None:
    if values is None:
        return None
    tree = EpilogueVisitorTree.parse(values["program"], values["names"])
    decided = values["out_dtype"]
    if decided is None:
        return tree
    return EpilogueVisitorTree(tree.result, tree.stores, result_dtype=CutlassDtype(decided), canonical=True)


def _request_of(op: str, problem: Any, tree: EpilogueVisitorTree | None) -> Request | None:
    """The request that has a recorded problem; None where none has it."""
    wanted = tuning.identity(problem)
    invariant = [*problem] == ["problem"]  # `BatchInvariant`
    for operation in _operations_of(op):
        more = {"batch_invariant": invariant} if hasattr(operation.request_type, "batch_invariant") else {}
        for fields in operation.recorded_fields(problem["problem"] if invariant else problem, tree):
            try:
                request: Request = operation.request_type(**fields, **more)
                search = operation.search(request, devices.imagined(SmArch.SM90A))  # on every GPU it is the same
            except CutlassError:  # layouts that kernels do not read
                continue
            if search is not None and tuning.identity(search.tuned_problem) == wanted:
                return request
    return None


def _operations_of(op: str) -> list[PlannedOperation[Any]]:
    """The operations whose requests have kernels of this operation."""
    return [operation for name, operation in planned_operations().items() if op in (name, operation.kernels)]

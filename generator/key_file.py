"""Files of keys: one JSON object per line with a kernel's name and the fields of its key, as `list --json` prints it.

Readers ignore other members of an object (shapes and counts of a recorded run, the facts of a table's row).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .key import KernelKey
from .matrix import supports

_FIELDS = {field.name: str(field.type) for field in fields(KernelKey)}
_KINDS: dict[str, tuple[type, str]] = {"int": (int, "an integer"), "Triple": (list, "three integers")}


def line(key: KernelKey, **more: Any) -> str:
    """A key as one line of a file of keys, without its end.

    Args:
        key: the key.
        more: further members of the object.
    """
    return json.dumps({"name": key.name, **key.to_dict(), **more}, separators=(",", ":"))


def read(path: Path) -> list[KernelKey]:
    """The keys of a file, each once, in the order of their first lines. Blank lines are skipped.

    Raises:
        ValueError: the file cannot be read, has no keys, or a line is no valid key; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the file of keys {path}: {getattr(error, 'strerror', None) or error}") from error
    found: dict[KernelKey, None] = {}
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                found.setdefault(parse(json.loads(text)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no key: expected a JSON object a line, as `atomr-cutlass list --json` has them")
    return list(found)


def parse(values: Any) -> KernelKey:
    """The key of an object of a file of keys.

    Raises:
        ValueError: fields are missing or malformed, the name is that of another kernel, or no kernel of this version
            has such a key.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{json.dumps(values)[:60]} is no JSON object of a kernel's key")  # noqa: TRY004
    given = {name: value for name, value in values.items() if name in _FIELDS}
    for name, value in given.items():
        kind, wanted = _KINDS.get(_FIELDS[name], (str, "a string"))
        numbers = value if isinstance(value, list) else [value] if kind is int else []
        right = isinstance(value, kind) and all(
            isinstance(number, int) and not isinstance(number, bool) for number in numbers
        )
        if not right or (kind is list and len(value) != 3):
            raise ValueError(f"{name} is {json.dumps(value)[:60]}; expected {wanted}")
    key = KernelKey.from_dict(given)
    try:
        status = supports(key)
    # A tree's program, a combination of values that no family was written for.
    except Exception as error:
        raise ValueError(f"no kernel has this key: {error}") from error
    if not status:
        raise ValueError(f"no kernel has this key: {status.reason}")
    name = values.get("name", key.name)
    if name != key.name:
        raise ValueError(f"the name is {name!r}, and that of the key's kernel {key.name!r}: record it again")
    return key

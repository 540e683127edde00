"""The build knobs that choose among the matrix's keys: ops, dtypes, patterns, filter files, exclusions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .archs import SmArch
from .cover import Budget, choose
from .dtypes import CutlassDtype
from .key import KernelKey, check_unique
from .key_file import read
from .matrix import OPS, PRESETS, expand, with_trees


@dataclass(frozen=True)
class Selection:
    """The kernels that a build selects. Lists are `;`-separated, patterns `,`-separated, as the CMake knobs give them.

    Attributes:
        preset: `none`, `smoke`, `default` or `full`.
        archs: compile targets such as `80;90a`.
        ptx: targets that carry PTX as well, such as `80`.
        ops: operations; empty for all.
        dtypes: element types of A (TF32 means tf32 math); empty for all.
        kernels: CUTLASS_LIBRARY_KERNELS syntax: `*` stands between ordered substrings; empty for all.
        filter_file: a file of regular expressions, one a line, any of which a name must match; empty for none.
        exclude: patterns of names to leave out.
        epilogues: names of trees, and files of trees (`trees`), `;`-separated, whose kernels are built too.
        keys_file: a file of keys (`key_file`): exactly those of the archs, which are by default all that it has. It
            takes the place of the preset and of every filter; empty for none.
        budget_cells: as many cells at most, those that a file of tuned choices in the place of keys makes worth it
            (`cover`): its own and cells of the matrix that it timed; empty for no limit.
        budget_mb: so many MB of GPU code at most, in the same way.
    """

    preset: str = "default"
    archs: str = "80;90a"
    ptx: str = ""
    ops: str = ""
    dtypes: str = ""
    kernels: str = ""
    filter_file: str = ""
    exclude: str = ""
    keys_file: str = ""
    epilogues: str = ""
    budget_cells: str = ""
    budget_mb: str = ""

    def arch_list(self) -> list[SmArch]:
        """The archs, in order, without repetition."""
        if self.keys_file and not split(self.archs, ";"):
            return list(dict.fromkeys(key.arch for key in read(Path(self.keys_file))))
        found = list(dict.fromkeys(SmArch.parse(text) for text in split(self.archs, ";")))
        if not found:
            raise ValueError(f"no arch given; valid: {', '.join(a.target for a in SmArch)}")
        return found

    def ptx_list(self) -> list[SmArch]:
        """The archs that carry PTX; ValueError for arch-specific ones, whose PTX nothing else can run."""
        found = list(dict.fromkeys(SmArch.parse(text) for text in split(self.ptx, ";")))
        for arch in found:
            if not arch.portable:
                valid = ", ".join(a.target for a in SmArch if a.portable)
                raise ValueError(f"PTX of {arch.target!r} runs on no other arch; valid: {valid}")
            if arch not in self.arch_list():
                raise ValueError(f"PTX is requested for {arch.target!r}, which is not among the archs {self.archs!r}")
        return found

    def keys(self) -> list[KernelKey]:
        """The chosen keys.

        Raises:
            ValueError: an unknown value, or filters that leave nothing, naming the valid choices.
        """
        self.ptx_list()
        budget = self.budget()
        if self.keys_file:
            kept = self._of_file()[0]
            return choose(Path(self.keys_file), self.arch_list(), budget) if budget else kept
        if budget:
            raise ValueError(
                "ATOMR_CUTLASS_BUDGET_CELLS and ATOMR_CUTLASS_BUDGET_MB choose by measurement: give a file of tuned "
                "choices as ATOMR_CUTLASS_KEYS, which `atomr-cutlass tune` writes"
            )
        keys = expand(self.preset, self.arch_list())
        if self.epilogues:
            keys = list(dict.fromkeys([*keys, *with_trees(self.arch_list(), split(self.epilogues, ";"))]))
        elif self.preset == "none":
            return []
        if self.ops:
            wanted = {_valid(op, OPS, "op") for op in split(self.ops, ";")}
            for op in sorted(wanted - {k.op for k in keys}):
                raise ValueError(self._without(op))
            keys = [k for k in keys if k.op in wanted]
        if self.dtypes:
            types = {CutlassDtype.parse(text) for text in split(self.dtypes, ";")}
            keys = [k for k in keys if _dtype_of(k) in types]
        names = check_unique(keys)
        for knob, match in self._name_filters():
            names = {name: key for name, key in names.items() if match(name)}
            if not names:
                raise ValueError(self._nothing(f"{knob} leaves no kernel", keys))
        if not names:
            raise ValueError(self._nothing("no kernel is left", expand(self.preset, self.arch_list())))
        return list(names.values())

    def budget(self) -> Budget:
        """The limits; ValueError for other text than numbers."""
        try:
            return Budget(int(self.budget_cells or 0), float(self.budget_mb or 0))
        except ValueError as error:
            raise ValueError(f"ATOMR_CUTLASS_BUDGET_CELLS and ATOMR_CUTLASS_BUDGET_MB: {error}") from error

    def skipped(self) -> list[KernelKey]:
        """The keys of the file of keys that are of other archs."""
        return self._of_file()[1] if self.keys_file else []

    def _of_file(self) -> tuple[list[KernelKey], list[KernelKey]]:
        """(the file's keys for these archs, its other keys)."""
        filters = {
            "OPS": self.ops, "DTYPES": self.dtypes, "KERNELS": self.kernels, "EXCLUDE_KERNELS": self.exclude,
            "KERNEL_FILTER_FILE": self.filter_file,
            "EPILOGUES": self.epilogues,
        }  # fmt: skip
        given = ", ".join(f"ATOMR_CUTLASS_{name}={value!r}" for name, value in filters.items() if value)
        if given:
            raise ValueError(f"ATOMR_CUTLASS_KEYS={self.keys_file!r} says exactly which kernels: leave out {given}")
        everything, archs = read(Path(self.keys_file)), self.arch_list()
        kept = [key for key in everything if key.arch in archs]
        if not kept:
            there = ", ".join(sorted({key.arch.target for key in everything}))
            raise ValueError(f"the file of keys {self.keys_file} has keys of {there}, and none of {self.archs}")
        check_unique(kept)
        return kept, [key for key in everything if key.arch not in archs]

    def _name_filters(self) -> Iterable[tuple[str, Callable[[str], bool]]]:
        if self.kernels:
            yield f"ATOMR_CUTLASS_KERNELS={self.kernels!r}", pattern_matcher(self.kernels)
        if self.filter_file:
            yield f"ATOMR_CUTLASS_KERNEL_FILTER_FILE={self.filter_file!r}", filter_file_matcher(Path(self.filter_file))
        if self.exclude:
            excluded = pattern_matcher(self.exclude)
            yield f"ATOMR_CUTLASS_EXCLUDE_KERNELS={self.exclude!r}", lambda name: not excluded(name)

    def _without(self, op: str) -> str:
        archs = self.arch_list()
        having = [preset for preset in PRESETS if any(key.op == op for key in expand(preset, archs))]
        cure = f"preset {having[0]} has" if having else "no preset has any, they are compiled at run time"
        return f"preset {self.preset} has no kernel of {op} for archs {self.archs}: {cure}"

    def _nothing(self, text: str, available: Sequence[KernelKey]) -> str:
        dtypes = ", ".join(sorted({_dtype_of(k).value for k in available})) or "none"
        sample = "; ".join(k.name for k in available[:3]) or "none"
        return (
            f"{text} (preset {self.preset}, archs {self.archs}); presets: {', '.join(PRESETS)}; ops: {', '.join(OPS)}; "
            f"dtypes here: {dtypes}; names look like: {sample}; `python -m generator --list` prints all"
        )


def split(text: str, separator: str) -> list[str]:
    """The non-empty parts, stripped."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def pattern_matcher(patterns: str) -> Callable[[str], bool]:
    """CUTLASS_LIBRARY_KERNELS syntax: any pattern matches; the substrings between `*` must appear in order."""
    expressions = [
        re.compile(".*".join(re.escape(part) for part in pattern.split("*"))) for pattern in split(patterns, ",")
    ]
    return lambda name: any(e.search(name) for e in expressions)


def filter_file_matcher(path: Path) -> Callable[[str], bool]:
    """Regular expressions, one a line; blank lines and lines that start with # are ignored."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read the kernel filter file {path}: {error.strerror}") from error
    expressions = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                expressions.append(re.compile(line.strip()))
            except re.error as error:
                raise ValueError(f"{path}:{number}: not a regular expression: {error}") from error
    return lambda name: any(e.search(name) for e in expressions)


def _dtype_of(key: KernelKey) -> CutlassDtype:
    return CutlassDtype.TF32 if key.math == "tf32" else key.a


def _valid(value: str, choices: Sequence[str], noun: str) -> str:
    if value not in choices:
        raise ValueError(f"unknown {noun} {value!r}; valid: {', '.join(choices)}")
    return value

"""Packs: kernels in one file, all under a checksum (`generator.seal`).

A pack is a shared library made by nvcc, or MAGIC followed by the images of cubins made by NVRTC, whose lengths are in
the manifest. It is read whole and checked before use: cubins reach the driver as they were checked, even if the file
changes meanwhile. Reading, listing and writing a pack needs neither a GPU nor a compiler.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import LibraryError
from ..generator import key_file
from ..generator.key import KernelKey
from ..generator.manifest import cuda_version, kernel, manifest
from ..generator.seal import append, unseal

MAGIC = b"atomr_cutlass cubins 2\n"

LAYOUT = f"{_core.LAYOUT_DIGEST:016x}"
"""The digest of the ABI's layout, as manifests have it."""

BUILT = ("package", "abi_version", "layout", "compiler", "headers", "licenses")
"""The members of a manifest about how the pack was built; see `generator.manifest.manifest`."""


@dataclass(frozen=True)
class Cubin:
    """A kernel of a pack, with the companion that evaluates its parameters (jit_abi.h).

    Its content is as `KernelInfo` has it, records of its verification as `Verification.to_dict` gives them.
    """

    key: KernelKey
    kernel: bytes = field(repr=False)
    companion: bytes = field(repr=False)
    content: str
    shared_bytes: int
    threads: int
    verified: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Pack:
    """The contents of a pack of cubins; `built` has the members BUILT of its manifest."""

    name: str
    built: Mapping[str, Any]
    cubins: tuple[Cubin, ...]

    @property
    def cuda_version(self) -> int:
        """The compiler's; 13000 means 13.0."""
        return cuda_version(self.built["compiler"])

    def manifest(self) -> dict[str, Any]:
        """Its manifest, as JSON-ready values."""
        kernels = [
            kernel(
                cubin.key, cubin.content, cubin.verified, (cubin.kernel, cubin.companion),
                shared_bytes=cubin.shared_bytes, threads=cubin.threads,
            )
            for cubin in self.cubins
        ]  # fmt: skip
        return manifest(self.name, kernels, **self.built)


def encode(pack: Pack) -> bytes:
    """The file of a pack: the same bytes for the same pack."""
    images = [image for cubin in pack.cubins for image in (cubin.kernel, cubin.companion)]
    return append(b"".join((MAGIC, *images)), pack.manifest())


def decode(data: bytes, where: str) -> Pack | dict[str, Any]:
    """The pack of cubins in a file, or the manifest of a shared library, checked; errors name `where`."""
    try:
        description = unseal(data)
    except (ValueError, RecursionError) as error:
        raise LibraryError("pack", f"{where} is damaged: {error}; copy or build it again") from error
    # Before all else, whose meaning may differ in another version. A library whose manifest lacks them is checked when
    # it is loaded.
    abi_version, layout = description.get("abi_version", _core.ABI_VERSION), description.get("layout", LAYOUT)
    if abi_version != _core.ABI_VERSION:
        raise _refusal(where, f"was built for ABI {abi_version}; this package speaks ABI {_core.ABI_VERSION}")
    if layout != LAYOUT:
        reason = f"was built for another layout of the ABI's structs ({layout}; this package has {LAYOUT})"
        raise _refusal(where, reason)
    try:
        if data.startswith(MAGIC):
            return _pack(description, data, where)
        _require_glibc(str(description["glibc"]), len(description["kernels"]), where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refusal(where, f"has a manifest that cannot be used ({error})") from error
    return description


def _refusal(where: str, reason: str) -> LibraryError:
    return LibraryError("pack", f"{where} {reason}: rebuild the pack")


def _pack(description: Mapping[str, Any], data: bytes, where: str) -> Pack:
    """The inverse of `encode`, from the bytes and the manifest at their end."""
    end, cubins = len(MAGIC), []
    for entry in description["kernels"]:
        images = []
        for image in entry["images"]:
            start, end = end, end + image["bytes"]
            images.append(data[start:end])
        code, companion = images
        facts = {name: entry[name] for name in ("content", "shared_bytes", "threads")}
        cubins.append(Cubin(key_file.parse(entry), code, companion, **facts, verified=tuple(entry["verified"])))
    if end != description["bytes"]:
        raise _refusal(where, "has images of other lengths than its manifest says")
    return Pack(description["name"], {name: description[name] for name in BUILT}, tuple(cubins))


def _require_glibc(needed: str, kernels: int, where: str) -> None:
    """Refuses a shared library that needs a newer C library than this system's; the error has its number of kernels."""
    library, here = platform.libc_ver()
    if not needed or library != "glibc":
        return
    newest, own = ([int(part) for part in version.split(".")] for version in (needed, here))
    if newest > own:
        raise LibraryError(
            "pack",
            f"{where} ({kernels} kernels) needs GLIBC_{needed}, and this system has {here}: build it on a system "
            "that is as old, or as cubins (`atomr-cutlass build`), which need none",
        )


def read(path: Path) -> Pack | dict[str, Any]:
    """Reads a file; see `decode`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LibraryError("pack", f"cannot read {path}: {error.strerror}") from error
    return decode(data, str(path))


def read_cubins(path: Path) -> Pack:
    """Reads a pack of cubins; refuses a shared library."""
    found = read(path)
    if not isinstance(found, Pack):
        raise LibraryError(
            "pack",
            f"{path} is no pack of cubins: one that is a shared library is loaded as it is, beside others, or built "
            "again of all keys",
        )
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a pack of either form as JSON-ready values."""
    found = read(path)
    return {"form": "cubins", **found.manifest()} if isinstance(found, Pack) else {"form": "library", **found}


def merge(packs: Sequence[Pack], name: str) -> Pack:
    """One pack with the kernels of several that were built alike."""
    first = packs[0]
    cubins: dict[KernelKey, Cubin] = {}
    for pack in packs:
        for attribute in ("abi_version", "layout", "compiler", "headers"):
            ours, theirs = first.built[attribute], pack.built[attribute]
            if ours != theirs:
                raise LibraryError(
                    "pack", f"{first.name} and {pack.name} cannot be merged: {attribute} is {ours} and {theirs}"
                )
        for cubin in pack.cubins:
            other = cubins.setdefault(cubin.key, cubin)
            if (other.kernel, other.companion) != (cubin.kernel, cubin.companion):
                raise LibraryError("pack", f"the packs have different code for {cubin.key.name}: rebuild one of them")
    return Pack(name, first.built, tuple(cubins.values()))

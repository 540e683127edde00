"""The compile targets, each stated once."""

from __future__ import annotations

import enum
import functools

from .errors import InvalidOperandError, expect
from .members import Members


class SmArch(enum.Enum, metaclass=Members):
    """A compile target of nvcc or NVRTC, suffix included (`sm_90a` is not `sm_90`)."""

    SM80 = "sm_80"
    SM86 = "sm_86"
    SM89 = "sm_89"
    SM90A = "sm_90a"
    SM100 = "sm_100a"
    SM120 = "sm_120a"

    @property
    def target(self) -> str:
        """The target as CMake and the build knobs spell it, such as `80` or `90a`."""
        return self.value.removeprefix("sm_")

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor) of the devices it is made for."""
        number = int(self.target.rstrip("a"))
        return number // 10, number % 10

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one thread block can have.

        Source: CUDA C++ Programming Guide, technical specifications per compute capability.
        """
        return _SHARED_MEMORY[self]

    @property
    def portable(self) -> bool:
        """Whether its PTX runs on later architectures; arch-specific targets (suffix `a`) do not."""
        return not self.target.endswith("a")

    @classmethod
    def parse(cls, text: str) -> SmArch:
        """Reads `80`, `sm_80`, `90a`, `sm_90a`, `100`, `120`; InvalidOperandError names the valid ones."""
        expect(text, str, "arch", "a name such as '90a'")
        wanted = text.strip().lower().removeprefix("sm_").removeprefix("sm")
        for arch in cls:
            if wanted == arch.target or (wanted + "a" == arch.target and arch in (cls.SM100, cls.SM120)):
                return arch
        if wanted == "90":
            raise InvalidOperandError("unknown arch '90': Hopper kernels need the arch-specific target, say '90a'")
        valid = ", ".join(a.target for a in cls)
        raise InvalidOperandError(f"unknown arch {text!r}; valid: {valid} (100 and 120 mean 100a and 120a)")

    @classmethod
    def from_capability(cls, major: int, minor: int) -> SmArch | None:
        """The target made for a device of this compute capability, or None when there is none."""
        expect(major, int, "major")
        expect(minor, int, "minor")
        return next((a for a in cls if a.capability == (major, minor)), None)


_SHARED_MEMORY = {
    SmArch.SM80: 163 * 1024,
    SmArch.SM86: 99 * 1024,
    SmArch.SM89: 99 * 1024,
    SmArch.SM90A: 227 * 1024,
    SmArch.SM100: 227 * 1024,
    SmArch.SM120: 99 * 1024,
}

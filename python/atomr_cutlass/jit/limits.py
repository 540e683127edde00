"""How much memory and time a compilation may take, and how long others wait for it."""

from __future__ import annotations

COMPILE_BYTES = 2 << 30
"""For one compiler process: sm90 kernels take 1.9 GB, their companions and the kernels of sm80 half of that or less."""

COMPILE_SECONDS = 900.0
"""For one compiler process: many times what it takes on a busy machine."""

LOCK_SECONDS = 2 * COMPILE_SECONDS + 60.0
"""For the process that compiles a kernel, which may run its two compilers one after the other. Longer than they may
take, so that who waits gets their kernel or their error; only for one that was stopped is it ever this long."""

"""How long a compilation may take, and how long others wait for it."""

from __future__ import annotations

COMPILE_SECONDS = 900.0
"""For one compiler process: many times what it takes on a busy machine."""

LOCK_SECONDS = 2 * COMPILE_SECONDS + 60.0
"""For the process that compiles a kernel, which may run its two compilers one after the other. Longer than they may
take, so that who waits gets their kernel or their error; only for one that was stopped is it ever this long."""

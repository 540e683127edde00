"""A GPU that only takes notes, and tables of kernels that were never compiled, for `golden_cases`.

Everything from a public call down to the C ABI is the package's own. The driver and the kernels of `fake_kernels` are
one C library, which writes down each launch with its arguments and each copy; no memory stands behind the addresses of
operands. Whatever the package does not let a user put in place is put in place here, and nowhere else in these tests:
the kernel table, compilation, and that nothing is remembered from case to case.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import struct
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dlpack_arrays
import fake_cases
import fake_kernels
import fake_pack
import fake_table
from atomr_cutlass import SmArch, _core
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.jit import kernels, locks
from atomr_cutlass.jit.compiler import Images
from atomr_cutlass.jit.toolchain import Toolchain
from atomr_cutlass.pipeline import devices, plan_cache, table
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.table import KernelInfo

TABLES = ("empty", "smoke", "default", "full", "ptx")
"""Presets of the GPU's own arch; `ptx` is `full` of sm_80 as PTX."""

DTYPES: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "f16": (np.float16, None), "bf16": (ml_dtypes.bfloat16, None), "f32": (np.float32, None), "f64": (np.float64, None),
    "i8": (np.int8, None), "i32": (np.int32, None), "u8": (np.uint8, (1, 8)), "e4m3": (ml_dtypes.float8_e4m3fn, None),
    "e5m2": (ml_dtypes.float8_e5m2, None), "e8m0": (ml_dtypes.float8_e8m0fnu, (14, 8)),
}  # fmt: skip
"""NumPy's type, and where the package has no name for it DLPack's."""

_SUFFIX = "@noted"  # of the rows' names: kernels that are linked in have the names without it
_CALL_SITE = re.compile(rf"{re.escape(str(fake_cases.HELPERS))}/golden_\w+\.py:\d+")
"""What errors call the line that asks: which one of these files it is, is nothing to record."""
_CONFIGURATION = "ATOMR_CUTLASS_TEST_GOLDEN_GPU"
_OPERAND_BITS = 38  # addresses of operands are this far apart
_REAL = 1 << 44  # from here on an address is the host's

LIBRARY = r"""
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>

static char* notes;
static size_t noted, room;
static void note_bytes(const void* from, size_t bytes) {
  if (noted + bytes + 1 > room) notes = realloc(notes, room = 2 * (noted + bytes + 1));
  memcpy(notes + noted, from, bytes);
  notes[noted += bytes] = 0;
}
static void note(const char* format, ...) {
  char line[512];
  va_list values;
  va_start(values, format);
  int bytes = vsnprintf(line, sizeof(line), format, values);
  va_end(values);
  note_bytes(line, (size_t)bytes);
}
static void note_hex(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    char two[3];
    snprintf(two, 3, "%02x", ((const unsigned char*)from)[i]);
    note_bytes(two, 2);
  }
}
/* What was noted since the last time. */
const char* golden_notes(void);
const char* golden_notes(void) {
  const char* const found = noted == 0 ? "" : notes;
  noted = 0;
  return found;
}
static int real(Pointer address) { return address >> 44 != 0; }

/* A kernel of the words "struct bytes workspace slices table workspace's-bytes name". */
static Kernel* kernel_of(const char* words) {
  Kernel* made = calloc(1, sizeof(Kernel));
  Arguments* at = &made->arguments;
  unsigned long long workspace = 0;
  const int found = sscanf(words, "%63s %u %u %u %u %llu %399s", made->arguments_name, &at->bytes, &at->workspace,
                           &at->slices, &at->table, &workspace, made->name);
  made->workspace = workspace;
  return found == 7 ? made : NULL;
}
static void note_given(const Kernel* kernel, const void* args, void* stream) {
  const atomr_cutlass_grouped_args* grouped = args; /* of those that have tables */
  note("launch %s %s %llu ", kernel->arguments_name, kernel->name, (unsigned long long)stream);
  note_hex(args, kernel->arguments.bytes);
  if (kernel->arguments.table && grouped->table != 0 && real((Pointer)grouped->table)) {
    note(" ");
    note_hex(grouped->table, sizeof(atomr_cutlass_group) * (size_t)grouped->groups);
  }
  note("\n");
}

/* The pack: a row for each line "kernel, shared bytes, flags, key", between tabs, of the file that the environment
   names. */
static atomr_cutlass_pack pack = {
    .abi_version = ATOMR_CUTLASS_ABI_VERSION, .layout_digest = LAYOUT_DIGEST, .name = "noted"};
const atomr_cutlass_pack* atomr_cutlass_pack_v1(void);
const atomr_cutlass_pack* atomr_cutlass_pack_v1(void) {
  FILE* file = fopen(getenv("ATOMR_CUTLASS_TEST_GOLDEN_ROWS"), "r");
  const atomr_cutlass_row** rows = 0;
  char* line = 0;
  size_t size = 0;
  uint32_t count = 0;
  note_launch = note_given;
  if (file == 0) return &pack;
  while (getline(&line, &size, file) > 0) {
    char *place = strdup(line), *parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = strsep(&place, "\t\n");
    const Kernel* kernel = kernel_of(parts[0]);
    atomr_cutlass_row const made = {
        .name = kernel->name, .key = parts[3], .content = "", .params_bytes = kernel->arguments.bytes,
        .params_align = 16, .shared_bytes = (uint32_t)atoi(parts[1]), .threads = 128,
        .flags = (uint32_t)atoi(parts[2]), .cuda_version = 13000, .context = kernel, .supports = supports,
        .workspace_size = workspace_size, .prepare = prepare, .launch = launch};
    rows = realloc(rows, (count + 1) * sizeof(*rows));
    rows[count++] = memcpy(malloc(sizeof(made)), &made, sizeof(made));
  }
  fclose(file);
  pack.rows = rows, pack.count = count;
  return &pack;
}

/* An image is the words of a kernel; one that is compiled at run time is that and what its function does. */
typedef struct { Kernel kernel; int evaluates; } Loaded;
static atomr_cutlass_jit_info info;
int cuLibraryLoadData(void** library, const void* image, int* a, void** b, unsigned c, int* d, void** e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  *library = kernel_of(image);
  return *library == NULL ? 200 : 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  Loaded const made = {*(Kernel*)library, strstr(name, "_evaluate") != 0};
  *kernel = memcpy(malloc(sizeof(made)), &made, sizeof(made));
  return 0;
}
int cuLibraryGetGlobal(Pointer* pointer, size_t* bytes, void* library, const char* name) {
  atomr_cutlass_jit_info const made = {
      .layout_digest = LAYOUT_DIGEST, .params_bytes = ((Kernel*)library)->arguments.bytes, .params_align = 16,
      .threads = 128, .cluster = {1, 1, 1}};
  (void)name;
  info = made;
  *pointer = (Pointer)&info;
  *bytes = sizeof(info);
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return 0; }
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
  const Loaded* loaded = function;
  const Kernel* kernel = &loaded->kernel;
  size_t const size = kernel->arguments.bytes;
  (void)extra;
  if (!loaded->evaluates) {
    /* CUlaunchConfig: grid, block, shared bytes, stream */
    note_given(kernel, arguments[0], *(void* const*)((const char*)config + 32));
    return 0;
  }
  const char* problems = *(void**)arguments[0];
  char* results = *(char**)arguments[1];
  for (int i = 0; i < 2; ++i, problems += size, results += *(uint64_t*)arguments[2]) {
    atomr_cutlass_jit_evaluation* answer = (void*)results;
    answer->implementable = 1;
    answer->grid[0] = answer->grid[1] = answer->grid[2] = 1;
    answer->workspace_bytes = answer->clear_bytes = workspace_of(kernel, problems);
    memcpy(results + ATOMR_CUTLASS_JIT_PARAMS_OFFSET, problems, size);
  }
  return 0;
}

/* Memory: small pieces are the host's, so that what is written there can be read; of others there are addresses. */
int cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  static Pointer next = 40ull << 38;
  if (bytes <= 1 << 16) {
    /* Mapped, and so above the addresses of operands: the heap of an executable at a fixed address lies below them. */
    static char *piece = 0, *end = 0;
    if (end - piece < 1 << 17) {
      piece = mmap(0, 1 << 28, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (piece == MAP_FAILED) return 2;
      end = piece + (1 << 28);
    }
    *pointer = (Pointer)piece;
    piece += (bytes + 256) / 256 * 256;
    return 0;
  }
  if ((next + bytes) >> 44 != 0) next = 40ull << 38;
  *pointer = next;
  next += (bytes + 4095) / 4096 * 4096;
  return 0;
}
/* What is freed is not used again: an address belongs to one allocation. */
int cuMemFree_v2(Pointer pointer) { (void)pointer; return 0; }
int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t n, void* stream) {
  (void)stream;
  if (real(to)) memcpy((void*)to, from, n);
  else note("upload %llx %zu\n", to, n);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t n, void* stream) {
  (void)stream;
  memset(to, 0, n);
  if (real(from)) memcpy(to, (void*)from, n);
  else note("download %llx %zu\n", from, n);
  return 0;
}
int cuMemsetD8Async(Pointer to, unsigned char value, size_t n, void* stream) {
  if (real(to)) memset((void*)to, value, n);
  /* What is evaluated for a plan is on a stream of its own. */
  if (stream != &context_value) note("fill %llx %zu %d\n", to, n, value);
  return 0;
}
int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t n, void* stream) {
  (void)stream;
  if (real(to) && real(from)) memcpy((void*)to, (void*)from, n);
  note("copy %llx %zu %llx\n", to, n, from);
  return 0;
}
int cuDeviceGetAttribute(int* value, int which, int device) {
  int major = 0, minor = 0, count = 0, shared = 0, l2 = 0;
  (void)device;
  sscanf(getenv("ATOMR_CUTLASS_TEST_GOLDEN_GPU"), "%d %d %d %d %d", &major, &minor, &count, &shared, &l2);
  *value = which == 75 ? major : which == 76 ? minor : which == 16 ? count : which == 97 ? shared : 0;
  if (which == 38) *value = l2;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)80 << 30; return 0; }
"""


def make_library(folder: Path) -> Path:
    """The driver, which is the pack too, in a folder."""
    driver = fake_pack.DRIVER
    for name in re.findall(r"^int (cu\w+)\(", LIBRARY, re.MULTILINE):  # which take the place of the driver's
        driver = driver.replace(f"int {name}(", f"int fake_{name}(")
    source = driver + fake_kernels.source_of() + LIBRARY
    return fake_pack.compile_library(source, folder / "libcuda.so.1")


def environment(library: Path, arch: SmArch, folder: Path) -> dict[str, str]:
    """The variables of a process that works on a GPU of this arch. The folder receives its table and caches."""
    rows = "".join(
        "\t".join((_words(key, key.name + _SUFFIX), str(info.shared_bytes), str(int(info.ptx)), key.to_json())) + "\n"
        for key, info in {info.key: info for name in TABLES for info in _rows(name, arch)}.items()
    )
    file = folder / f"rows_{arch.value}"
    file.write_text(rows, encoding="utf-8")
    gpu = devices.imagined(arch)
    shown = (*gpu.capability, gpu.multiprocessors, gpu.shared_memory, gpu.l2_bytes)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOMR_CUTLASS_")}
    return kept | {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")))),
        "ATOMR_CUTLASS_CACHE_DIR": str(folder / f"cache_{arch.value}"),
        "ATOMR_CUTLASS_CHECK_EPILOGUES": "off",
        "ATOMR_CUTLASS_TEST_GOLDEN_ROWS": str(file),
        _CONFIGURATION: " ".join(map(str, shown)),
    }


def outcome(file: str, folder: Path, arch: SmArch, timeout: float) -> dict[str, str]:
    """The exception of each case of a file in a process with this GPU, as text; skips where there is no C compiler."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler to make the fake GPU with")
    library = make_library(folder)
    variables = environment(library, arch, folder)
    return fake_cases.process_of(fake_cases.HELPERS / file, library, environment=variables, timeout=timeout)


@functools.cache
def _rows(name: str, arch: SmArch) -> tuple[KernelInfo, ...]:
    if name == "empty" or (name == "ptx" and arch is SmArch.SM80):
        return ()
    translated = {SmArch.SM80} if name == "ptx" else set()
    rows = fake_table.rows_of("full" if translated else name, translated or {arch}, ptx=translated)
    return tuple(dataclasses.replace(row, name=row.name + _SUFFIX) for row in rows)


class Gpu:
    """The GPU of a process with `environment`, and its table.

    Attributes:
        arch: what it is of.
    """

    def __init__(self, library: Path, arch: SmArch) -> None:
        self.arch = arch
        self._library = ctypes.CDLL(str(library))
        self._library.golden_notes.restype = ctypes.c_char_p
        self._background: list[str] = []
        self._table = "empty"
        self._layout = _core.layout()
        _core.load_pack(str(library), lambda _name, _key: None)
        table.rows = lambda: _rows(self._table, self.arch)
        kernels.problem = lambda: ""
        kernels.ready = lambda _key, _device: False
        kernels.where = lambda _key, _target: None
        kernels.load = lambda key, _target: (images(key), "compiled")
        kernels.in_background = lambda key, _device, _then: self._background.append(key.name)
        kernels.toolchain = lambda: Toolchain(Path("nvrtc"), (13, 0), "", (), {})

    def record(
        self, name: str, call: Callable[[], Any], operands: Sequence[str], *, forgetting: bool = True
    ) -> dict[str, Any]:
        """The outcome of a call with the named table: `launches`, `returns`, `background`, or the `error`.

        Args:
            name: of TABLES.
            call: the call.
            operands: names of its arrays, in the order of their addresses.
            forgetting: whether nothing is remembered of calls before.
        """
        self._table = name
        caches = [owner for owner in list(locks._owners) if isinstance(owner, plan_cache.PlanCache)]
        for cache in (kept_plans, *caches) if forgetting else ():
            cache.clear()
        kernels._kernels.clear()
        self._background.clear()
        self._library.golden_notes()
        made: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made["returns"] = _shown(call())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
                made["error"] = f"{type(error).__name__}: {error}"
        steps = self._steps(operands)
        if steps:
            made["launches"] = steps
        if self._background:
            made["background"] = sorted(self._background)
        return json.loads(_CALL_SITE.sub("the call", json.dumps(made).replace(_SUFFIX, "")))

    def _steps(self, operands: Sequence[str]) -> list[str]:
        names: dict[int, str] = {}

        def address(value: int) -> str:
            place = (value >> _OPERAND_BITS) - 1
            if 0 <= place < len(operands) and value < _REAL:
                offset = value - (place + 1 << _OPERAND_BITS)
                return operands[place] + (f"+{offset}" if offset else "")
            # Where in which piece of memory is the allocator's business.
            return names.setdefault(value, f"t{len(names)}")

        steps = []
        for line in self._library.golden_notes().decode().splitlines():
            kind, *fields = line.split()
            if kind == "launch":
                arguments, kernel, stream, text, *group_table = fields
                shown = [kernel, *self._decoded(arguments, bytes.fromhex(text), address)]
                if stream != "0":
                    shown.append(f"stream={stream}")
                groups = bytes.fromhex("".join(group_table))
                size = max(offset + bytes_ for _, offset, bytes_, _ in self._layout["atomr_cutlass_group"])
                pieces = (groups[start : start + size] for start in range(0, len(groups), size))
                shown += [f"[{' '.join(self._decoded('atomr_cutlass_group', piece, address))}]" for piece in pieces]
                steps.append(" ".join(shown))
            else:
                to, size, *more = fields
                more = [address(int(argument, 16)) if kind == "copy" else argument for argument in more]
                steps.append(" ".join((kind, address(int(to, 16)), size, *more)))
        return steps

    def _decoded(self, name: str, args: bytes, address: Callable[[int], str]) -> Iterator[str]:
        """The fields of a struct, but for those that are the GPU's or as usual."""
        gpu = devices.get(0)
        for field, offset, size, kind in self._layout[name]:
            part = args[offset : offset + size]
            usual = _USUAL.get(field, 0)
            if field in ("padding", "settled", "max_active_clusters") or (usual == 0 and not any(part)):
                continue
            if kind == "s":
                each = len(part) // 16
                pieces = [part[i : i + each] for i in range(0, len(part), each)]
                while not any(pieces[-1]):
                    pieces.pop()
                shown = (",".join(self._decoded("atomr_cutlass_tree_operand", piece, address)) for piece in pieces)
                yield f"{field}=({'; '.join(shown)})"
                continue
            value = struct.unpack(_FORMATS[kind, size], part)[0]
            if value == (gpu.multiprocessors if field == "sm_count" else usual):
                continue
            yield f"{field}={address(value) if kind == 'p' else value}"


_FORMATS = {("i", 4): "i", ("i", 8): "q", ("u", 4): "I", ("u", 8): "Q", ("f", 8): "d", ("p", 8): "Q"}
_USUAL = dict.fromkeys(
    ("batch", "split_k", "swizzle", "alpha", "stride_h", "stride_w", "dilation_h", "dilation_w", "slices"), 1
)
"""Fields that are mostly 1, and shown if they are not; of others that is 0."""


def _words(key: KernelKey, name: str) -> str:
    """What the library is told of a kernel: where its arguments lie, and its workspace and name."""
    workspace = 8192 if "stream_k" in key.name else 0
    return " ".join(map(str, (*dataclasses.astuple(fake_kernels.Arguments.of(key)), workspace, name)))


def images(key: KernelKey) -> Images:
    """The images of a kernel: its words."""
    image = _words(key, key.name).encode() + b"\0"
    return Images(image, image)


def _shown(result: Any) -> Any:
    """A result as JSON: of an array its element type and shape."""
    if isinstance(result, (list, tuple)):
        return [_shown(member) for member in result]
    if isinstance(result, dict):
        return {name: _shown(member) for name, member in result.items()}
    if isinstance(result, Array):
        return result.text
    if isinstance(result, np.ndarray):
        return f"host {result.dtype}{list(result.shape)}"
    if hasattr(result, "__dlpack__") and hasattr(result, "dtype"):
        code, bits = result.dtype
        return f"{code}:{bits}{list(result.shape)}"
    return result if isinstance(result, (str, int, float)) or result is None else type(result).__name__


class Array(dlpack_arrays.Array):
    """An array of the GPU: an address, and how elements lie there.

    Attributes:
        text: what it is, for people.
    """

    def __init__(self, place: int, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> None:
        """An array whose first element is `offset` bytes from the place-th address. Strides count elements."""
        numpy_type, element = DTYPES[dtype]
        size = np.dtype(numpy_type).itemsize
        memory: Any = types.SimpleNamespace(
            dtype=np.dtype(numpy_type),
            itemsize=size,
            shape=tuple(shape),
            strides=tuple(stride * size for stride in strides),
        )
        super().__init__(
            memory, device=(2, 0), dtype=element, shape=shape, pointer=(place + 1 << _OPERAND_BITS) + offset
        )
        dense = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        self.text = f"{dtype}[{','.join(map(str, shape))}]"
        self.text += f":{','.join(map(str, strides))}" if list(strides) != dense else ""
        self.text += f"+{offset}" if offset else ""

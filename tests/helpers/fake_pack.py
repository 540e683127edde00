"""Packs and a CUDA driver made by the system's C compiler, for tests without nvcc and without a GPU.

The kernels of such a pack multiply on the host, and the driver's device memory is the host's: everything between
`gemm` and the C ABI runs as it does with a GPU.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from atomr_cutlass import _core
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.seal import seal

ROOT = Path(__file__).resolve().parents[2]

MULTIPLY = """
#include <stdlib.h>
#include <string.h>
#include "atomr_cutlass/kernel_abi.h"

static void multiply(const atomr_cutlass_gemm_args* g, const char* layouts) {
  for (int64_t l = 0; l < g->batch; ++l) {
    const float* a = (const float*)g->a + l * g->batch_stride_a;
    const float* b = (const float*)g->b + l * g->batch_stride_b;
    const float* c = (const float*)g->c + l * g->batch_stride_c;
    float* d = (float*)g->d + l * g->batch_stride_d;
    for (int64_t i = 0; i < g->m; ++i) {
      for (int64_t j = 0; j < g->n; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < g->k; ++k) {
          sum += (double)(layouts[0] == 'r' ? a[i * g->lda + k] : a[i + k * g->lda]) *
                 (double)(layouts[1] == 'r' ? b[k * g->ldb + j] : b[k + j * g->ldb]);
        }
        d[i * g->ldd + j] = (float)(g->alpha * sum + (g->beta != 0 ? g->beta * (double)c[i * g->ldc + j] : 0));
      }
    }
  }
}
"""

PREAMBLE = """

static int supports(const atomr_cutlass_row* row, const void* given) {
  const atomr_cutlass_gemm_args* args = given;
  (void)row;
  return args->m > FAKE_LARGEST_M ? ATOMR_CUTLASS_CANNOT_IMPLEMENT : ATOMR_CUTLASS_OK;
}
static int workspace_size(const atomr_cutlass_row* row, const void* args, uint64_t* bytes) {
  (void)row, (void)args;
  *bytes = FAKE_WORKSPACE;
  return 0;
}
static int prepare(const atomr_cutlass_row* row, const void* args, void* params, atomr_cutlass_launch* launch) {
  (void)row;
  memcpy(params, args, sizeof(atomr_cutlass_gemm_args));
  memset(launch, 0, sizeof(*launch));
  launch->grid[0] = launch->grid[1] = launch->grid[2] = 1;
  launch->clear_bytes = FAKE_WORKSPACE;
  return 0;
}
/* float32, layouts in row->context: "rr", "rc", "cr" or "cc". */
static int launch(const atomr_cutlass_row* row, const void* params, const atomr_cutlass_launch* how, void* stream) {
  const atomr_cutlass_gemm_args* g = params;
  (void)how;
  if (stream == (void*)666) return FAKE_ERROR;
  for (uint64_t i = FAKE_WORKSPACE; i-- > 0;) {
    if (((const char*)g->workspace)[i] != 0) return 1;
    ((char*)g->workspace)[i] = 1;
  }
  multiply(g, row->context);
  return 0;
}
"""

# The image of a kernel of `MULTIPLY` that was "compiled at run time": itself, its companion, and a constant.
CONTENT = '"0123456789abcdef 4.2-0123456789abcdef cc 1"'
"""The rows' facts about source and compiler, as C text."""

JIT = """
#include "atomr_cutlass/jit_abi.h"

const atomr_cutlass_jit_info NAME_info = {LAYOUT_DIGEST, sizeof(atomr_cutlass_gemm_args), 8, 0, 128, {1, 1, 1}, 0};
void NAME(void** arguments) { multiply(arguments[0], LAYOUTS); }
void NAME_evaluate(void** arguments) {
  const atomr_cutlass_gemm_args* problems = *(void**)arguments[0];
  char* results = *(char**)arguments[1];
  uint64_t stride = *(uint64_t*)arguments[2];
  for (int i = 0; i < 2; ++i) {
    atomr_cutlass_jit_evaluation* answer = (void*)(results + i * stride);
    answer->implementable = 1;
    answer->grid[0] = answer->grid[1] = answer->grid[2] = 1;
    memcpy(results + i * stride + ATOMR_CUTLASS_JIT_PARAMS_OFFSET, &problems[i], sizeof(problems[i]));
  }
}
"""

DRIVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t Pointer;
static int context_value;
static _Thread_local void* current;
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  (void)device;
  strncpy(name, "a fake GPU", (size_t)size);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)1 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  (void)device;
  *value = which == 75 ? 8 : which == 76 ? 0 : which == 16 ? 108 : which == 97 ? 166912 : 40 << 20;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { (void)device; *context = &context_value; return 0; }
int cuCtxGetCurrent(void** context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void* context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = current; current = 0; return 0; }
/* Calls that wait for a GPU: allocations and frees, and how many of each were made by a thread that held the GIL. */
int fake_calls[2], fake_calls_with_gil[2];
static void note_call(int which) {
  int (*holds_gil)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  ++fake_calls[which];
  fake_calls_with_gil[which] += holds_gil != 0 && holds_gil();
}
int cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  void* memory = 0;
  if (posix_memalign(&memory, 256, bytes) != 0) return 2;
  note_call(0);
  memset(memory, 0xFF, bytes);
  *pointer = (Pointer)memory;
  return 0;
}
int cuMemFree_v2(Pointer pointer) { note_call(1); free((void*)pointer); return 0; }
int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t n, void* stream) {
  (void)stream;
  memcpy((void*)to, from, n);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t n, void* stream) {
  (void)stream;
  memcpy(to, (void*)from, n);
  return 0;
}
int cuMemsetD8Async(Pointer to, unsigned char value, size_t n, void* stream) {
  (void)stream;
  memset((void*)to, value, n);
  return 0;
}
int cuStreamSynchronize(void* stream) { (void)stream; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { (void)mode; return 0; }
/* The stream 777 is being captured. */
int cuStreamGetCaptureInfo(void* stream, int* state, uint64_t* id) {
  *state = stream == (void*)777;
  *id = 1;
  return 0;
}
int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t n, void* stream) {
  (void)stream;
  memcpy((void*)to, (void*)from, n);
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) { (void)flags; *stream = &context_value; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuEventCreate(void** event, unsigned flags) { (void)flags; *event = &context_value; return 0; }
/* (stream that an event was recorded on, stream that waited for it), in turn; of the latest event. */
uint64_t fake_orders[256][2];
int fake_order_count;
static _Thread_local void* recorded_on;
int cuEventRecord(void* event, void* stream) { (void)event; recorded_on = stream; return 0; }
int cuEventQuery(void* event) { (void)event; return 0; }
int cuEventSynchronize(void* event) { (void)event; return 0; }
int cuStreamGetId(void* stream, unsigned long long* id) {
  *id = (Pointer)stream;
  return stream == (void*)777 ? 900 : 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)event, (void)flags;
  uint64_t* order = fake_orders[fake_order_count++ % 256];
  order[0] = (uint64_t)recorded_on;
  order[1] = (uint64_t)stream;
  return 0;
}
int cuEventDestroy_v2(void* event) { (void)event; return 0; }
/* What is at no address has no device. */
int cuPointerGetAttribute(void* value, int which, Pointer pointer) {
  if (which != 9 || pointer == 0) return 1;
  *(int*)value = 0;
  return 0;
}
/* An image is the path of a shared library, whose functions are the kernels: they are given pointers to arguments. */
int cuLibraryLoadData(void** library, const void* image, int* a, void** b, unsigned c, int* d, void** e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  *library = dlopen(image, RTLD_NOW | RTLD_LOCAL);
  return *library == 0 ? 200 : 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = dlsym(library, name);
  return *kernel == 0 ? 500 : 0;
}
int cuLibraryGetGlobal(Pointer* pointer, size_t* bytes, void* library, const char* name) {
  *pointer = (Pointer)dlsym(library, name);
  *bytes = strstr(name, "_info") ? 40 : 0;
  return *pointer == 0 ? 500 : 0;
}
int cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return 0; }
int cuFuncSetAttribute(void* function, int which, int value) { (void)function, (void)which, (void)value; return 0; }
int cuOccupancyMaxActiveClusters(int* count, void* function, const void* config) {
  (void)function, (void)config;
  *count = 1;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int threads, size_t shared) {
  (void)function, (void)threads, (void)shared;
  *count = 1;
  return 0;
}
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
  (void)config, (void)extra;
  ((void (*)(void**))function)(arguments);
  return 0;
}
int cuTensorMapEncodeTiled(void) { return 1; }
int cuTensorMapEncodeIm2col(void) { return 1; }
int cuTensorMapReplaceAddress(void) { return 1; }
int cuGetErrorName(int status, const char** text) {
  *text = status == 700 ? "ILLEGAL_ADDRESS" : "SOME_ERROR";
  return 0;
}
int cuGetErrorString(int status, const char** text) { (void)status; *text = "what the driver says"; return 0; }
"""


def compiler() -> str:
    """The system's C compiler."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("there is no C compiler to make a pack with")
    return found


def compile_library(source: str, library: Path) -> Path:
    """Compiles C text into a shared library, with every warning an error."""
    text = library.with_suffix(".c")
    text.write_text(source)
    include = ROOT / "cpp" / "include"
    flags = [
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-unused-function",
        "-Werror",
        "-shared",
        "-fPIC",
        f"-I{include}",
        f"-DLAYOUT_DIGEST={_core.LAYOUT_DIGEST}ull",
    ]
    process = subprocess.run(
        [compiler(), *flags, "-o", str(library), str(text)], capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, process.stderr
    # As a pack is; to others that makes no difference.
    library.write_bytes(seal(library.read_bytes(), {"name": "fake", "kernels": []}))
    library.chmod(0o755)
    return library


def exported(count: int, name: str = "fake", abi: str = "ATOMR_CUTLASS_ABI_VERSION") -> str:
    """The C text that exports a pack of the rows in `rows`, with the layout that `_core` was built with."""
    return (
        "static const atomr_cutlass_pack pack = "
        f"{{{abi}, 0, LAYOUT_DIGEST, 0, {json.dumps(name)}, rows, {count}, 0}};\n"
        "const atomr_cutlass_pack* atomr_cutlass_pack_v1(void);\n"
        "const atomr_cutlass_pack* atomr_cutlass_pack_v1(void) { return &pack; }\n"
    )


def make_pack(
    library: Path,
    rows: Sequence[tuple[str, str, str]] | Sequence[KernelKey],
    *,
    name: str = "fake",
    abi: str = "ATOMR_CUTLASS_ABI_VERSION",
    workspace: int = 0,
    largest_m: int = 2**31 - 1,
    error: int = 1,
) -> Path:
    """A pack of rows, each a key or (name, key as JSON, layouts of A and B)."""
    source = f"#define FAKE_WORKSPACE {workspace}ull\n#define FAKE_LARGEST_M {largest_m}\n#define FAKE_ERROR {error}\n"
    source += MULTIPLY + PREAMBLE
    listed = [row if isinstance(row, tuple) else (row.name, row.to_json(), row.layout_a + row.layout_b) for row in rows]
    for i, (row_name, key, layouts) in enumerate(listed):
        source += (
            f"static const atomr_cutlass_row row_{i} = {{{json.dumps(row_name)}, {json.dumps(key)}, {CONTENT}, "
            "sizeof(atomr_cutlass_gemm_args), 16, 1024, 128, 0, 13000, "
            f"{json.dumps(layouts)}, supports, workspace_size, prepare, launch}};\n"
        )
    entries = ", ".join(f"&row_{i}" for i in range(len(listed)))
    source += f"static const atomr_cutlass_row* const rows[] = {{{entries or 'NULL'}}};\n"
    return compile_library(source + exported(len(listed), name, abi), library)


def compile_at_run_time(folder: Path, key: KernelKey) -> bytes:
    """The image of a kernel, and of its companion, for the driver of `make_driver`."""
    define = f"#define NAME {key.name}\n#define NAME_evaluate {key.name}_evaluate\n#define NAME_info {key.name}_info\n"
    define += f'#define LAYOUTS "{key.layout_a}{key.layout_b}"\n'
    return str(compile_library(define + MULTIPLY + JIT, folder / f"{key.name}.so")).encode() + b"\0"


def make_driver(folder: Path, *, major: int = 8) -> Path:
    """A folder with a libcuda.so.1 of one GPU of compute capability `major`.0, whose memory is the host's."""
    folder.mkdir()
    compile_library(DRIVER.replace("which == 75 ? 8", f"which == 75 ? {major}"), folder / "libcuda.so.1")
    return folder

"""A CUDA driver made by the system's C compiler, for tests without nvcc and without a GPU.

The driver's device memory is the host's, as its kernels (`fake_kernels`) compute on the host: everything between `gemm`
and the C ABI runs as it does with a GPU.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from atomr_cutlass import _core
from atomr_cutlass.generator.seal import seal

ROOT = Path(__file__).resolve().parents[2]

CONTENT = '"0123456789abcdef 4.2-0123456789abcdef cc 1"'
"""The rows' facts about source and compiler, as C text."""

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
  *value = which == 75 ? 8 : which == 76 ? 0 : which == 16 ? 108 : which == 97 ? 166912 : which == 38 ? 40 << 20 : 0;
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
/* CUDA_ERROR_INVALID_CONTEXT for a thread without a current context. */
int cuCtxGetDevice(int* device) { *device = 0; return current == 0 ? 201 : 0; }
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


def make_driver(folder: Path, *, major: int = 8) -> Path:
    """A folder with a libcuda.so.1 of one GPU of compute capability `major`.0, whose memory is the host's."""
    folder.mkdir()
    compile_library(DRIVER.replace("which == 75 ? 8", f"which == 75 ? {major}"), folder / "libcuda.so.1")
    return folder

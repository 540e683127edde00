#include "driver.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

#include "errors.h"

namespace atomr_cutlass {
namespace {

// Values of the driver's ABI (cuda.h).
constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeL2 = 38;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSharedOptin = 97;
constexpr int kCaptureRelaxed = 2;
constexpr int kCaptureActive = 1;

struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_name)(char*, int, int) = nullptr;
  int (*device_memory)(size_t*, int) = nullptr;
  int (*device_attribute)(int*, int, int) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*current)(void**) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int (*allocate)(DevicePointer*, size_t) = nullptr;
  int (*release)(DevicePointer) = nullptr;
  int (*to_device)(DevicePointer, void const*, size_t, void*) = nullptr;
  int (*to_host)(void*, DevicePointer, size_t, void*) = nullptr;
  int (*clear)(DevicePointer, unsigned char, size_t, void*) = nullptr;
  int (*synchronize)(void*) = nullptr;
  int (*synchronize_context)() = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
  int (*capture_info)(void*, int*, uint64_t*) = nullptr;
  int (*error_name)(int, char const**) = nullptr;
  int (*error_string)(int, char const**) = nullptr;
  std::string problem;  // why it can't be used; empty when it can
};

template <class Function>
void resolve(void* library, Driver& driver, Function*& target, char const* symbol) {
  target = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (target == nullptr && driver.problem.empty()) {
    driver.problem = std::string("the NVIDIA driver lacks ") + symbol + ": update it";
  }
}

Driver load() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.problem = "no NVIDIA driver: libcuda.so.1 was not found";
    return driver;
  }
  resolve(library, driver, driver.init, "cuInit");
  resolve(library, driver, driver.version, "cuDriverGetVersion");
  resolve(library, driver, driver.device_count, "cuDeviceGetCount");
  resolve(library, driver, driver.device_get, "cuDeviceGet");
  resolve(library, driver, driver.device_name, "cuDeviceGetName");
  resolve(library, driver, driver.device_memory, "cuDeviceTotalMem_v2");
  resolve(library, driver, driver.device_attribute, "cuDeviceGetAttribute");
  resolve(library, driver, driver.retain, "cuDevicePrimaryCtxRetain");
  resolve(library, driver, driver.current, "cuCtxGetCurrent");
  resolve(library, driver, driver.push, "cuCtxPushCurrent_v2");
  resolve(library, driver, driver.pop, "cuCtxPopCurrent_v2");
  resolve(library, driver, driver.allocate, "cuMemAlloc_v2");
  resolve(library, driver, driver.release, "cuMemFree_v2");
  resolve(library, driver, driver.to_device, "cuMemcpyHtoDAsync_v2");
  resolve(library, driver, driver.to_host, "cuMemcpyDtoHAsync_v2");
  resolve(library, driver, driver.clear, "cuMemsetD8Async");
  resolve(library, driver, driver.synchronize, "cuStreamSynchronize");
  resolve(library, driver, driver.synchronize_context, "cuCtxSynchronize");
  resolve(library, driver, driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  resolve(library, driver, driver.capture_info, "cuStreamGetCaptureInfo");
  resolve(library, driver, driver.error_name, "cuGetErrorName");
  resolve(library, driver, driver.error_string, "cuGetErrorString");
  if (!driver.problem.empty()) return driver;
  int status = driver.init(0);
  int count = 0;
  if (status == 0) status = driver.device_count(&count);
  if (status != 0) {
    char const* text = nullptr;
    driver.error_string(status, &text);
    driver.problem = std::string("the CUDA driver does not start: ") + (text != nullptr ? text : "unknown error");
  } else if (count == 0) {
    driver.problem = "the driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)";
  }
  return driver;
}

Driver const& driver_state() {
  static Driver const driver = load();
  return driver;
}

Driver const& driver() {
  Driver const& state = driver_state();
  if (!state.problem.empty()) throw DeviceUnavailable(state.problem);
  return state;
}

void check(int status, char const* doing) {
  if (status != 0) throw_cuda(status, doing);
}

// Errors after which every call on the context fails (CUDA driver API, CUresult).
bool sticky(int status) {
  switch (status) {
    case 214:  // ECC uncorrectable
    case 700:  // illegal address
    case 702:  // launch timeout
    case 710:  // assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
      return true;
    default: return false;
  }
}

int attribute(int which, int device) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "reading a device attribute");
  return value;
}

void* primary_context(int device) {
  static std::mutex mutex;
  static std::vector<void*> contexts;
  std::lock_guard<std::mutex> lock(mutex);
  if (device < 0 || device >= device_count()) {
    throw DeviceUnavailable("there is no GPU " + std::to_string(device) + ": " + std::to_string(device_count()) +
                            " visible");
  }
  if (contexts.size() <= size_t(device)) contexts.resize(size_t(device) + 1, nullptr);
  if (contexts[size_t(device)] == nullptr) {
    // Retained for the process's life: frameworks hold the same primary context.
    check(driver().retain(&contexts[size_t(device)], device), "retaining the primary context");
  }
  return contexts[size_t(device)];
}

}  // namespace

void throw_cuda(int status, std::string const& doing) {
  char const* name = nullptr;
  char const* text = nullptr;
  driver().error_name(status, &name);
  driver().error_string(status, &text);
  std::string const message = doing + ": " + (name != nullptr ? name : std::to_string(status)) + " (" +
                              (text != nullptr ? text : "unknown error") + ")";
  if (sticky(status)) {
    throw ContextPoisoned(message + "; the CUDA context can no longer be used: restart the process");
  }
  throw LibraryFailure("cuda", message);
}

bool driver_available(std::string* reason) {
  Driver const& state = driver_state();
  if (reason != nullptr) *reason = state.problem;
  return state.problem.empty();
}

int driver_version() {
  int version = 0;
  check(driver().version(&version), "reading the driver's version");
  return version;
}

int device_count() {
  static int const count = [] {
    int value = 0;
    check(driver().device_count(&value), "counting the GPUs");
    return value;
  }();
  return count;
}

DeviceProperties device_properties(int device) {
  if (device < 0 || device >= device_count()) {
    throw DeviceUnavailable("there is no GPU " + std::to_string(device) + ": " + std::to_string(device_count()) +
                            " visible");
  }
  DeviceProperties result;
  char name[256] = {};
  check(driver().device_name(name, sizeof(name), device), "reading a device's name");
  result.name = name;
  size_t bytes = 0;
  check(driver().device_memory(&bytes, device), "reading a device's memory size");
  result.memory_bytes = bytes;
  result.major = attribute(kAttributeMajor, device);
  result.minor = attribute(kAttributeMinor, device);
  result.multiprocessors = attribute(kAttributeMultiprocessors, device);
  result.shared_memory_per_block = attribute(kAttributeSharedOptin, device);
  result.l2_bytes = attribute(kAttributeL2, device);
  return result;
}

DeviceGuard::DeviceGuard(int device) {
  void* const wanted = primary_context(device);
  void* current = nullptr;
  check(driver().current(&current), "reading the current context");
  if (current != wanted) {
    check(driver().push(wanted), "making a device current");
    pushed_ = true;
  }
}

DeviceGuard::~DeviceGuard() {
  void* context = nullptr;
  if (pushed_) driver().pop(&context);
}

DevicePointer allocate(size_t bytes) {
  // An allocation in the default capture mode would invalidate a capture under way anywhere in the process.
  int mode = kCaptureRelaxed;
  check(driver().exchange_capture_mode(&mode), "changing the capture mode");
  DevicePointer pointer = 0;
  int const status = driver().allocate(&pointer, bytes);
  driver().exchange_capture_mode(&mode);
  check(status, "allocating device memory");
  return pointer;
}

void release(DevicePointer pointer) noexcept {
  int mode = kCaptureRelaxed;
  driver_state().exchange_capture_mode(&mode);
  driver_state().release(pointer);
  driver_state().exchange_capture_mode(&mode);
}

void copy_to_device(DevicePointer to, void const* from, size_t bytes, void* stream) {
  check(driver().to_device(to, from, bytes, stream), "copying to the device");
}

void copy_to_host(void* to, DevicePointer from, size_t bytes, void* stream) {
  check(driver().to_host(to, from, bytes, stream), "copying to the host");
}

void clear_async(DevicePointer pointer, size_t bytes, void* stream) {
  check(driver().clear(pointer, 0, bytes, stream), "clearing device memory");
}

void synchronize(void* stream) { check(driver().synchronize(stream), "waiting for a stream"); }

void synchronize_device() noexcept { driver_state().synchronize_context(); }

uint64_t capture_id(void* stream) {
  int state = 0;
  uint64_t id = 0;
  check(driver().capture_info(stream, &state, &id), "asking whether a stream is capturing");
  return state == kCaptureActive ? id : 0;
}

}  // namespace atomr_cutlass

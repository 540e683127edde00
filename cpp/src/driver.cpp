#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "atomr_cutlass/small_tensor_map.h"
#include "errors.h"

namespace atomr_cutlass {
namespace {

// Values of the driver's ABI (cuda.h).
constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeMemoryClock = 36;  // kHz
constexpr int kAttributeMemoryBits = 37;
constexpr int kAttributeL2 = 38;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSharedOptin = 97;
constexpr int kCaptureRelaxed = 2;
constexpr int kCaptureActive = 1;
constexpr int kPointerDeviceOrdinal = 9;
constexpr unsigned kEventFlags = 1 | 2;  // blocking waits; no timing
constexpr std::chrono::microseconds kAskingInsteadOfSleeping{50};
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kFunctionMaxSharedBytes = 8;
constexpr unsigned kLaunchClusterDimension = 4;
constexpr unsigned kLaunchProgrammaticSerialization = 6;

struct LaunchAttribute {  // CUlaunchAttribute
  unsigned id;
  unsigned pad;
  union {
    unsigned cluster[3];
    int allowed;
    char bytes[64];
  } value;
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

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
  int (*copy_device)(DevicePointer, DevicePointer, size_t, void*) = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*context_device)(int*) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*event_query)(void*) = nullptr;
  int (*event_synchronize)(void*) = nullptr;
  int (*stream_wait)(void*, void*, unsigned) = nullptr;
  int (*stream_id)(void*, unsigned long long*) = nullptr;  // from CUDA 12.0 on
  int (*event_destroy)(void*) = nullptr;
  int (*pointer_attribute)(void*, int, DevicePointer) = nullptr;
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
  resolve(library, driver, driver.copy_device, "cuMemcpyDtoDAsync_v2");
  resolve(library, driver, driver.stream_create, "cuStreamCreate");
  resolve(library, driver, driver.context_device, "cuCtxGetDevice");
  resolve(library, driver, driver.event_create, "cuEventCreate");
  resolve(library, driver, driver.event_record, "cuEventRecord");
  resolve(library, driver, driver.event_query, "cuEventQuery");
  resolve(library, driver, driver.event_synchronize, "cuEventSynchronize");
  resolve(library, driver, driver.stream_wait, "cuStreamWaitEvent");
  driver.stream_id = reinterpret_cast<decltype(driver.stream_id)>(dlsym(library, "cuStreamGetId"));
  resolve(library, driver, driver.event_destroy, "cuEventDestroy_v2");
  resolve(library, driver, driver.pointer_attribute, "cuPointerGetAttribute");
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

// CUDA does not survive a fork: a child that used its parent's context would hang or crash.
std::atomic<bool> forked{false};
constexpr char kForked[] = "CUDA was used before this process was forked: start workers with the spawn method";

Driver const& driver_state() {
  static Driver const driver = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return load();
  }();
  return driver;
}

Driver const& driver() {
  Driver const& state = driver_state();
  if (!state.problem.empty()) throw DeviceUnavailable(state.problem);
  if (forked) throw DeviceUnavailable(kForked);
  return state;
}

// The functions that launch code compiled at run time. An older driver lacks them, but runs prebuilt kernels.
struct LibraryDriver {
  int (*load)(void**, void const*, int*, void**, unsigned, int*, void**, unsigned) = nullptr;
  int (*kernel)(void**, void*, char const*) = nullptr;
  int (*global)(DevicePointer*, size_t*, void*, char const*) = nullptr;
  int (*function)(void**, void*) = nullptr;
  int (*set_attribute)(void*, int, int) = nullptr;
  int (*active_clusters)(int*, void*, LaunchConfig const*) = nullptr;
  int (*active_blocks)(int*, void*, int, size_t) = nullptr;
  int (*launch)(LaunchConfig const*, void*, void**, void**) = nullptr;
  int (*encode_tiled)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*,
                      int, int, int, int) = nullptr;
  int (*encode_im2col)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, int const*, int const*, uint32_t,
                       uint32_t, uint32_t const*, int, int, int, int) = nullptr;
  int (*replace_address)(void*, void*) = nullptr;
};

LibraryDriver const& library_driver() {
  driver();
  static Driver problem;
  static LibraryDriver const state = [] {
    LibraryDriver found;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    resolve(library, problem, found.load, "cuLibraryLoadData");
    resolve(library, problem, found.kernel, "cuLibraryGetKernel");
    resolve(library, problem, found.global, "cuLibraryGetGlobal");
    resolve(library, problem, found.function, "cuKernelGetFunction");
    resolve(library, problem, found.set_attribute, "cuFuncSetAttribute");
    resolve(library, problem, found.active_clusters, "cuOccupancyMaxActiveClusters");
    resolve(library, problem, found.active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    resolve(library, problem, found.launch, "cuLaunchKernelEx");
    resolve(library, problem, found.encode_tiled, "cuTensorMapEncodeTiled");
    resolve(library, problem, found.encode_im2col, "cuTensorMapEncodeIm2col");
    resolve(library, problem, found.replace_address, "cuTensorMapReplaceAddress");
    return found;
  }();
  if (!problem.problem.empty()) throw DeviceUnavailable(problem.problem);
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
  static auto& contexts = *new std::vector<std::atomic<void*>>(size_t(device_count()));
  if (device < 0 || device >= device_count()) {
    throw DeviceUnavailable("there is no GPU " + std::to_string(device) + ": " + std::to_string(device_count()) +
                            " visible");
  }
  std::atomic<void*>& context = contexts[size_t(device)];
  if (void* const known = context.load(std::memory_order_acquire)) return known;
  std::lock_guard<std::mutex> lock(mutex);
  if (context == nullptr) {
    // Retained for the process's life: frameworks hold the same primary context.
    void* retained = nullptr;
    check(driver().retain(&retained, device), "retaining the primary context");
    context.store(retained, std::memory_order_release);
  }
  return context;
}

// A framework may allocate without a driver: nothing is captured then.
void exchange_capture_mode(int& mode) {
  Driver const& state = driver_state();
  if (state.exchange_capture_mode != nullptr) state.exchange_capture_mode(&mode);
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
  bool const lost = state.problem.empty() && forked;
  if (reason != nullptr) *reason = lost ? kForked : state.problem;
  return state.problem.empty() && !lost;
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
  // Two transfers per clock, as in all types of GPU memory to date.
  result.memory_bytes_per_second =
      uint64_t(2000) * attribute(kAttributeMemoryClock, device) * attribute(kAttributeMemoryBits, device) / 8;
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

CaptureRelaxed::CaptureRelaxed() : mode_(kCaptureRelaxed) { exchange_capture_mode(mode_); }

CaptureRelaxed::~CaptureRelaxed() { exchange_capture_mode(mode_); }

DevicePointer allocate(size_t bytes) {
  DevicePointer pointer = 0;
  driver();
  CaptureRelaxed relaxed;
  check(driver().allocate(&pointer, bytes), "allocating device memory");
  return pointer;
}

void release(DevicePointer pointer) noexcept {
  CaptureRelaxed relaxed;
  driver_state().release(pointer);
}

void copy_to_device(DevicePointer to, void const* from, size_t bytes, void* stream) {
  check(driver().to_device(to, from, bytes, stream), "copying to the device");
}

void copy_bytes(DevicePointer to, std::vector<unsigned char> bytes, void* stream) {
  // From pageable memory the driver has read the bytes when it returns, unless it records the copy in a graph, which
  // reads them at each replay; and the end of a graph's life is unknown.
  if (capture_id(stream) == 0) {
    copy_to_device(to, bytes.data(), bytes.size(), stream);
    return;
  }
  static std::mutex mutex;
  static auto& kept = *new std::list<std::vector<unsigned char>>();
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(bytes));
  copy_to_device(to, kept.back().data(), kept.back().size(), stream);
}

void copy_to_host(void* to, DevicePointer from, size_t bytes, void* stream) {
  check(driver().to_host(to, from, bytes, stream), "copying to the host");
}

void clear_async(DevicePointer pointer, size_t bytes, void* stream, unsigned char value) {
  check(driver().clear(pointer, value, bytes, stream), "clearing device memory");
}

void synchronize(void* stream) { check(driver().synchronize(stream), "waiting for a stream"); }

void synchronize_device() { check(driver().synchronize_context(), "waiting for the device"); }

void copy_on_device(DevicePointer to, DevicePointer from, size_t bytes, void* stream) {
  check(driver().copy_device(to, from, bytes, stream), "copying on the device");
}

int current_device() {
  int device = 0;
  check(driver().context_device(&device), "asking for the current device");
  return device;
}

void* create_stream() {
  void* stream = nullptr;
  driver();
  CaptureRelaxed relaxed;
  check(driver().stream_create(&stream, kStreamNonBlocking), "creating a stream");
  return stream;
}

Event::~Event() {
  if (event_ != nullptr && !forked) driver_state().event_destroy(event_);
}

Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

void Event::record(void* stream) {
  if (event_ == nullptr) {
    CaptureRelaxed relaxed;
    check(driver().event_create(&event_, kEventFlags), "creating an event");
  }
  check(driver().event_record(event_, stream), "recording an event");
}

bool Event::done() const noexcept {
  if (event_ == nullptr || forked) return true;
  CaptureRelaxed relaxed;
  int const status = driver_state().event_query(event_);
  return status == 0 || sticky(status);
}

void Event::wait() const {
  if (event_ == nullptr) return;
  CaptureRelaxed relaxed;
  auto const begin = std::chrono::steady_clock::now();
  // A wake-up takes longer than most small kernels: poll at first.
  while (std::chrono::steady_clock::now() - begin < kAskingInsteadOfSleeping) {
    if (done()) break;
  }
  check(driver().event_synchronize(event_), "waiting for an event");
}

void Event::hold(void* stream) const {
  if (event_ != nullptr) check(driver().stream_wait(stream, event_, 0), "having a stream wait");
}

void* load_library(void const* image) {
  LibraryDriver const& api = library_driver();
  CaptureRelaxed relaxed;
  void* library = nullptr;
  check(api.load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0), "loading a compiled kernel");
  return library;
}

void* library_kernel(void* library, char const* name) {
  void* kernel = nullptr;
  check(library_driver().kernel(&kernel, library, name), "finding a compiled kernel");
  return kernel;
}

DevicePointer library_global(void* library, char const* name, size_t bytes) {
  DevicePointer pointer = 0;
  size_t size = 0;
  LibraryDriver const& api = library_driver();
  CaptureRelaxed relaxed;
  check(api.global(&pointer, &size, library, name), "finding a constant of a compiled kernel");
  if (size != bytes) {
    throw LibraryFailure("jit", std::string(name) + " has " + std::to_string(size) + " bytes, not " +
                                    std::to_string(bytes) + ": " + kOneBuild);
  }
  return pointer;
}

void* kernel_function(void* kernel) {
  void* function = nullptr;
  LibraryDriver const& api = library_driver();
  CaptureRelaxed relaxed;
  check(api.function(&function, kernel), "loading a kernel on the device");
  return function;
}

void allow_shared_memory(void* function, uint32_t bytes) {
  check(library_driver().set_attribute(function, kFunctionMaxSharedBytes, int(bytes)),
        "asking for a kernel's shared memory");
}

namespace {

using LaunchAttributes = LaunchAttribute[2];

LaunchConfig launch_config(LaunchShape const& shape, LaunchAttributes& attributes, void* stream) {
  unsigned count = 0;
  // GPUs before sm_90 know no clusters and refuse the attribute.
  if (shape.cluster[0] * shape.cluster[1] * shape.cluster[2] > 1) {
    LaunchAttribute& attribute = attributes[count++] = {};
    attribute.id = kLaunchClusterDimension;
    for (int i = 0; i < 3; ++i) attribute.value.cluster[i] = shape.cluster[i];
  }
  if (shape.dependent) {
    LaunchAttribute& attribute = attributes[count++] = {};
    attribute.id = kLaunchProgrammaticSerialization;
    attribute.value.allowed = 1;
  }
  return {{shape.grid[0], shape.grid[1], shape.grid[2]},
          {shape.block, 1, 1},
          shape.shared_bytes,
          stream,
          attributes,
          count};
}

}  // namespace

int max_active_clusters(void* function, LaunchShape const& shape) {
  LibraryDriver const& api = library_driver();
  int count = 0;
  if (shape.cluster[0] * shape.cluster[1] * shape.cluster[2] > 1) {
    LaunchAttributes attributes;
    LaunchConfig const config = launch_config(shape, attributes, nullptr);
    check(api.active_clusters(&count, function, &config), "asking how many clusters fit");
  } else {
    check(api.active_blocks(&count, function, int(shape.block), shape.shared_bytes), "asking how many blocks fit");
    count *= attribute(kAttributeMultiprocessors, current_device());
  }
  return count;
}

int launch_function(void* function, LaunchShape const& shape, void** arguments, void* stream) noexcept {
  static LibraryDriver const& api = library_driver();
  LaunchAttributes attributes;
  LaunchConfig const config = launch_config(shape, attributes, stream);
  return api.launch(&config, function, arguments, nullptr);
}

void encode_tensor_map(void* map, atomr_cutlass_tensor_map_request const& request) {
  LibraryDriver const& api = library_driver();
  void* const address = reinterpret_cast<void*>(request.address);
  uint32_t box[5], steps[5];
  for (int i = 0; i < 5; ++i) {
    box[i] = request.box[i];
    steps[i] = request.element_strides[i];
  }
  if (request.kind == ATOMR_CUTLASS_TENSOR_MAP_TILED) {
    check(api.encode_tiled(map, request.type, request.rank, address, request.dims, request.strides, box, steps,
                           request.interleave, request.swizzle, request.promotion, request.fill),
          "encoding a tensor map");
  } else {
    int const lower[] = {request.lower[0], request.lower[1], request.lower[2]};
    int const upper[] = {request.upper[0], request.upper[1], request.upper[2]};
    check(
        api.encode_im2col(map, request.type, request.rank, address, request.dims, request.strides, lower, upper, box[0],
                          box[1], steps, request.interleave, request.swizzle, request.promotion, request.fill),
        "encoding a tensor map");
  }
  if (attribute(kAttributeMajor, current_device()) >= 10) {
    correct_small_tensor_map(map, request.type, request.rank, request.dims, request.strides);
  }
}

void move_tensor_map(void* map, uint64_t address) {
  static LibraryDriver const& api = library_driver();
  check(api.replace_address(map, reinterpret_cast<void*>(address)), "moving a tensor map");
}

uint64_t stream_id(void* stream) {
  unsigned long long id = 0;
  if (driver().stream_id == nullptr) return reinterpret_cast<uint64_t>(stream);
  check(driver().stream_id(stream, &id), "asking which stream it is");
  return id;
}

bool is_legacy(void* stream) noexcept { return reinterpret_cast<uintptr_t>(stream) <= 1; }

bool process_forked() noexcept { return forked; }

namespace {

constexpr uint64_t kNoWork = ~uint64_t(0);  // stands for a stream that accepts no work now

}  // namespace

uint64_t capture_id(void* stream) {
  // What the legacy default stream answers while a stream that waits for it is captured
  // (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT).
  constexpr int kCaptureImplicit = 906;
  int state = 0;
  uint64_t id = 0;
  int const status = driver().capture_info(stream, &state, &id);
  if (status == kCaptureImplicit) return kNoWork;
  check(status, "asking whether a stream is capturing");
  return state == kCaptureActive ? id : 0;
}

void order_streams(void* before, void* after, bool fork) {
  if (before == after || (is_legacy(before) && is_legacy(after))) return;
  uint64_t const from = capture_id(before), to = capture_id(after);
  if (from == kNoWork || (from != to && !(fork && to == 0))) return;
  Event reached;
  reached.record(before);
  reached.hold(after);
}

int pointer_device(DevicePointer pointer) {
  constexpr int kInvalidValue = 1, kInvalidContext = 201;
  int device = 0;
  int status = driver().pointer_attribute(&device, kPointerDeviceOrdinal, pointer);
  if (status == kInvalidContext) {  // no framework has made one current in this thread
    DeviceGuard guard(0);
    status = driver().pointer_attribute(&device, kPointerDeviceOrdinal, pointer);
  }
  if (status == kInvalidValue) {
    throw InvalidOperand("there is no GPU memory at address " + std::to_string(pointer) +
                         ": give an array that is on a GPU and has not been freed");
  }
  check(status, "asking which GPU memory is of");
  return device;
}

}  // namespace atomr_cutlass

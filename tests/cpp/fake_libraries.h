// Stands in for the dynamic loader, so that a test says which libraries there are: a driver without a GPU, a driver
// whose device memory is the host's, or packs. Include it in one source of an executable: it defines dlopen and its
// companions.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake {

using Symbols = std::map<std::string, void*>;

inline std::map<std::string, Symbols>& libraries() {
  static std::map<std::string, Symbols> instance;
  return instance;
}

template <class Function>
void* symbol(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Work on a stream: a clear, a copy from the host, or what a test's kernel says of itself.
struct Work {
  enum class Kind { kClear, kCopy, kKernel } kind;
  uint64_t target;
  void const* source;
  size_t bytes;
  void* stream;
};

// What the fake driver was asked for, and what it answers.
struct Device {
  int count = 1;
  int version = 13000;
  int major = 9;  // of the compute capability
  int init_status = 0;
  std::atomic<int> allocations{0}, frees{0};
  std::atomic<int> clears{0};
  bool capturing = false;
  uint64_t capture = 77;  // id of the capture
  bool busy = false;  // recorded events are not reached
  static inline thread_local void* current = nullptr;
  static inline thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
  std::atomic<uint64_t> incarnation{0};  // streams made from now on have the handles of others, but ids of their own
  std::atomic<int> waits{0};  // of streams for events
  int wait_status = 0, synchronize_status = 0;
  std::atomic<int> events{0};
  std::atomic<int> records{0};
  std::mutex mutex;
  std::vector<Work> work;  // in order
  void* created = nullptr;  // the stream that was made last
  int launches = 0, tensor_maps = 0;
  // What a launch does: (function, arguments).
  void (*launch)(void*, void**) = nullptr;
};

inline Device& device() {
  static Device instance;
  return instance;
}

inline void note(Work const& one) {
  std::lock_guard<std::mutex> lock(device().mutex);
  device().work.push_back(one);
}

// Work on the callers' streams: new workspaces are cleared on one that the runtime makes.
inline std::vector<Work> called() {
  std::vector<Work> found;
  for (Work const& one : device().work) {
    if (device().created == nullptr || one.stream != device().created) found.push_back(one);
  }
  return found;
}

inline Symbols driver() {
  using Pointer = uint64_t;
  static int context;
  return {
      {"cuInit", symbol(+[](unsigned) { return device().init_status; })},
      {"cuDriverGetVersion", symbol(+[](int* version) { return *version = device().version, 0; })},
      {"cuDeviceGetCount", symbol(+[](int* count) { return *count = device().count, 0; })},
      {"cuDeviceGet", symbol(+[](int* made, int ordinal) { return *made = ordinal, 0; })},
      {"cuDeviceGetName", symbol(+[](char* name, int, int) { return std::strcpy(name, "a fake GPU"), 0; })},
      {"cuDeviceTotalMem_v2", symbol(+[](size_t* bytes, int) { return *bytes = size_t(1) << 30, 0; })},
      {"cuDeviceGetAttribute",
       symbol(+[](int* value, int which, int) { return *value = which == 75 ? device().major : which, 0; })},
      {"cuDevicePrimaryCtxRetain", symbol(+[](void** made, int) { return *made = &context, 0; })},
      {"cuCtxGetCurrent", symbol(+[](void** current) { return *current = device().current, 0; })},
      {"cuCtxPushCurrent_v2", symbol(+[](void* wanted) { return device().current = wanted, 0; })},
      {"cuCtxPopCurrent_v2",
       symbol(+[](void** popped) { return *popped = device().current, device().current = nullptr, 0; })},
      {"cuMemAlloc_v2", symbol(+[](Pointer* made, size_t bytes) {
         *made = reinterpret_cast<Pointer>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
         return ++device().allocations, 0;
       })},
      {"cuMemFree_v2", symbol(+[](Pointer pointer) {
         std::free(reinterpret_cast<void*>(pointer));
         return ++device().frees, 0;
       })},
      {"cuMemcpyHtoDAsync_v2", symbol(+[](Pointer to, void const* from, size_t bytes, void* stream) {
         note({Work::Kind::kCopy, to, from, bytes, stream});
         if (!device().capturing) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
         return 0;
       })},
      {"cuMemcpyDtoHAsync_v2", symbol(+[](void* to, Pointer from, size_t bytes, void*) {
         return std::memcpy(to, reinterpret_cast<void*>(from), bytes), 0;
       })},
      {"cuMemsetD8Async", symbol(+[](Pointer to, unsigned char value, size_t bytes, void* stream) {
         note({Work::Kind::kClear, to, nullptr, bytes, stream});
         std::memset(reinterpret_cast<void*>(to), value, bytes);
         return ++device().clears, 0;
       })},
      {"cuStreamSynchronize", symbol(+[](void*) { return 0; })},
      {"cuCtxSynchronize", symbol(+[]() { return device().synchronize_status; })},
      {"cuThreadExchangeStreamCaptureMode",
       symbol(+[](int* mode) { return std::swap(*mode, device().capture_mode), 0; })},
      {"cuStreamGetCaptureInfo", symbol(+[](void*, int* state, uint64_t* id) {
         return *state = device().capturing ? 1 : 0, *id = device().capture, 0;
       })},
      {"cuMemcpyDtoDAsync_v2", symbol(+[](Pointer to, Pointer from, size_t bytes, void*) {
         return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0;
       })},
      {"cuStreamCreate", symbol(+[](void** made, unsigned) { return *made = device().created = &context, 0; })},
      {"cuCtxGetDevice", symbol(+[](int* index) { return *index = 0, 0; })},
      {"cuEventCreate", symbol(+[](void** made, unsigned) { return *made = &context, ++device().events, 0; })},
      {"cuEventRecord", symbol(+[](void*, void*) { return ++device().records, 0; })},
      {"cuEventQuery", symbol(+[](void*) { return device().busy ? 600 : 0; })},
      {"cuEventSynchronize", symbol(+[](void*) { return 0; })},
      {"cuStreamGetId", symbol(+[](void* stream, unsigned long long* id) {
         *id = reinterpret_cast<uint64_t>(stream) + 1000 + 1000000 * device().incarnation;
         return device().capturing ? 900 : 0;
       })},
      {"cuStreamWaitEvent", symbol(+[](void*, void*, unsigned) { return ++device().waits, device().wait_status; })},
      {"cuEventDestroy_v2", symbol(+[](void*) { return --device().events, 0; })},
      {"cuPointerGetAttribute", symbol(+[](void* value, int, Pointer) { return *static_cast<int*>(value) = 0, 0; })},
      {"cuGetErrorName", symbol(+[](int, char const** text) { return *text = "SOME_ERROR", 0; })},
      {"cuGetErrorString", symbol(+[](int, char const** text) { return *text = "what the driver says", 0; })},
  };
}

// What launches code compiled at run time. A "library" is its image, and a kernel in it is named by its first letters.
inline Symbols library_driver() {
  using Pointer = uint64_t;
  return {
      {"cuLibraryLoadData", symbol(+[](void** made, void const* image, int*, void**, unsigned, int*, void**, unsigned) {
         return *made = const_cast<void*>(image), 0;
       })},
      {"cuLibraryGetKernel", symbol(+[](void** made, void* library, char const*) { return *made = library, 0; })},
      {"cuLibraryGetGlobal", symbol(+[](Pointer* made, size_t* bytes, void* library, char const*) {
         std::memcpy(bytes, library, sizeof(*bytes));  // an image of a companion begins with its constant, and its size
         return *made = reinterpret_cast<Pointer>(library) + sizeof(*bytes), 0;
       })},
      {"cuKernelGetFunction", symbol(+[](void** made, void* kernel) { return *made = kernel, 0; })},
      {"cuFuncSetAttribute", symbol(+[](void*, int, int) { return 0; })},
      {"cuOccupancyMaxActiveClusters", symbol(+[](int* count, void*, void const*) { return *count = 66, 0; })},
      {"cuOccupancyMaxActiveBlocksPerMultiprocessor",
       symbol(+[](int* count, void*, int, size_t) { return *count = 1, 0; })},
      {"cuLaunchKernelEx", symbol(+[](void const*, void* function, void** arguments, void**) {
         device().launch(function, arguments);
         return ++device().launches, 0;
       })},
      {"cuTensorMapEncodeTiled", symbol(+[](void* map, int, uint32_t, void* address, uint64_t const*, uint64_t const*,
                                            uint32_t const*, uint32_t const*, int, int, int, int) {
         std::memset(map, 0xab, 128);
         std::memcpy(map, &address, sizeof(address));
         return ++device().tensor_maps, 0;
       })},
      {"cuTensorMapEncodeIm2col", symbol(+[]() { return 1; })},
      {"cuTensorMapReplaceAddress",
       symbol(+[](void* map, void* address) { return std::memcpy(map, &address, sizeof(address)), 0; })},
  };
}

}  // namespace fake

extern "C" {

void* dlopen(char const* path, int) {
  if (path == nullptr) return nullptr;
  auto const found = fake::libraries().find(path);
  return found == fake::libraries().end() ? nullptr : &found->second;
}

void* dlsym(void* library, char const* name) {
  auto const& symbols = *static_cast<fake::Symbols*>(library);
  auto const found = symbols.find(name);
  return found == symbols.end() ? nullptr : found->second;
}

int dlclose(void*) { return 0; }

char* dlerror() {
  static char text[] = "no such file";
  return text;
}
}

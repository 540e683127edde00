// The CUDA driver, opened at first use: the extension links no CUDA library, so it can be imported without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atomr_cutlass/jit_abi.h"

namespace atomr_cutlass {

using DevicePointer = uint64_t;  // CUdeviceptr

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_memory_per_block = 0;  // with opt-in
  int l2_bytes = 0;
  uint64_t memory_bytes = 0;
  uint64_t memory_bytes_per_second = 0;  // peak; 0 if the driver does not say
};

// Whether a driver and at least one GPU are available, else the reason; never throws.
bool driver_available(std::string* reason = nullptr);
int driver_version();  // 13000 means 13.0
int device_count();
DeviceProperties device_properties(int device);

// Turns a CUDA status (driver and runtime share their numbers) into an exception: sticky errors poison the context.
[[noreturn]] void throw_cuda(int status, std::string const& doing);

// Makes a device's primary context current on this thread, and restores the previous context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  bool pushed_ = false;
};

// Lets this thread call what CUDA forbids while any stream captures (allocating, querying events): none of it touches a
// captured stream, and in the default mode it would invalidate a capture under way anywhere in the process.
class CaptureRelaxed {
 public:
  CaptureRelaxed();
  ~CaptureRelaxed();
  CaptureRelaxed(CaptureRelaxed const&) = delete;
  CaptureRelaxed& operator=(CaptureRelaxed const&) = delete;

 private:
  int mode_;
};

// All of these expect the device to be current.
DevicePointer allocate(size_t bytes);  // legal during capture too: the allocation is not captured
void release(DevicePointer pointer) noexcept;  // waits for the device
void copy_to_device(DevicePointer to, void const* from, size_t bytes, void* stream);
void copy_bytes(DevicePointer to, std::vector<unsigned char> bytes, void* stream);  // a graph may capture it
void copy_to_host(void* to, DevicePointer from, size_t bytes, void* stream);
void clear_async(DevicePointer pointer, size_t bytes, void* stream, unsigned char value = 0);
void synchronize(void* stream);
void synchronize_device();
uint64_t capture_id(void* stream);  // 0: the stream is not capturing
int pointer_device(DevicePointer pointer);  // index of the memory's GPU; throws InvalidOperand for other memory
// Stream identity: handles are reused, and the per-thread handle differs by thread. Not of a capturing stream.
uint64_t stream_id(void* stream);
bool is_legacy(void* stream) noexcept;  // the default stream that lasts as long as its context: it has two handles
bool process_forked() noexcept;  // CUDA was used before the fork, so it cannot be used any more
int current_device();  // index of the current context's device
void* create_stream();  // not synchronized with the legacy default stream
void copy_on_device(DevicePointer to, DevicePointer from, size_t bytes, void* stream);

// A point in a stream's work.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  void record(void* stream);
  bool done() const noexcept;  // also true if nothing was recorded, or the context is lost
  void wait() const;
  void hold(void* stream) const;  // makes later launches on the stream wait for it

 private:
  void* event_ = nullptr;
};

// Makes later launches on `after` wait for the pending work of `before`. Work outside a capture cannot wait for work
// inside it, nor the reverse: between two such streams neither waits, unless `fork` makes `after` join the capture of
// `before`.
void order_streams(void* before, void* after, bool fork);

// Code compiled at run time. Libraries belong to no context; their kernels are loaded on a device at first use.
struct LaunchShape {
  uint32_t grid[3];
  uint32_t block;
  uint32_t cluster[3];
  uint32_t shared_bytes;
  bool dependent = false;  // may start while the preceding launch runs: the kernel itself waits for it
};

// The cure for a kernel whose headers lay out the ABI's structs differently.
constexpr char kOneBuild[] = "reinstall atomr_cutlass, so that `_core` and its folder `include` are of one build";

void* load_library(void const* image);
void* library_kernel(void* library, char const* name);
DevicePointer library_global(void* library, char const* name, size_t bytes);  // throws unless it has this size
void* kernel_function(void* kernel);  // on the current device
void allow_shared_memory(void* function, uint32_t bytes);
int max_active_clusters(void* function, LaunchShape const& shape);
int launch_function(void* function, LaunchShape const& shape, void** arguments,
                    void* stream) noexcept;  // a CUDA status
void encode_tensor_map(void* map, atomr_cutlass_tensor_map_request const& request);
void move_tensor_map(void* map, uint64_t address);  // makes it the map of another array

}  // namespace atomr_cutlass

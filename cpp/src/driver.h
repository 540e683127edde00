// The CUDA driver, opened at first use: the extension links against no CUDA library, so it loads where there is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace atomr_cutlass {

using DevicePointer = uint64_t;  // CUdeviceptr

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_memory_per_block = 0;  // with opt-in
  int l2_bytes = 0;
  uint64_t memory_bytes = 0;
};

// Whether a driver and at least one GPU are there; never throws. The reason when not.
bool driver_available(std::string* reason = nullptr);
int driver_version();  // 13000 means 13.0
int device_count();
DeviceProperties device_properties(int device);

// Turns a CUDA status (driver and runtime share their numbers) into an exception: sticky errors poison the context.
[[noreturn]] void throw_cuda(int status, std::string const& doing);

// Makes a device's primary context current on this thread, and puts back what was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  bool pushed_ = false;
};

// All of these expect the device to be current.
DevicePointer allocate(size_t bytes);          // legal during capture too: the allocation is not captured
void release(DevicePointer pointer) noexcept;  // waits for the device
void copy_to_device(DevicePointer to, void const* from, size_t bytes, void* stream);
void copy_to_host(void* to, DevicePointer from, size_t bytes, void* stream);
void clear_async(DevicePointer pointer, size_t bytes, void* stream);
void synchronize(void* stream);
void synchronize_device() noexcept;
uint64_t capture_id(void* stream);  // 0: the stream is not capturing

}  // namespace atomr_cutlass

// Kernels compiled at run time: the C ABI row of each, as prebuilt kernels have it.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "atomr_cutlass/jit_abi.h"
#include "atomr_cutlass/kernel_abi.h"
#include "op_args.h"

namespace atomr_cutlass {

// A kernel and its companion (jit_abi.h), loaded in the driver, and set up on each device at its first use there. Never
// unloaded: captured graphs refer to it.
class JitKernel {
 public:
  // The images are cubins, or PTX that the driver translates. Throws LibraryFailure when the driver refuses one.
  JitKernel(std::string name, std::string key, std::string const& kernel_image, std::string const& companion_image);

  std::string const& name() const { return name_; }
  std::string const& key() const { return key_; }

  struct OnDevice {
    void* kernel = nullptr;
    void* setup = nullptr;  // the kernel that runs before it, or null
    void* companion = nullptr;
    atomr_cutlass_jit_info info{};
    int max_active_clusters = 0;
    void* stream = nullptr;  // the companion's
    uint64_t scratch = 0;  // where it reads the problem and writes its answer
    size_t answer_bytes = 0;
    std::mutex mutex;  // of the scratch
  };

  // What the current device needs; set up at the first call on it.
  OnDevice& on_device();

  static constexpr int kMaxDevices = 64;

 private:
  std::string name_, key_;
  void* kernel_library_ = nullptr;
  void* kernel_ = nullptr;
  void* companion_ = nullptr;
  void* companion_library_ = nullptr;
  std::mutex mutex_;
  std::array<std::unique_ptr<OnDevice>, kMaxDevices> devices_;
};

// The row of one plan. Its `supports`, `workspace_size` and `prepare` ask the companion the first time they see a
// problem (shape, strides, slices, whether there is a C), which launches a kernel and waits for it; a problem seen
// before costs neither.
//
// Unlike a pack's, its functions throw, and those three may wait: it never leaves this library.
std::shared_ptr<atomr_cutlass_row const> make_jit_row(std::shared_ptr<JitKernel> kernel, ArgsLayout const& layout);

// What identifies a row's kernel in this process: the driver's handle of one compiled at run time, else the row.
void const* kernel_handle(atomr_cutlass_row const* row);

}  // namespace atomr_cutlass

// One kernel that a plan launches repeatedly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"
#include "op_args.h"
#include "relocation.h"

namespace atomr_cutlass {

// Room for a kernel's parameters: CUDA's limit before it grew to 32764 bytes; no cell comes near.
constexpr size_t kParamsBytes = 4096;

// Whether kernels that wait for the launch before them themselves may start before that has ended (programmatic
// dependent launch). On, unless ATOMR_CUTLASS_DEPENDENT_LAUNCH is "off" when the first kernel is launched.
bool dependent_launch();
void set_dependent_launch(bool enabled);

// Stands for any aligned address, to ask whether a kernel can implement a shape and strides.
void* const kProbe = reinterpret_cast<void*>(uintptr_t(4096));

class KernelLaunch {
 public:
  // `layout`: of the arguments of the row's op. Throws Unsupported for a kernel that this package is too old to launch.
  KernelLaunch(std::shared_ptr<atomr_cutlass_row const> row, ArgsLayout const& layout);

  // Asks the kernel about a problem, whose pointers may be probes, before the first launch of it: throws Unsupported
  // when it cannot implement it. The row of a kernel compiled at run time launches its companion and waits for it: not
  // while this thread captures a stream. Remembers the largest workspace asked for.
  void open(void const* args);

  // Asks the kernel no more than whether it can implement a problem that differs from an open one in hints alone.
  void ask(void const* args) const;

  // Launches, clearing of the workspace before it included. Thread-safe. Legal under stream capture. With `serialized`
  // the kernel starts after all that is before it on the stream, although it could wait for that itself.
  void launch(void const* args, void* workspace, void* stream, bool serialized = false);

  // Whether the kernel itself waits for the launch before it, so that it may start before that has ended.
  bool dependent() const { return (geometry_.padding & ATOMR_CUTLASS_LAUNCH_DEPENDENT) != 0; }

  atomr_cutlass_row const* row() const { return row_.get(); }
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  atomr_cutlass_launch const& geometry() const { return geometry_; }

 private:
  // The parameters of the latest launch of a problem: callers that come back with the same pointers and scalars, as a
  // serving loop does, get them as they are. For others the row evaluates them anew or, from the third set of arguments
  // on, they are relocated: that spares the encoding of tensor maps.
  struct Prepared {
    Bytes problem, args;
    bool valid = false;  // of these arguments
    bool relocations_sought = false;  // whether or not there are any
    std::optional<Relocations> relocations;
    atomr_cutlass_launch geometry{};
    alignas(128) unsigned char params[kParamsBytes] = {};
  };

  void prepare(void const* args, unsigned char* params, atomr_cutlass_launch& geometry);
  Prepared& prepared(void const* args);
  void evaluate(Prepared& prepared, void const* args) const;
  std::optional<Relocations> relocations(Prepared const& prepared) const;

  std::shared_ptr<atomr_cutlass_row const> row_;
  ArgsLayout const& layout_;
  uint64_t workspace_bytes_ = 0;
  atomr_cutlass_launch geometry_{};
  std::mutex launch_mutex_;
  std::mutex prepared_mutex_;
  std::vector<std::unique_ptr<Prepared>> prepared_;  // as many as a plan has kinds of launches
  Prepared* latest_ = nullptr;
};

}  // namespace atomr_cutlass

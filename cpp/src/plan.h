// A plan: one kernel, one problem, everything decided and allocated; calling it only launches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"
#include "driver.h"
#include "operand.h"

namespace atomr_cutlass {

// One launch of a plan: where its operands lie, in bytes from the pointers that the caller gave, and how many batches
// it takes. Plans have one, but for batches that no single stride reaches or that a grid cannot hold.
struct BatchLaunch {
  int64_t a = 0, b = 0, c = 0, d = 0;
  int32_t batch = 1;
};

// Room for a kernel's parameters: CUDA's limit before it grew to 32764 bytes; no cell comes near.
constexpr size_t kParamsBytes = 4096;

// Memory like `prototype` from a framework's allocator; throws LibraryFailure with the framework's own words.
DlManagedVersioned* framework_allocate(DlExchangeApi const* allocator, DlTensor& prototype);

// A block of device memory, from the driver or from a framework's allocator.
//
// Freeing one waits for nothing: give a block that a launch may still use to `bury`.
class DeviceBlock {
 public:
  explicit DeviceBlock(size_t bytes);                     // cuMemAlloc on the current device
  explicit DeviceBlock(DlManagedVersioned* managed);      // takes ownership
  ~DeviceBlock();
  DeviceBlock(DeviceBlock const&) = delete;
  DeviceBlock& operator=(DeviceBlock const&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  DlManagedVersioned* managed_ = nullptr;
};

// Memory that launches on one stream use, one after the other, and the end of the last of them (of its former use,
// where there was none yet).
struct StreamBlock {
  std::shared_ptr<DeviceBlock> block;
  Event used;
};

using StreamBlocks = std::map<std::pair<uint64_t, uint64_t>, StreamBlock>;  // by stream and capture

// Frees the block once its last launch has ended: now, or when a later block is buried or asked for. Legal while
// streams are captured.
void bury(StreamBlock block, int device) noexcept;

struct GemmPlanOptions {
  int device = 0;
  // D column-major: the kernel computes D^T = B^T A^T, so the caller's A is its B.
  bool exchanged = false;
  bool integral = false;  // alpha and beta must be whole numbers
  double alpha = 1.0, beta = 0.0;  // of calls that give none
  // K of the launch that stands in for K = 0 or alpha = 0, and the leading dimensions of its zero operands.
  int null_k = 0;
  int64_t null_lda = 0, null_ldb = 0;
  uint64_t null_bytes = 0;
};

class GemmPlan {
 public:
  // `args` holds the problem with null pointers. Throws Unsupported when the kernel can't implement it. The row of a
  // kernel compiled at run time launches its companion and waits for it: not while this thread captures a stream.
  GemmPlan(std::shared_ptr<atomr_cutlass_row const> row, atomr_cutlass_gemm_args const& args, OperandSpec a,
           OperandSpec b, OperandSpec c, OperandSpec d, std::vector<BatchLaunch> launches, GemmPlanOptions options,
           DlExchangeApi const* allocator);
  ~GemmPlan();
  GemmPlan(GemmPlan const&) = delete;
  GemmPlan& operator=(GemmPlan const&) = delete;

  // Checks the operands and launches. `c` may be null when beta is 0. Thread-safe. Legal under stream capture.
  void launch(Operand const& a, Operand const& b, Operand const* c, Operand const& d, double alpha, double beta,
              void* stream);

  // From now on launches go to `next`, a plan of the same problem, which must outlive this one: but for streams that
  // are being captured before the first launch outside a capture has, and for operands that only this plan's kernel can
  // read.
  void replace(GemmPlan* next) { next_.store(next, std::memory_order_release); }
  GemmPlan const& serving() const { return replaced_ ? *next_.load(std::memory_order_acquire) : *this; }

  atomr_cutlass_row const* row() const { return row_.get(); }
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  OperandSpec const& input_a() const { return a_; }
  OperandSpec const& input_b() const { return b_; }
  OperandSpec const& output() const { return d_; }
  bool row_major_output() const;
  GemmPlanOptions const& options() const { return options_; }
  int device() const { return options_.device; }
  atomr_cutlass_launch const& geometry() const { return geometry_; }

 private:
  // What the last launch evaluated: callers that come back with the same pointers and scalars, as a serving loop does,
  // are spared the encoding of tensor maps.
  struct Prepared {
    atomr_cutlass_gemm_args args;
    atomr_cutlass_launch geometry;
    alignas(128) unsigned char params[kParamsBytes];
    bool valid = false;
  };

  void prepare(atomr_cutlass_gemm_args const& args, unsigned char* params, atomr_cutlass_launch& geometry);
  GemmPlan* turn_to(Operand const& a, Operand const& b, Operand const* c, Operand const& d, void* stream);
  void check_operands(Operand const& a, Operand const& b, Operand const* c, Operand const& d) const;
  void set_null_product(atomr_cutlass_gemm_args& args) const;
  void open(atomr_cutlass_gemm_args problem);
  StreamBlock& block_for(StreamBlocks& blocks, size_t bytes, void* stream);
  StreamBlock new_block(size_t bytes) const;

  std::shared_ptr<atomr_cutlass_row const> row_;
  atomr_cutlass_gemm_args args_;
  OperandSpec a_, b_, c_, d_;
  std::vector<BatchLaunch> launches_;
  GemmPlanOptions options_;
  DlExchangeApi const* allocator_;
  uint64_t workspace_bytes_ = 0;
  atomr_cutlass_launch geometry_{};

  // Launches on different streams may run at once, and a graph may replay beside them: each stream, and each stream of
  // each capture, has memory of its own.
  std::mutex mutex_;
  StreamBlocks workspaces_, zeros_;
  StreamBlock spare_;
  std::atomic<GemmPlan*> next_{nullptr};
  std::atomic<bool> replaced_{false};
  std::atomic<uint64_t> capture_{0};  // the latest that this plan's own kernel served, though there was another plan

  std::mutex launch_mutex_;
  std::mutex prepared_mutex_;
  Prepared prepared_;
};

}  // namespace atomr_cutlass

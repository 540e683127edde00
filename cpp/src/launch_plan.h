// A plan of any operation: one problem with its kernels chosen and memory allocated, so that a call only launches. It
// has operands by position, and the steps of a call, which use their addresses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_launch.h"
#include "op_args.h"
#include "operand.h"
#include "stream_memory.h"

namespace atomr_cutlass {

// An operand that the caller gives at each call.
struct Slot {
  enum class Role : uint8_t {
    kInput,
    kSource,  // an input whose memory an output may be, in place
    kOutput,
  };
  std::string name;
  OperandSpec spec;
  Role role = Role::kInput;
  bool optional = false;  // of a source: given exactly if beta is not 0
};

// An address that is known at a call, with an offset in bytes.
struct Address {
  enum class Base : uint8_t {
    kOperand,    // null if it is optional and not given
    kTemporary,  // the plan's memory
    kZeros,      // memory of zeros, allocated at the first of the few calls that need it
  };
  Base base = Base::kOperand;
  int index = 0;
  int64_t bytes = 0;
};

// Where an address is written into the arguments of a kernel, or into a table.
struct Patch {
  size_t offset;
  Address address;
};

// A scalar of the arguments that takes the call's alpha or beta.
struct ScalarPatch {
  size_t offset;
  bool beta;
};

// Bits that are set in an int32_t of the arguments if an operand is settled (operand.h).
struct SettledPatch {
  size_t offset;
  int operand;
  int32_t bits;
};

struct Step {
  // The calls that take the step. BLAS: with alpha = 0, A and B are not read, so that a NaN in them does not reach D.
  enum class When : uint8_t { kAlways, kProduct, kNoProduct };
  enum class Kind : uint8_t {
    kLaunch,  // a kernel
    kClear,  // `bytes` times `value` at `target`
    kCopy,  // `data`, patched, to `target`
  };
  Kind kind;
  // kLaunch
  std::shared_ptr<atomr_cutlass_row const> row;
  ArgsLayout const* layout = nullptr;
  std::vector<ScalarPatch> scalars;
  // kLaunch: the arguments. kCopy: the table.
  std::vector<unsigned char> data;
  std::vector<Patch> patches;
  // kClear, kCopy
  Address target;
  size_t bytes = 0;
  unsigned char value = 0;
  std::vector<SettledPatch> settled;  // kLaunch
  When when = When::kAlways;
};

struct LaunchPlanOptions {
  int device = 0;
  bool integral = false;  // alpha and beta must be whole numbers
  double alpha = 1.0, beta = 0.0;  // of calls without them
  size_t main = 0;  // the step whose kernel names the plan
  size_t zeros = 0;  // size of the memory of zeros
};

// Address and flags of an operand whose layout is already verified.
struct Place {
  void* data = nullptr;
  bool given = false, read_only = false, settled = false;
};

class LaunchPlan {
 public:
  // `temporaries`: bytes of device memory that the steps share with one another. Throws Unsupported when a kernel can't
  // implement its step, InvalidOperand for steps that refer to a missing operand. Not while this thread captures a
  // stream, if a kernel was compiled at run time.
  LaunchPlan(std::vector<Slot> slots, std::vector<size_t> const& temporaries, std::vector<Step> steps,
             LaunchPlanOptions options, DlExchangeApi const* allocator);

  LaunchPlan(LaunchPlan const&) = delete;
  LaunchPlan& operator=(LaunchPlan const&) = delete;

  // Checks the operands, one for each slot, and launches. Thread-safe. Legal under stream capture.
  void launch(OperandSpan operands, double alpha, double beta, void* stream);
  // The same for operands whose layouts are known to be those of the slots: one place for each slot.
  void launch(Place const* places, double alpha, double beta, void* stream);

  // Directs later launches to `next`, a plan of the same operands, which must outlive this one. Exceptions: streams
  // that are being captured before the first launch outside a capture, and operands that only this plan's kernels read.
  // Throws InvalidOperand for a plan of other operands. Thread-safe, also while others launch.
  void replace(LaunchPlan* next);
  // Whether a new plan would have a better kernel, to which this one cannot switch.
  bool superseded() const { return superseded_.load(std::memory_order_relaxed); }
  void supersede(bool superseded) { superseded_.store(superseded, std::memory_order_relaxed); }
  LaunchPlan const& serving() const { return replaced_ ? *next_.load(std::memory_order_acquire) : *this; }

  // Throws InvalidOperand unless the operand fits its slot.
  void check(size_t slot, Operand const& operand) const;

  std::vector<Slot> const& slots() const { return slots_; }
  LaunchPlanOptions const& options() const { return options_; }
  size_t workspace_bytes() const { return memory_.bytes(); }
  KernelLaunch const& main() const { return kernels_[main_kernel_]; }
  std::vector<std::string> kernel_names() const;
  size_t steps() const;  // of a call whose alpha is not 0

 private:
  struct Memory {
    unsigned char* temporaries;
    unsigned char* zeros;
  };

  void check_steps(std::vector<size_t> const& temporaries) const;
  void open(KernelLaunch& kernel, Step const& step);
  LaunchPlan* switch_to_next(Place const* places, size_t count, void* stream);
  void note_reaches();
  bool plainly_fine(Place const* places, double alpha, double beta) const;
  void check_places(Place const* places, double alpha, double beta) const;
  void enqueue(Place const* places, double alpha, double beta, void* stream);
  void check_operands(OperandSpan operands, double alpha, double beta) const;
  void check_overlap(OperandSpan operands) const;
  void check_pair(OperandSpan operands, size_t first, size_t second) const;
  uint64_t resolve(Address const& address, Place const* places, Memory const& memory) const;
  void copy(Step const& step, Place const* places, Memory const& memory, void* stream) const;

  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  LaunchPlanOptions options_;
  std::deque<KernelLaunch> kernels_;  // of the launching steps, in order
  size_t main_kernel_ = 0;
  std::vector<size_t> temporaries_;  // offset of each
  size_t workspace_ = 0;  // offset of the kernels' workspaces
  std::vector<size_t> own_;  // where that of each kernel does: launches of one kernel share it, others find it as left
  std::vector<size_t> outputs_;  // slots
  // Of each slot: from an operand's address to its first byte and to the end of its last, and the bits of an address
  // that must be 0 for its alignment. Empty if operands are compared one by one.
  struct Reach {
    uintptr_t begin, end, unaligned;
  };
  std::vector<Reach> reaches_;
  StreamMemory memory_, zeros_;
  std::atomic<LaunchPlan*> next_{nullptr};
  std::atomic<bool> replaced_{false}, superseded_{false};
  std::atomic<uint64_t> capture_{0};  // the latest that this plan's own kernels served despite a `next`
};

}  // namespace atomr_cutlass

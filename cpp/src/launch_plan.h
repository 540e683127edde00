// A plan of any op: operands by position, and the steps that a call launches with their addresses.
#pragma once

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

// What a caller gives at each call.
struct Slot {
  enum class Role : uint8_t {
    kInput,
    kSource,  // an input that an output may be, in place
    kOutput,
  };
  std::string name;
  OperandSpec spec;
  Role role = Role::kInput;
};

// An address that is known at a call: an operand's or a temporary's, and bytes from there.
struct Address {
  bool temporary = false;
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

struct Step {
  enum class Kind : uint8_t {
    kLaunch,  // a kernel
    kClear,   // `bytes` times `value` at `target`
    kCopy,    // `data`, patched, to `target`
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
};

struct LaunchPlanOptions {
  int device = 0;
  bool integral = false;           // alpha and beta must be whole numbers
  double alpha = 1.0, beta = 0.0;  // of calls that give none
  size_t main = 0;                 // the step whose kernel names the plan
};

class LaunchPlan {
 public:
  // `temporaries`: bytes of device memory that the steps share with one another. Throws Unsupported when a kernel can't
  // implement its step, InvalidOperand for steps that name what is not there. Not while this thread captures a stream,
  // if a kernel was compiled at run time.
  LaunchPlan(std::vector<Slot> slots, std::vector<size_t> const& temporaries, std::vector<Step> steps,
             LaunchPlanOptions options, DlExchangeApi const* allocator);

  // Checks the operands, one for each slot, and launches. Thread-safe. Legal under stream capture.
  void launch(std::vector<Operand> const& operands, double alpha, double beta, void* stream);

  // Throws InvalidOperand unless the operand fits its slot.
  void check(size_t slot, Operand const& operand) const;

  std::vector<Slot> const& slots() const { return slots_; }
  LaunchPlanOptions const& options() const { return options_; }
  size_t workspace_bytes() const { return memory_.bytes(); }
  KernelLaunch const& main() const { return kernels_[main_kernel_]; }
  std::vector<std::string> kernel_names() const;
  size_t steps() const { return steps_.size(); }

 private:
  void check_steps(std::vector<size_t> const& temporaries) const;
  uint64_t resolve(Address const& address, std::vector<Operand> const& operands, unsigned char* memory) const;
  void check_overlap(std::vector<Operand> const& operands) const;
  void check_pair(std::vector<Operand> const& operands, size_t first, size_t second) const;
  void copy(Step const& step, std::vector<Operand> const& operands, unsigned char* memory, void* stream) const;

  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  LaunchPlanOptions options_;
  std::deque<KernelLaunch> kernels_;  // of the launching steps, in order
  size_t main_kernel_ = 0;
  std::vector<size_t> temporaries_;  // where each begins
  size_t workspace_ = 0;  // where the kernels' own begins
  std::vector<size_t> own_;  // where that of each kernel does: launches of one kernel share it, others find it as left
  StreamMemory memory_;
};

}  // namespace atomr_cutlass

// The operations, and the arguments of each, field by field: how Python fills them in, and what of them a launch may
// change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

// What the model of kernels' times (estimate.h) tells apart.
enum class Op { kGemm, kGrouped, kGemv, kFprop, kDgrad, kWgrad, kCast, kOther };

struct ArgsField {
  enum class Kind : uint8_t { kInt32, kInt64, kDouble, kPointer };
  char const* name;
  Kind kind;
  size_t offset;
};

// What of an op's arguments may change from launch to launch are its pointers and its scalars of type double. The rest
// is the problem, which a kernel's parameters are evaluated for; so is whether an optional pointer is there.
struct ArgsLayout {
  struct Pointer {
    size_t offset;
    bool optional = false;
  };
  std::string op;
  size_t bytes;
  std::vector<ArgsField> fields;
  std::vector<Pointer> pointers;
  std::vector<size_t> scalars;
  size_t max_active_clusters;  // an int32_t that the runtime fills in
  size_t workspace;            // a pointer, likewise

  ArgsField const* field(std::string const& name) const;
};

// The most bytes that any op's arguments take.
constexpr size_t kMaxArgsBytes = 1024;

// The layout of an op by its name in kernel keys, or null.
ArgsLayout const* args_of(std::string const& op);

// What an op is to the model, by its name in kernel keys; kOther for those that it does not know.
Op op_of(std::string const& op);

}  // namespace atomr_cutlass

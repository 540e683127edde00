// The operations, and the fields of each one's arguments: how Python fills them in, and which of them a launch may
// change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

// The operations that the model of kernels' times (estimate.h) distinguishes.
enum class Op { kGemm, kGrouped, kGemv, kFprop, kDgrad, kWgrad, kCast, kOther };

struct ArgsField {
  enum class Kind : uint8_t { kInt32, kInt64, kDouble, kPointer };
  char const* name;
  Kind kind;
  size_t offset;
};

// Between launches an op's pointers and its scalars of type double may change. The other arguments, and the presence of
// optional pointers, are the problem, for which a kernel's parameters are evaluated.
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
  size_t workspace;  // a pointer that the runtime fills in

  ArgsField const* field(std::string const& name) const;
};

// The most bytes that any op's arguments take.
constexpr size_t kMaxArgsBytes = 1024;

// The layout of an op by its name in kernel keys, or null.
ArgsLayout const* args_of(std::string const& op);

// The model's op by its name in kernel keys; kOther for those that the model does not know.
Op op_of(std::string const& op);

}  // namespace atomr_cutlass

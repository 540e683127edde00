// The table of the ops' arguments against the structs of the C ABI: every byte of a struct is one field's.
#include "op_args.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "check.h"

using namespace atomr_cutlass;

namespace {

size_t size_of(ArgsField::Kind kind) { return kind == ArgsField::Kind::kInt32 ? 4 : 8; }

struct Expected {
  char const* name;
  size_t bytes;
  std::vector<std::string> required;  // pointers whose absence is no kernel's to understand
  std::vector<std::string> scalars;
  Op op;
};

std::vector<Expected> const kOps = {
    {"gemm", sizeof(atomr_cutlass_gemm_args), {"a", "b", "d", "workspace"}, {"alpha", "beta"}, Op::kGemm},
    {"gemv", sizeof(atomr_cutlass_gemm_args), {"a", "b", "d", "workspace"}, {"alpha", "beta"}, Op::kGemv},
    {"grouped_gemm", sizeof(atomr_cutlass_grouped_args), {"workspace"}, {"alpha", "beta"}, Op::kGrouped},
    {"conv2d_fprop", sizeof(atomr_cutlass_conv_args), {"a", "b", "d", "workspace"}, {"alpha", "beta"}, Op::kFprop},
    {"conv2d_dgrad", sizeof(atomr_cutlass_conv_args), {"a", "b", "d", "workspace"}, {"alpha", "beta"}, Op::kDgrad},
    {"conv2d_wgrad", sizeof(atomr_cutlass_conv_args), {"a", "b", "d", "workspace"}, {"alpha", "beta"}, Op::kWgrad},
    {"cast", sizeof(atomr_cutlass_cast_args), {"a", "d", "workspace"}, {"alpha", "beta"}, Op::kCast},
    {"quantize", sizeof(atomr_cutlass_quantize_args), {"workspace"}, {"alpha"}, Op::kOther},
    {"dequantize", sizeof(atomr_cutlass_quantize_args), {"workspace"}, {"alpha"}, Op::kOther},
};

void test_every_byte_is_one_fields(Expected const& op, ArgsLayout const& layout) {
  CHECK_EQUAL(layout.bytes, op.bytes);
  CHECK(layout.bytes <= kMaxArgsBytes);
  std::vector<int> owners(op.bytes, 0);
  for (ArgsField const& field : layout.fields) {
    size_t const bytes = size_of(field.kind);
    CHECK_EQUAL(field.offset % bytes, 0u);
    for (size_t i = 0; i < bytes && field.offset + i < op.bytes; ++i) ++owners[field.offset + i];
    CHECK(field.offset + bytes <= op.bytes);
  }
  for (size_t i = 0; i < owners.size(); ++i) {
    if (owners[i] != 1) {
      check::report(
          __FILE__, __LINE__,
          std::string(op.name) + ": byte " + std::to_string(i) + " is of " + std::to_string(owners[i]) + " fields");
    }
  }
}

void test_names(ArgsLayout const& layout) {
  std::set<std::string> names;
  for (ArgsField const& field : layout.fields) {
    CHECK(names.insert(field.name).second);
    CHECK(layout.field(field.name) == &field);
  }
  CHECK(layout.field("operands") == nullptr);
  CHECK((layout.field("operand15_batch_stride") != nullptr) == (layout.field("operand0") != nullptr));
  CHECK(layout.field("nothing") == nullptr);
}

void test_what_a_launch_may_change(Expected const& op, ArgsLayout const& layout) {
  std::set<size_t> pointers, scalars;
  for (ArgsField const& field : layout.fields) {
    if (field.kind == ArgsField::Kind::kPointer) pointers.insert(field.offset);
    if (field.kind == ArgsField::Kind::kDouble) scalars.insert(field.offset);
  }
  CHECK_EQUAL(layout.pointers.size(), pointers.size());
  CHECK_EQUAL(layout.scalars.size(), scalars.size());
  for (ArgsLayout::Pointer const& one : layout.pointers) {
    CHECK_EQUAL(pointers.count(one.offset), 1u);
    auto const field = std::find_if(layout.fields.begin(), layout.fields.end(),
                                    [&](ArgsField const& candidate) { return candidate.offset == one.offset; });
    bool const required = std::find(op.required.begin(), op.required.end(), field->name) != op.required.end();
    if (required == one.optional) {
      check::report(__FILE__, __LINE__,
                    std::string(op.name) + "." + field->name + (required ? " is" : " is not") + " required");
    }
  }
  for (std::string const& name : op.required) CHECK(layout.field(name) != nullptr);
  std::vector<std::string> found;
  for (size_t const offset : layout.scalars) {
    for (ArgsField const& field : layout.fields) {
      if (field.offset == offset) found.emplace_back(field.name);
    }
  }
  CHECK(found == op.scalars);
}

void test_what_the_runtime_fills_in(ArgsLayout const& layout) {
  ArgsField const* const clusters = layout.field("max_active_clusters");
  ArgsField const* const workspace = layout.field("workspace");
  CHECK(clusters != nullptr && workspace != nullptr);
  if (clusters == nullptr || workspace == nullptr) return;
  CHECK(clusters->kind == ArgsField::Kind::kInt32 && clusters->offset == layout.max_active_clusters);
  CHECK(workspace->kind == ArgsField::Kind::kPointer && workspace->offset == layout.workspace);
  // Python gives every launch the number of multiprocessors.
  ArgsField const* const multiprocessors = layout.field("sm_count");
  CHECK(multiprocessors != nullptr && multiprocessors->kind == ArgsField::Kind::kInt32);
}

void test_kinds() {
  ArgsLayout const& gemm = *args_of("gemm");
  CHECK(gemm.field("m")->kind == ArgsField::Kind::kInt32);
  CHECK(gemm.field("lda")->kind == ArgsField::Kind::kInt64);
  CHECK(gemm.field("beta")->kind == ArgsField::Kind::kDouble);
  CHECK(gemm.field("c")->kind == ArgsField::Kind::kPointer);
  CHECK_EQUAL(gemm.field("amax")->offset, offsetof(atomr_cutlass_gemm_args, amax));
  CHECK_EQUAL(args_of("conv2d_dgrad")->field("bias")->offset, offsetof(atomr_cutlass_conv_args, bias));
  CHECK_EQUAL(args_of("quantize")->field("block_rows")->offset, offsetof(atomr_cutlass_quantize_args, block_rows));
}

}  // namespace

int main() {
  for (Expected const& op : kOps) {
    ArgsLayout const* layout = args_of(op.name);
    CHECK(layout != nullptr);
    if (layout == nullptr) continue;
    CHECK_EQUAL(layout->op, op.name);
    CHECK(layout == args_of(op.name));
    CHECK(op_of(op.name) == op.op);
    test_every_byte_is_one_fields(op, *layout);
    test_names(*layout);
    test_what_a_launch_may_change(op, *layout);
    test_what_the_runtime_fills_in(*layout);
  }
  test_kinds();
  for (char const* unknown : {"", "gem", "conv2d", "GEMM", "gemm "}) {
    CHECK(args_of(unknown) == nullptr);
    CHECK(op_of(unknown) == Op::kOther);
  }
  return check::result();
}

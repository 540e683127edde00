// A plan's view of an array: its address and its layout in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "dlpack_abi.h"

namespace atomr_cutlass {

constexpr int kMaxRank = 8;

struct Operand {
  void* data = nullptr;
  DlDevice device{0, 0};
  DlDataType dtype{0, 0, 1};
  int32_t rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in elements; 0 for dimensions of size 1, where they mean nothing
  bool read_only = false;
  bool settled = false;  // no launch writes it that may still be running when one that reads it starts

  bool given() const { return device.type != 0; }
};

// The operands of a call, which outlive it.
class OperandSpan {
 public:
  OperandSpan(Operand const* first, size_t count) : first_(first), count_(count) {}
  OperandSpan(std::vector<Operand> const& operands) : OperandSpan(operands.data(), operands.size()) {}
  OperandSpan(std::initializer_list<Operand> operands) : OperandSpan(operands.begin(), operands.size()) {}
  size_t size() const { return count_; }
  Operand const& operator[](size_t index) const { return first_[index]; }

 private:
  Operand const* first_;
  size_t count_;
};

// Copies a DLPack view; throws InvalidOperand for more than kMaxRank dimensions or vector elements.
Operand operand_from_view(DlTensor const& view);

// The largest power of two, up to 16, that divides the address.
int address_alignment(void const* data);

// Shape, strides, dtype, device and alignment of the address, as text for messages.
std::string describe(Operand const& operand);

// The addresses from an operand's first byte to its last; empty for one without elements.
struct ByteRange {
  uintptr_t begin, end;
};
ByteRange byte_range(Operand const& operand);

// Whether two operands share memory. Exact for operands whose rows have the same pitch (two column ranges of one
// buffer), and where the address ranges are apart; otherwise ranges that meet count as shared.
bool overlap(Operand const& a, Operand const& b);

// The required layout of a plan's argument.
struct OperandSpec {
  Operand layout;      // its data pointer is not used
  int alignment = 1;   // bytes that the address must be a multiple of
};

// Whether two operands have the same layout: rank, extents, strides, element type and device.
bool matches(Operand const& operand, Operand const& expected);
// The same for a DLPack view of single elements, without copying it; also false if only a copy could tell.
bool matches(DlTensor const& view, Operand const& expected);

// Throws InvalidOperand, naming the argument, unless the operand matches.
void check_operand(char const* name, Operand const& operand, OperandSpec const& spec);

}  // namespace atomr_cutlass

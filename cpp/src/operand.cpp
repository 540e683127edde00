#include "operand.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "errors.h"

namespace atomr_cutlass {
namespace {

int64_t element_bits(Operand const& operand) { return int64_t(operand.dtype.bits) * operand.dtype.lanes; }

// The stride between rows of an operand whose last or second-to-last dimension is contiguous, in bytes; 0 when every
// other stride is not a multiple of it, so that no single pitch describes the operand.
int64_t row_pitch(Operand const& operand, int64_t& width) {
  int64_t pitch = 0;
  int64_t contiguous = 1;
  for (int i = 0; i < operand.rank; ++i) {
    if (operand.shape[i] == 1) continue;
    int64_t const stride = std::abs(operand.strides[i]);
    if (operand.strides[i] == 1) {
      contiguous += operand.shape[i] - 1;  // several of them are windows that slide along a row
    } else if (stride != 0) {
      pitch = pitch == 0 ? stride : std::min(pitch, stride);
    }
  }
  if (pitch < contiguous) return 0;
  for (int i = 0; i < operand.rank; ++i) {
    if (operand.shape[i] != 1 && operand.strides[i] != 1 && operand.strides[i] % pitch != 0) return 0;
  }
  width = contiguous * element_bits(operand) / 8;
  return pitch * element_bits(operand) / 8;
}

void append_list(std::string& text, int64_t const* values, int count) {
  text += '(';
  for (int i = 0; i < count; ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(values[i]);
  }
  text += count == 1 ? ",)" : ")";
}

std::string dtype_name(DlDataType dtype) {
  char const* kind = "type";
  switch (dtype.code) {  // DLDataTypeCode
    case 0: kind = "int"; break;
    case 1: kind = "uint"; break;
    case 2: kind = "float"; break;
    case 4: kind = "bfloat"; break;
    case 5: kind = "complex"; break;
    case 6: return "bool";
    case 10: return "float8_e4m3fn";
    case 12: return "float8_e5m2";
    case 17: return "float4_e2m1fn";
    default: return "dtype code " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits";
  }
  return kind + std::to_string(dtype.bits);
}

std::string device_name(DlDevice device) {
  return device.type == kDlCuda  ? "cuda:" + std::to_string(device.id)
         : device.type == kDlCpu ? "cpu"
                                 : "another device";
}

// Two elements of fp4 as one: PyTorch's float4_e2m1fn_x2, which is a byte to everybody.
bool is_fp4_pair(DlDataType dtype) { return dtype.code == 17 && dtype.bits == 4 && dtype.lanes == 2; }

// CuPy divides a negative stride, in bytes, by the element size as if it were unsigned: what comes out reaches beyond
// any address space, and is taken back to what it was.
int64_t signed_stride(int64_t stride, DlDataType dtype) {
  int64_t const bytes = int64_t(dtype.bits) * dtype.lanes / 8;
  if (bytes <= 1 || (stride >= -(int64_t(1) << 56) && stride <= int64_t(1) << 56)) return stride;
  return int64_t(uint64_t(stride) * uint64_t(bytes)) / bytes;
}

}  // namespace

ByteRange byte_range(Operand const& operand) {
  int64_t low = 0, high = 0;
  for (int i = 0; i < operand.rank; ++i) {
    if (operand.shape[i] == 0) return {0, 0};
    int64_t const reach = (operand.shape[i] - 1) * operand.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  auto const base = reinterpret_cast<uintptr_t>(operand.data);
  int64_t const bits = element_bits(operand);
  return {base + uintptr_t(low * bits / 8), base + uintptr_t(((high + 1) * bits + 7) / 8)};
}

Operand operand_from_view(DlTensor const& view) {
  if (view.ndim > kMaxRank) {
    throw InvalidOperand("an operand has " + std::to_string(view.ndim) + " dimensions; at most " +
                         std::to_string(kMaxRank) + " are taken");
  }
  bool const pairs = is_fp4_pair(view.dtype);
  if (view.dtype.lanes != 1 && !pairs) {
    throw InvalidOperand("an operand has vector elements (" + std::to_string(view.dtype.lanes) + " lanes)");
  }
  Operand operand;
  operand.data = static_cast<char*>(view.data) + view.byte_offset;
  operand.device = view.device;
  operand.dtype = pairs ? DlDataType{1, 8, 1} : view.dtype;
  operand.rank = view.ndim;
  int64_t contiguous = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    operand.shape[i] = view.shape[i];
    int64_t const stride = view.strides != nullptr ? view.strides[i] : contiguous;
    operand.strides[i] = view.shape[i] == 1 ? 0 : signed_stride(stride, view.dtype);
    contiguous *= view.shape[i];
  }
  return operand;
}

int address_alignment(void const* data) {
  constexpr uintptr_t kMost = 16;
  uintptr_t const address = reinterpret_cast<uintptr_t>(data) | kMost;
  return int(address & (~address + 1));  // the lowest bit
}

std::string describe(Operand const& operand) {
  std::string text = dtype_name(operand.dtype) + " of shape ";
  append_list(text, operand.shape, operand.rank);
  text += ", strides ";
  append_list(text, operand.strides, operand.rank);
  return text + " on " + device_name(operand.device);
}

bool overlap(Operand const& a, Operand const& b) {
  ByteRange const x = byte_range(a), y = byte_range(b);
  if (x.end <= y.begin || y.end <= x.begin) return false;
  int64_t width_a = 0, width_b = 0;
  int64_t const pitch = row_pitch(a, width_a);
  if (pitch == 0 || pitch != row_pitch(b, width_b)) return true;
  // Both are column ranges of rows of one pitch: they meet unless the ranges, taken modulo the pitch, are apart.
  int64_t const distance = int64_t(y.begin) - int64_t(x.begin);
  int64_t const offset = (distance % pitch + pitch) % pitch;
  return offset < width_a || offset + width_b > pitch;
}

bool matches(Operand const& operand, Operand const& expected) {
  return operand.rank == expected.rank && operand.device.type == expected.device.type &&
         operand.device.id == expected.device.id && operand.dtype.code == expected.dtype.code &&
         operand.dtype.bits == expected.dtype.bits &&
         std::equal(operand.shape, operand.shape + operand.rank, expected.shape) &&
         std::equal(operand.strides, operand.strides + operand.rank, expected.strides);
}

bool matches(DlTensor const& view, Operand const& expected) {
  if (view.ndim != expected.rank || view.device.type != expected.device.type || view.device.id != expected.device.id ||
      view.dtype.code != expected.dtype.code || view.dtype.bits != expected.dtype.bits || view.dtype.lanes != 1) {
    return false;
  }
  int64_t contiguous = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    int64_t const extent = view.shape[i];
    if (extent != expected.shape[i]) return false;
    int64_t const stride = view.strides != nullptr ? view.strides[i] : contiguous;
    if (extent != 1 && stride != expected.strides[i]) return false;
    contiguous *= extent;
  }
  return true;
}

void check_operand(char const* name, Operand const& operand, OperandSpec const& spec) {
  Operand const& expected = spec.layout;
  if (!matches(operand, expected)) {
    throw InvalidOperand(std::string(name) + " is " + describe(operand) + "; this plan was made for " +
                         describe(expected));
  }
  if (reinterpret_cast<uintptr_t>(operand.data) % uintptr_t(spec.alignment) != 0) {
    throw InvalidOperand(std::string(name) + " starts at an address that is a multiple of " +
                         std::to_string(address_alignment(operand.data)) + " bytes; this plan was made for " +
                         std::to_string(spec.alignment) + ": make a plan for the lower alignment");
  }
}

}  // namespace atomr_cutlass

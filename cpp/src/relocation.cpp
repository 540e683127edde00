#include "relocation.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "atomr_cutlass/jit_abi.h"
#include "bytes.h"
#include "driver.h"

namespace atomr_cutlass {
namespace {

constexpr size_t kMapBytes = 128, kMapAlignment = 64;

// Two sets of pointers, of which any two differ by distances that no other two do.
constexpr uint64_t page(size_t index) { return 0x7a0000000000 + (uint64_t(0x2000) << index) - 0x1000; }
constexpr uint64_t shift(size_t index) { return (uint64_t(index) + 1) * 0x8000000000 + page(index) % 0x1000000000; }
constexpr double kScalars[][2] = {{3.0, 5.0}, {7.0, 11.0}, {13.0, 17.0}, {19.0, 23.0}};

// The two sets of arguments, and what explains values that differ with them.
struct Pair {
  ArgsLayout const& layout;
  unsigned char const* first;
  unsigned char const* second;

  // The pointer from which both values are the same distance away.
  bool pointer(uint64_t x, uint64_t y, Relocation& found) const {
    for (auto const& candidate : layout.pointers) {
      uint64_t const from = load<uint64_t>(first + candidate.offset), to = load<uint64_t>(second + candidate.offset);
      if (from != 0 && x - from == y - to) {
        found.form = Relocation::Form::kPointer;
        found.source = candidate.offset;
        found.addend = int64_t(x - from);
        return true;
      }
    }
    return false;
  }

  // The scalar that both values are, in their type.
  template <class Value>
  bool scalar(unsigned char const* x, unsigned char const* y, Relocation::Form form, Relocation& found) const {
    auto const same = [](unsigned char const* bytes, double value) {
      auto const converted = Value(value);
      return std::memcmp(bytes, &converted, sizeof(converted)) == 0;
    };
    for (size_t const offset : layout.scalars) {
      if (same(x, load<double>(first + offset)) && same(y, load<double>(second + offset))) {
        found.form = form;
        found.source = offset;
        found.addend = 0;
        return true;
      }
    }
    return false;
  }

  // The pointer whose array two requests for tensor maps are of.
  bool request(unsigned char* x, unsigned char const* y, Relocation& found) const {
    auto wanted = load<atomr_cutlass_tensor_map_request>(x);
    auto other = load<atomr_cutlass_tensor_map_request>(y);
    if (!pointer(wanted.address, other.address, found)) return false;
    other.address = wanted.address;
    if (std::memcmp(&wanted, &other, sizeof(wanted)) != 0) return false;
    found.form = Relocation::Form::kTensorMap;
    alignas(kMapAlignment) unsigned char map[kMapBytes];
    encode_tensor_map(map, wanted);
    std::memcpy(x, map, kMapBytes);
    return true;
  }

  // The pointer whose array two tensor maps are of. What they look like is the driver's: it moves the one, which must
  // then be the other.
  bool map(unsigned char const* x, unsigned char const* y, Relocation& found) const {
    for (auto const& candidate : layout.pointers) {
      uint64_t const to = load<uint64_t>(second + candidate.offset);
      if (to == 0) continue;
      alignas(kMapAlignment) unsigned char moved[kMapBytes];
      std::memcpy(moved, x, kMapBytes);
      try {
        move_tensor_map(moved, to);
      } catch (std::exception const&) {  // it is no tensor map
        return false;
      }
      if (std::memcmp(moved, y, kMapBytes) != 0) continue;
      found.form = Relocation::Form::kTensorMap;
      found.source = candidate.offset;
      found.addend = 0;
      return true;
    }
    return false;
  }
};

}  // namespace

void write_problem(ArgsLayout const& layout, void const* args, unsigned char* problem) {
  std::memcpy(problem, args, layout.bytes);
  for (auto const& pointer : layout.pointers) {
    bool const there = !pointer.optional || load<uint64_t>(problem + pointer.offset) != 0;
    store(problem + pointer.offset, uint64_t(there));
  }
  for (size_t const scalar : layout.scalars) store(problem + scalar, 0.0);
}

Bytes sentinel_args(ArgsLayout const& layout, Bytes const& problem, bool second) {
  Bytes args = problem;
  for (size_t i = 0; i < layout.pointers.size(); ++i) {
    unsigned char* const place = args.data() + layout.pointers[i].offset;
    if (load<uint64_t>(place) != 0) store(place, page(i) + (second ? shift(i) : 0));
  }
  for (size_t i = 0; i < layout.scalars.size(); ++i) store(args.data() + layout.scalars[i], kScalars[i][second]);
  return args;
}

std::optional<Relocations> find_relocations(ArgsLayout const& layout, void const* first, void const* second,
                                            unsigned char* first_params, unsigned char const* second_params,
                                            size_t bytes, size_t* unexplained) {
  Pair const pair{layout, static_cast<unsigned char const*>(first), static_cast<unsigned char const*>(second)};
  Relocations found;
  // A tensor map that begins here or, where a byte of it is met that nothing else explains, began before.
  auto const map_at = [&](size_t start) {
    Relocation relocation{uint32_t(start), {}, 0, 0};
    if (start + kMapBytes > bytes || !pair.map(first_params + start, second_params + start, relocation)) return false;
    while (!found.empty() && found.back().offset >= start) found.pop_back();
    found.push_back(relocation);
    return true;
  };
  size_t offset = 0;
  while (offset < bytes) {
    Relocation relocation{uint32_t(offset), {}, 0, 0};
    unsigned char* const x = first_params + offset;
    unsigned char const* const y = second_params + offset;
    size_t const left = bytes - offset;
    if (offset % kMapAlignment == 0 && left >= kMapBytes && load<uint64_t>(x) == ATOMR_CUTLASS_TENSOR_MAP_MAGIC) {
      if (!pair.request(x, y, relocation)) {
        if (unexplained != nullptr) *unexplained = offset;
        return std::nullopt;
      }
      found.push_back(relocation);
      offset += kMapBytes;
      continue;
    }
    if (offset % sizeof(uint64_t) == 0 && left >= sizeof(uint64_t)) {
      bool const differs = std::memcmp(x, y, sizeof(uint64_t)) != 0;
      if (differs && (pair.pointer(load<uint64_t>(x), load<uint64_t>(y), relocation) ||
                      pair.scalar<double>(x, y, Relocation::Form::kDouble, relocation))) {
        found.push_back(relocation);
        offset += sizeof(uint64_t);
        continue;
      }
      if (!differs) {
        offset += sizeof(uint64_t);
        continue;
      }
    }
    size_t const width = std::min(left, sizeof(uint32_t));
    if (std::memcmp(x, y, width) != 0) {
      if (width == sizeof(uint32_t) && (pair.scalar<float>(x, y, Relocation::Form::kFloat, relocation) ||
                                        pair.scalar<int32_t>(x, y, Relocation::Form::kInt32, relocation))) {
        found.push_back(relocation);
      } else {
        size_t const start = offset / kMapAlignment * kMapAlignment;
        if (map_at(start)) {
          offset = start + kMapBytes;
          continue;
        }
        if (start >= kMapAlignment && map_at(start - kMapAlignment)) {
          offset = start - kMapAlignment + kMapBytes;
          continue;
        }
        if (unexplained != nullptr) *unexplained = offset;
        return std::nullopt;
      }
    }
    offset += sizeof(uint32_t);
  }
  return found;
}

void relocate(Relocations const& relocations, void const* args, unsigned char* params) {
  auto const* const bytes = static_cast<unsigned char const*>(args);
  for (Relocation const& relocation : relocations) {
    unsigned char* const place = params + relocation.offset;
    unsigned char const* const source = bytes + relocation.source;
    uint64_t const address = load<uint64_t>(source) + uint64_t(relocation.addend);
    switch (relocation.form) {
      case Relocation::Form::kPointer: store(place, address); break;
      case Relocation::Form::kTensorMap: move_tensor_map(place, address); break;
      case Relocation::Form::kDouble: store(place, load<double>(source)); break;
      case Relocation::Form::kFloat: store(place, float(load<double>(source))); break;
      case Relocation::Form::kInt32: store(place, int32_t(load<double>(source))); break;
    }
  }
}

}  // namespace atomr_cutlass

#pragma once

#include <cstring>

namespace atomr_cutlass {

// Reads a value from bytes of any alignment.
template <class Value>
Value load(void const* from) {
  Value value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Writes a value to bytes of any alignment.
template <class Value>
void store(void* to, Value value) {
  std::memcpy(to, &value, sizeof(value));
}

}  // namespace atomr_cutlass

// A vector that stores its first members inline: the lists of ordinary calls need no heap memory.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace atomr_cutlass {

template <class Value, size_t kInline>
class InlineVector {
 public:
  InlineVector() = default;
  explicit InlineVector(size_t count) {
    for (size_t i = 0; i < count; ++i) emplace_back();
  }
  ~InlineVector() {
    for (size_t i = 0; i < inline_; ++i) place(i)->~Value();
  }
  InlineVector(InlineVector const&) = delete;
  InlineVector& operator=(InlineVector const&) = delete;

  // May move the other members, as that of std::vector.
  template <class... Arguments>
  Value& emplace_back(Arguments&&... arguments) {
    if (more_.empty() && inline_ < kInline) {
      return *new (storage_ + inline_++ * sizeof(Value)) Value{std::forward<Arguments>(arguments)...};
    }
    more_.reserve(2 * inline_);  // what follows destroys as it goes, and must not fail between
    for (size_t i = 0; i < inline_; ++i) {
      more_.push_back(std::move(*place(i)));
      place(i)->~Value();
    }
    inline_ = 0;
    more_.push_back(Value{std::forward<Arguments>(arguments)...});
    return more_.back();
  }

  size_t size() const { return inline_ + more_.size(); }
  bool empty() const { return size() == 0; }
  Value* data() { return inline_ != 0 ? place(0) : more_.data(); }
  Value const* data() const { return const_cast<InlineVector*>(this)->data(); }
  Value* begin() { return data(); }
  Value* end() { return data() + size(); }
  Value const* begin() const { return data(); }
  Value const* end() const { return data() + size(); }
  Value& operator[](size_t index) { return data()[index]; }
  Value const& operator[](size_t index) const { return data()[index]; }

 private:
  Value* place(size_t index) { return std::launder(reinterpret_cast<Value*>(storage_ + index * sizeof(Value))); }

  alignas(Value) unsigned char storage_[kInline * sizeof(Value)];
  size_t inline_ = 0;
  std::vector<Value> more_;  // all of them, once there are too many
};

}  // namespace atomr_cutlass

// Operands: what is read off a DLPack view, whether two share memory, and what a plan refuses.
#include "operand.h"

#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "errors.h"

using namespace atomr_cutlass;

namespace {

constexpr uintptr_t kBase = 0x10000;

Operand make(std::vector<int64_t> const& shape, std::vector<int64_t> const& strides, int64_t offset = 0,
             DlDataType dtype = {2, 32, 1}) {
  Operand operand;
  operand.data = reinterpret_cast<void*>(kBase + uintptr_t(offset * dtype.bits / 8));
  operand.device = {kDlCuda, 0};
  operand.dtype = dtype;
  operand.rank = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    operand.shape[i] = shape[i];
    operand.strides[i] = shape[i] == 1 ? 0 : strides[i];
  }
  return operand;
}

// The address of every element.
std::set<uintptr_t> addresses(Operand const& operand) {
  std::set<uintptr_t> found{reinterpret_cast<uintptr_t>(operand.data)};
  for (int i = 0; i < operand.rank; ++i) {
    std::set<uintptr_t> next;
    for (uintptr_t const address : found) {
      for (int64_t j = 0; j < operand.shape[i]; ++j) {
        next.insert(address + uintptr_t(j * operand.strides[i] * operand.dtype.bits / 8));
      }
    }
    found = std::move(next);
  }
  return found;
}

bool share_elements(Operand const& a, Operand const& b) {
  auto const x = addresses(a);
  for (uintptr_t const address : addresses(b)) {
    if (x.count(address) != 0) return true;
  }
  return false;
}

void test_views() {
  int64_t shape[] = {2, 1, 3};
  int64_t strides[] = {30, 99, 7};
  char memory[8];
  DlTensor view{memory, {kDlCuda, 3}, 3, {4, 16, 1}, shape, strides, 4};
  Operand const operand = operand_from_view(view);
  CHECK(operand.data == memory + 4);
  CHECK_EQUAL(operand.device.id, 3);
  CHECK_EQUAL(operand.strides[0], 30);
  CHECK_EQUAL(operand.strides[1], 0);  // of an extent of 1, where it means nothing
  CHECK_EQUAL(operand.strides[2], 7);
  view.strides = nullptr;
  CHECK_EQUAL(operand_from_view(view).strides[0], 3);
  CHECK_EQUAL(operand_from_view(view).strides[2], 1);

  view.ndim = kMaxRank + 1;
  CHECK_THROWS(InvalidOperand, "9 dimensions; at most 8", operand_from_view(view));
  view.ndim = 3;
  view.dtype.lanes = 4;
  CHECK_THROWS(InvalidOperand, "vector elements (4 lanes)", operand_from_view(view));
  view.dtype = {17, 4, 2};  // how fp4 travels: two to a byte
  CHECK_EQUAL(operand_from_view(view).rank, 3);
}

// As CuPy 14 exports float32 rows that run backwards: -192 bytes as an unsigned number, over 4.
void test_unsigned_strides() {
  int64_t shape[] = {40, 48};
  int64_t strides[] = {(int64_t(1) << 62) - 48, 1};
  DlTensor const view{reinterpret_cast<void*>(kBase), {kDlCuda, 0}, 2, {2, 32, 1}, shape, strides, 0};
  CHECK_EQUAL(operand_from_view(view).strides[0], -48);
  CHECK_EQUAL(operand_from_view(view).strides[1], 1);
}

void test_alignment() {
  for (uintptr_t address = kBase; address < kBase + 64; ++address) {
    int expected = 16;
    while (address % uintptr_t(expected) != 0) expected /= 2;
    CHECK_EQUAL(address_alignment(reinterpret_cast<void*>(address)), expected);
  }
}

void test_descriptions() {
  CHECK_EQUAL(describe(make({4}, {1})), "float32 of shape (4,), strides (1,) on cuda:0");
  CHECK_EQUAL(describe(make({4, 1, 2}, {2, 2, 1}, 0, {4, 16, 1})),
              "bfloat16 of shape (4, 1, 2), strides (2, 0, 1) on cuda:0");
  Operand operand = make({}, {}, 0, {10, 8, 1});
  operand.device = {kDlCpu, 0};
  CHECK_EQUAL(describe(operand), "float8_e4m3fn of shape (), strides () on cpu");
  operand.dtype = {99, 3, 1};
  operand.device.type = 7;
  CHECK_EQUAL(describe(operand), "dtype code 99 of 3 bits of shape (), strides () on another device");
}

void test_overlap_of_known_layouts() {
  // Column ranges of one buffer with 10 columns.
  Operand const left = make({4, 6}, {10, 1});
  CHECK(!overlap(left, make({4, 4}, {10, 1}, 6)));
  CHECK(overlap(left, make({4, 4}, {10, 1}, 5)));
  CHECK(overlap(left, make({4, 5}, {10, 1}, 6)));   // reaches into the next row
  CHECK(!overlap(left, make({3, 4}, {10, 1}, 16)));  // later rows
  CHECK(overlap(left, left));
  // The same by columns, and over batches.
  CHECK(!overlap(make({6, 4}, {1, 10}), make({4, 4}, {1, 10}, 6)));
  CHECK(!overlap(make({3, 4, 6}, {40, 10, 1}), make({3, 4, 4}, {40, 10, 1}, 6)));
  CHECK(overlap(make({3, 4, 6}, {40, 10, 1}), make({3, 4, 4}, {40, 10, 1}, 45)));
  // Apart, and touching.
  CHECK(!overlap(make({4, 6}, {6, 1}), make({4, 6}, {6, 1}, 24)));
  CHECK(overlap(make({4, 6}, {6, 1}), make({4, 6}, {6, 1}, 23)));
  // Nothing overlaps what has no elements.
  CHECK(!overlap(left, make({0, 6}, {10, 1})));
  CHECK(!overlap(make({4, 0}, {10, 1}), left));
  // Sliding windows of 3 along rows of 5: together they cover all 5 columns... and columns 3 and 4 are theirs too.
  CHECK(overlap(make({3, 2, 3}, {1, 5, 1}), make({2, 2}, {5, 1}, 3)));
  // Backwards.
  CHECK(overlap(make({4, 6}, {-10, 1}, 30), left));
  CHECK(!overlap(make({4, 4}, {-10, 1}, 36), left));
}

Operand random_operand(std::mt19937& random, bool backwards) {
  auto pick = [&](int low, int high) { return int64_t(std::uniform_int_distribution<int>(low, high)(random)); };
  static constexpr int64_t kStrides[] = {0, 1, 1, 1, 2, 3, 5, 5, 10, 10, 20, 40};
  int const rank = int(pick(0, 3));
  std::vector<int64_t> shape, strides;
  for (int i = 0; i < rank; ++i) {
    shape.push_back(pick(0, 20) == 0 ? 0 : pick(1, 4));
    strides.push_back(kStrides[pick(0, 11)] * (backwards && pick(0, 3) == 0 ? -1 : 1));
  }
  return make(shape, strides, pick(0, 60), pick(0, 1) == 0 ? DlDataType{2, 32, 1} : DlDataType{2, 16, 1});
}

// Whatever lies in memory in whatever way: sharing is never missed.
void test_overlap_never_misses() {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    Operand const a = random_operand(random, true), b = random_operand(random, true);
    // The brute force looks at where elements start, so elements have one size.
    if (a.dtype.bits != b.dtype.bits) continue;
    if (share_elements(a, b) && !overlap(a, b)) {
      check::report(__FILE__, __LINE__, "overlap missed: " + describe(a) + " and " + describe(b));
    }
    CHECK_EQUAL(overlap(a, b), overlap(b, a));
  }
}

// Blocks of rows and columns of one buffer, by rows or by columns: the answer is exact.
void test_overlap_is_exact_within_one_buffer() {
  std::mt19937 random(2);
  auto pick = [&](int low, int high) { return int64_t(std::uniform_int_distribution<int>(low, high)(random)); };
  for (int i = 0; i < 100000; ++i) {
    bool const by_columns = pick(0, 1) == 0;
    auto block = [&] {
      int64_t const row = pick(0, 6), column = pick(0, 6), rows = pick(2, 4), columns = pick(1, 4);
      int64_t const pitch = 10, start = row * pitch + column;
      return by_columns ? make({columns, rows}, {1, pitch}, start) : make({rows, columns}, {pitch, 1}, start);
    };
    Operand const a = block(), b = block();
    if (share_elements(a, b) != overlap(a, b)) {
      check::report(__FILE__, __LINE__, "overlap is wrong: " + describe(a) + " and " + describe(b));
    }
  }
}

void test_what_a_plan_refuses() {
  OperandSpec spec;
  spec.layout = make({4, 6}, {6, 1});
  spec.alignment = 16;
  check_operand("a", make({4, 6}, {6, 1}), spec);
  CHECK_THROWS(InvalidOperand, "a is float32 of shape (6, 4)", check_operand("a", make({6, 4}, {4, 1}), spec));
  CHECK_THROWS(InvalidOperand, "strides (1, 4)", check_operand("a", make({4, 6}, {1, 4}), spec));
  CHECK_THROWS(InvalidOperand, "this plan was made for float32 of shape (4, 6)",
               check_operand("a", make({4, 6, 1}, {6, 1, 1}), spec));
  CHECK_THROWS(InvalidOperand, "float16", check_operand("a", make({4, 6}, {6, 1}, 0, {2, 16, 1}), spec));
  CHECK_THROWS(InvalidOperand, "b starts at an address that is a multiple of 4 bytes; this plan was made for 16",
               check_operand("b", make({4, 6}, {6, 1}, 1), spec));
  Operand elsewhere = make({4, 6}, {6, 1});
  elsewhere.device.id = 1;
  CHECK_THROWS(InvalidOperand, "cuda:1", check_operand("a", elsewhere, spec));
  elsewhere.device = {kDlCpu, 0};
  CHECK_THROWS(InvalidOperand, "on cpu", check_operand("a", elsewhere, spec));
}

// A view matches where the operand that is made of it does.
void test_views_match_as_operands_do() {
  std::mt19937 random(11);
  auto const below = [&random](int end) { return int(random() % unsigned(end)); };
  Operand const expected[] = {
      make({4, 6}, {6, 1}), make({4, 1, 6}, {6, 0, 1}),        make({1, 6}, {0, 1}), make({}, {}), make({4, 0}, {1, 1}),
      make({6}, {-1}),      make({4, 6}, {6, 1}, 0, {1, 8, 1})};
  size_t found = 0;
  for (int round = 0; round < 20000; ++round) {
    Operand const& slot = expected[below(7)];
    int64_t shape[kMaxRank], strides[kMaxRank];
    DlTensor view{nullptr, slot.device, slot.rank, slot.dtype, shape, below(2) == 0 ? nullptr : strides, 0};
    for (int i = 0; i < kMaxRank; ++i) {
      shape[i] = below(12) == 0 ? below(7) : slot.shape[i];
      strides[i] = below(12) == 0 ? below(7) : shape[i] == 1 ? below(90) : slot.strides[i];
    }
    switch (below(60)) {
      case 0: view.ndim = below(4); break;
      case 1: view.device.type = kDlCpu; break;
      case 2: view.device.id = 1; break;
      case 3: view.dtype = {17, 4, 2}; break;
      case 4: view.dtype.bits = 16; break;
      case 5: view.dtype.code = 1; break;
      default: break;
    }
    bool const same = matches(operand_from_view(view), slot);
    // Two elements of fp4 as one are told apart by the operand alone, which counts as bytes.
    CHECK_EQUAL(matches(view, slot), same && view.dtype.lanes == 1);
    found += same;
  }
  CHECK(found > 1000);
}

}  // namespace

int main() {
  test_views();
  test_unsigned_strides();
  test_alignment();
  test_descriptions();
  test_overlap_of_known_layouts();
  test_overlap_never_misses();
  test_overlap_is_exact_within_one_buffer();
  test_what_a_plan_refuses();
  test_views_match_as_operands_do();
  return check::result();
}

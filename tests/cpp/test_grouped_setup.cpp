// The setup of grouped GEMM: the device code that finds each group's part of the operands, run by threads of the host.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

namespace {

class Barrier {
 public:
  void expect(int threads) { threads_ = threads; }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    unsigned const round = round_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int threads_ = 0, waiting_ = 0;
  unsigned round_ = 0;
};

// What a device has and a host lacks.
struct Index {
  unsigned x = 0;
};
thread_local Index threadIdx, blockIdx;
Index gridDim;
Barrier block_barrier, warp_barriers[8];
long long exchanged[256];

void __syncthreads() { block_barrier.wait(); }

long long __shfl_up_sync(unsigned, long long value, int step) {
  unsigned const thread = threadIdx.x;
  Barrier& warp = warp_barriers[thread / 32];
  exchanged[thread] = value;
  warp.wait();
  long long const result = int(thread % 32) >= step ? exchanged[thread - unsigned(step)] : value;
  warp.wait();
  return result;
}

using std::max;

}  // namespace

#define __shared__ static
#include "atomr_cutlass/grouped_setup.h"
#undef __shared__

namespace {

using Args = atomr_cutlass_grouped_args;

struct Shape {
  Shape(int m, int n, int k) : m(m), n(n), k(k) {}
  int m, n, k;
};
using Tables = atomr_cutlass::GroupTables<Shape>;

char* const kA = reinterpret_cast<char*>(0x100000000);
char* const kB = reinterpret_cast<char*>(0x200000000);
char* const kC = reinterpret_cast<char*>(0x300000000);
char* const kD = reinterpret_cast<char*>(0x400000000);
char* const kScaleA = reinterpret_cast<char*>(0x500000000);
char* const kScaleB = reinterpret_cast<char*>(0x600000000);

template <class Finder>
void fill(Args const& args) {
  gridDim.x = Finder::blocks(args);
  for (unsigned block = 0; block < gridDim.x; ++block) {
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < unsigned(Finder::kThreads); ++thread) {
      threads.emplace_back([&args, block, thread] {
        threadIdx.x = thread;
        blockIdx.x = block;
        Finder::template fill<Shape>(args);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

struct Problem {
  Problem(int groups, bool given_counts, bool broken) : counts(size_t(groups)), ends(size_t(groups)) {
    std::mt19937 random(unsigned(groups) * 4 + unsigned(given_counts) * 2 + unsigned(broken));
    for (size_t g = 0; g < size(); ++g) {
      counts[g] = random() % 3 == 0 ? 0 : int(random() % 50);
      total += counts[g];
      ends[g] = total;
    }
    if (broken) {
      // Device memory may hold anything.
      for (size_t g = 0; g < size(); g += 3) counts[g] = ends[g] = random() % 2 == 0 ? -7 : 1 << 30;
    }
    memory.resize(Tables::bytes(groups));
    args.groups = groups;
    args.rows_are_counts = given_counts;
    args.offsets = given_counts ? counts.data() : ends.data();
    args.a = kA, args.b = kB, args.d = kD;
    args.workspace = memory.data();
  }

  size_t size() const { return counts.size(); }
  Tables tables() { return Tables(args.workspace, args.groups); }
  char* pointer(Tables::Column column, size_t g) { return tables().column<char*>(column)[g]; }

  std::vector<int32_t> counts, ends;
  int total = 0;
  std::vector<char> memory;
  Args args{};
};

void test_contiguous(Problem problem, bool broken) {
  using Finder = atomr_cutlass::GroupFinder<16, true, 16, true, 32, false>;
  Args& args = problem.args;
  args.form = ATOMR_CUTLASS_GROUPED_CONTIGUOUS;
  args.m = problem.total + 3, args.n = 24, args.k = 16;
  args.lda = 16, args.ldb = args.ldd = 24, args.ldc = 32;
  args.group_stride_b = 24 * 16;
  args.scale_a = kScaleA, args.scale_form_a = 1;
  args.scale_b = kScaleB, args.scale_form_b = 2;
  for (bool const with_c : {false, true}) {
    args.c = with_c ? kC : nullptr;
    fill<Finder>(args);
    int start = 0;
    for (size_t g = 0; g < problem.size(); ++g) {
      Shape const& shape = problem.tables().shapes()[g];
      int64_t const row = (problem.pointer(Tables::kA, g) - kA) / 32;
      CHECK(row >= 0 && shape.m >= 0 && row + shape.m <= args.m);
      if (!broken) {
        CHECK_EQUAL(shape.m, problem.counts[g]);
        CHECK_EQUAL(row, start);
        start += shape.m;
      }
      CHECK(shape.n == 24 && shape.k == 16);
      CHECK(problem.pointer(Tables::kB, g) == kB + g * 24 * 16 * 2);
      CHECK(problem.pointer(Tables::kD, g) == kD + row * 24 * 4);
      // Without a C its tensor map is D's.
      CHECK(problem.pointer(Tables::kC, g) == (with_c ? kC + row * 32 * 4 : kD + row * 24 * 4));
      CHECK_EQUAL(problem.tables().column<int64_t>(Tables::kLdc)[g], with_c ? 32 : 24);
      CHECK(problem.pointer(Tables::kScaleA, g) == kScaleA + row * 4);
      CHECK(problem.pointer(Tables::kScaleB, g) == kScaleB + g * 4);
    }
  }
}

// A bias in the place of C: a row for all groups, or one for each, wherever the group's rows begin.
void test_rows_in_the_place_of_c(Problem problem) {
  using Finder = atomr_cutlass::GroupFinder<16, true, 16, true, 16, false>;
  Args& args = problem.args;
  args.form = ATOMR_CUTLASS_GROUPED_CONTIGUOUS;
  args.m = problem.total, args.n = 24, args.k = 16;
  args.lda = 16, args.ldb = args.ldd = 24, args.ldc = 0;
  args.c = kC;
  for (int64_t const stride : {0, 32}) {
    args.group_stride_c = stride;
    fill<Finder>(args);
    for (size_t g = 0; g < problem.size(); ++g) {
      CHECK(problem.pointer(Tables::kC, g) == kC + int64_t(g) * stride * 2);
      CHECK_EQUAL(problem.tables().column<int64_t>(Tables::kLdc)[g], 0);
    }
  }
}

void test_along_k(Problem problem, bool broken) {
  using Finder = atomr_cutlass::GroupFinder<16, false, 16, true, 16, false>;
  Args& args = problem.args;
  args.form = ATOMR_CUTLASS_GROUPED_K;
  args.m = 8, args.n = 24, args.k = problem.total;
  args.lda = 8, args.ldb = args.ldd = 24;
  args.group_stride_d = 8 * 24;
  fill<Finder>(args);
  int start = 0;
  for (size_t g = 0; g < problem.size(); ++g) {
    Shape const& shape = problem.tables().shapes()[g];
    int64_t const first = (problem.pointer(Tables::kA, g) - kA) / 16;
    CHECK(first >= 0 && shape.k >= 0 && first + shape.k <= args.k);
    if (!broken) {
      CHECK_EQUAL(shape.k, problem.counts[g]);
      CHECK_EQUAL(first, start);
      start += shape.k;
    }
    CHECK(shape.m == 8 && shape.n == 24);
    CHECK(problem.pointer(Tables::kB, g) == kB + first * 24 * 2);
    CHECK(problem.pointer(Tables::kD, g) == kD + g * 8 * 24 * 2);
    CHECK(problem.pointer(Tables::kScaleA, g) == nullptr);
  }
}

void test_masked_with_block_scales(Problem problem) {
  using Finder = atomr_cutlass::GroupFinder<8, true, 8, false, 16, true>;
  Args& args = problem.args;
  args.form = ATOMR_CUTLASS_GROUPED_MASKED;
  args.m = 40, args.n = 128, args.k = 256;
  args.offsets = problem.counts.data();
  args.lda = args.ldb = 256, args.ldd = 128;
  args.group_stride_a = 40 * 256, args.group_stride_b = 128 * 256, args.group_stride_d = 40 * 128;
  args.scale_a = kScaleA, args.scale_b = kScaleB;
  args.scale_stride_a = 2, args.scale_k_stride_a = 1, args.scale_group_stride_a = 80, args.scale_group_stride_b = 2;
  fill<Finder>(args);
  for (size_t g = 0; g < problem.size(); ++g) {
    CHECK_EQUAL(problem.tables().shapes()[g].m, std::min(std::max(problem.counts[g], 0), 40));
    CHECK(problem.pointer(Tables::kA, g) == kA + g * 40 * 256);
    CHECK(problem.pointer(Tables::kB, g) == kB + g * 128 * 256);
    CHECK(problem.pointer(Tables::kD, g) == kD + g * 40 * 128 * 2);
    CHECK(problem.pointer(Tables::kScaleA, g) == kScaleA + g * 320);
    CHECK(problem.pointer(Tables::kScaleB, g) == kScaleB + g * 8);
  }
}

void test_a_list() {
  using Finder = atomr_cutlass::GroupFinder<16, true, 16, true, 16, false>;
  Problem problem(3, false, false);
  std::vector<atomr_cutlass_group> table(3);
  for (int g = 0; g < 3; ++g) {
    table[size_t(g)] = {kA + g, kB + g, g == 0 ? nullptr : kC + g, kD + g, nullptr, nullptr, 16, 24,
                        32,     40,     g == 1 ? -4 : 10 + g,      20 + g, 30 + g,  0};
  }
  problem.args.form = ATOMR_CUTLASS_GROUPED_LIST;
  problem.args.table = table.data();
  problem.args.offsets = nullptr;
  fill<Finder>(problem.args);
  CHECK_EQUAL(problem.tables().shapes()[0].m, 10);
  CHECK_EQUAL(problem.tables().shapes()[1].m, 0);
  CHECK_EQUAL(problem.tables().shapes()[2].k, 32);
  CHECK(problem.pointer(Tables::kC, 0) == kD);
  CHECK_EQUAL(problem.tables().column<int64_t>(Tables::kLdc)[0], 40);
  CHECK(problem.pointer(Tables::kC, 2) == kC + 2);
  CHECK_EQUAL(problem.tables().column<int64_t>(Tables::kLdb)[2], 24);
}

}  // namespace

int main() {
  block_barrier.expect(256);
  for (Barrier& warp : warp_barriers) warp.expect(32);
  for (int const groups : {1, 2, 33, 256, 300}) {
    for (bool const counts : {false, true}) {
      for (bool const broken : {false, true}) {
        test_contiguous(Problem(groups, counts, broken), broken);
        test_along_k(Problem(groups, counts, broken), broken);
      }
    }
    test_masked_with_block_scales(Problem(groups, true, true));
    test_rows_in_the_place_of_c(Problem(groups, true, false));
  }
  test_a_list();
  return check::result();
}

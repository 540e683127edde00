// Plans of GEMM over a driver whose device memory is the host's: what is put to a kernel, and what is refused before.
#include "gemm_plan.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "check.h"
#include "driver.h"
#include "errors.h"
#include "fake_libraries.h"

using namespace atomr_cutlass;

namespace {

// What the fake kernel saw.
struct Seen {
  std::vector<atomr_cutlass_gemm_args> launches;
  std::vector<void*> streams;
  int prepared = 0;
  int status = 0;
  uint64_t workspace = 0, clear_bytes = 0;
  uint32_t bits = 0;  // of the kernel
  std::vector<uint32_t> launch_bits;
  int supports = ATOMR_CUTLASS_OK;
} seen;

int supports(atomr_cutlass_row const*, void const*) { return seen.supports; }

int workspace_size(atomr_cutlass_row const*, void const*, uint64_t* bytes) {
  *bytes = seen.workspace;
  return ATOMR_CUTLASS_OK;
}

int prepare(atomr_cutlass_row const*, void const* args, void* params, atomr_cutlass_launch* launch) {
  std::memcpy(params, args, sizeof(atomr_cutlass_gemm_args));
  *launch = {};
  launch->grid[0] = 7;
  launch->clear_bytes = seen.clear_bytes;
  launch->padding = seen.bits;
  ++seen.prepared;
  return ATOMR_CUTLASS_OK;
}

int launch(atomr_cutlass_row const*, void const* params, atomr_cutlass_launch const* geometry, void* stream) {
  seen.launches.push_back(*static_cast<atomr_cutlass_gemm_args const*>(params));
  seen.launch_bits.push_back(geometry->padding);
  seen.streams.push_back(stream);
  return seen.status;
}

atomr_cutlass_row const kRow = {
    "cutlass_fake",  "{}",     "",     sizeof(atomr_cutlass_gemm_args), 16, 1024, 128, 0, 13000, nullptr, &supports,
    &workspace_size, &prepare, &launch};

std::shared_ptr<atomr_cutlass_row const> row() {
  return {&kRow, [](atomr_cutlass_row const*) {}};
}

alignas(16) float a_memory[256], b_memory[256], c_memory[256], d_memory[256];

Operand operand(float* data, std::vector<int64_t> const& shape, std::vector<int64_t> const& strides) {
  Operand made;
  made.data = data;
  made.device = {kDlCuda, 0};
  made.dtype = {2, 32, 1};
  made.rank = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    made.shape[i] = shape[i];
    made.strides[i] = shape[i] == 1 ? 0 : strides[i];
  }
  return made;
}

OperandSpec spec(Operand const& layout) {
  OperandSpec made;
  made.layout = layout;
  made.alignment = 4;
  return made;
}

// D (4 x 6) = A (4 x 5) B (5 x 6).
struct Problem {
  Operand a = operand(a_memory, {4, 5}, {5, 1});
  Operand b = operand(b_memory, {5, 6}, {6, 1});
  Operand c = operand(c_memory, {4, 6}, {6, 1});
  Operand d = operand(d_memory, {4, 6}, {6, 1});
  atomr_cutlass_gemm_args args{};
  GemmPlanOptions gemm;
  LaunchPlanOptions options = with_zeros(128);

  Problem() {
    args.m = 4, args.n = 6, args.k = 5, args.batch = 1;
    args.lda = 5, args.ldb = args.ldc = args.ldd = 6;
    seen = {};
  }

  LaunchPlan plan(DlExchangeApi const* allocator = nullptr) const {
    return {gemm_slots(spec(a), spec(b), spec(c), spec(d)), {}, gemm_steps(row(), args, gemm), options, allocator};
  }
};

void test_a_launch_is_given_the_callers_pointers() {
  Problem problem;
  LaunchPlan plan = problem.plan();
  CHECK_EQUAL(plan.main().geometry().grid[0], 7u);
  CHECK_EQUAL(plan.workspace_bytes(), 0u);
  void* const stream = reinterpret_cast<void*>(uintptr_t(42));
  launch_gemm(plan, problem.a, problem.b, &problem.c, problem.d, 2.0, 3.0, stream);
  CHECK_EQUAL(seen.launches.size(), 1u);
  atomr_cutlass_gemm_args const& got = seen.launches[0];
  CHECK(got.a == a_memory && got.b == b_memory && got.c == c_memory && got.d == d_memory);
  CHECK_EQUAL(got.alpha, 2.0);
  CHECK_EQUAL(got.beta, 3.0);
  CHECK_EQUAL(got.k, 5);
  CHECK(seen.streams[0] == stream);
  launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, stream);
  CHECK(seen.launches[1].c == nullptr);
  CHECK(fake::device().current == nullptr);  // the caller's context is back
}

void test_equal_launches_are_prepared_once() {
  Problem problem;
  LaunchPlan plan = problem.plan();
  int const before = seen.prepared;
  for (int i = 0; i < 3; ++i) launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
  CHECK_EQUAL(seen.prepared, before + 1);
  launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 2.0, 0.0, nullptr);
  CHECK_EQUAL(seen.launches.back().alpha, 2.0);
  // By then it is known how parameters follow from pointers and scalars.
  int const known = seen.prepared;
  for (int i = 0; i < 3; ++i) {
    Operand a = problem.a;
    a.data = a_memory + 4 * i;
    launch_gemm(plan, a, problem.b, nullptr, problem.d, 3.0 + i, 0.0, nullptr);
    CHECK_EQUAL(seen.launches.back().alpha, 3.0 + i);
    CHECK(seen.launches.back().a == a.data && seen.launches.back().b == b_memory && seen.launches.back().c == nullptr);
  }
  CHECK_EQUAL(seen.prepared, known);
}

void test_swapped_operands_change_places() {
  Problem problem;
  problem.gemm.swapped = true;
  problem.gemm.launches = {{0, 0, 0, 0, 1}, {16, 32, 48, 64, 3}};
  LaunchPlan plan = problem.plan();
  launch_gemm(plan, problem.a, problem.b, &problem.c, problem.d, 1.0, 1.0, nullptr);
  CHECK_EQUAL(seen.launches.size(), 2u);
  CHECK(seen.launches[0].a == b_memory && seen.launches[0].b == a_memory);
  CHECK(seen.launches[1].a == b_memory + 8);
  CHECK(seen.launches[1].b == a_memory + 4);
  CHECK(seen.launches[1].c == c_memory + 12);
  CHECK(seen.launches[1].d == d_memory + 16);
  CHECK_EQUAL(seen.launches[1].batch, 3);
}

void test_a_product_of_nothing_reads_zeros() {
  Problem problem;
  LaunchPlan plan = problem.plan();
  for (float& value : a_memory) value = std::numeric_limits<float>::quiet_NaN();
  launch_gemm(plan, problem.a, problem.b, &problem.c, problem.d, 0.0, 1.0, nullptr);
  atomr_cutlass_gemm_args const& got = seen.launches[0];
  CHECK(got.a != a_memory && got.b != b_memory && got.a == got.b);
  CHECK_EQUAL(got.k, 4);
  CHECK_EQUAL(got.lda, 4);
  CHECK_EQUAL(got.ldb, 8);
  for (int i = 0; i < 32; ++i) CHECK_EQUAL(static_cast<float const*>(got.a)[i], 0.0f);

  problem.args.k = 0;
  problem.a = operand(a_memory, {4, 0}, {1, 1});
  problem.b = operand(b_memory, {0, 6}, {6, 1});
  LaunchPlan empty = problem.plan();
  launch_gemm(empty, problem.a, problem.b, &problem.c, problem.d, 5.0, 1.0, nullptr);
  CHECK_EQUAL(seen.launches.back().alpha, 0.0);
  CHECK_EQUAL(seen.launches.back().k, 4);
}

void test_a_kernel_that_waits_itself_starts_early() {
  for (bool const swapped : {false, true}) {
    Problem problem;
    problem.gemm.swapped = swapped;
    seen.bits = ATOMR_CUTLASS_LAUNCH_DEPENDENT;
    LaunchPlan plan = problem.plan();
    int const prepared = seen.prepared;
    auto const launch = [&](double alpha = 1.0) {
      launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, alpha, 0.0, nullptr);
      return seen.launch_bits.back();
    };
    CHECK_EQUAL(launch(), unsigned(ATOMR_CUTLASS_LAUNCH_DEPENDENT));
    CHECK_EQUAL(seen.launches.back().settled, 0);
    // Its zeros have just been cleared.
    CHECK_EQUAL(launch(0.0), 0u);
    set_dependent_launch(false);
    CHECK_EQUAL(launch(), 0u);
    set_dependent_launch(true);
    fake::device().capturing = true;
    CHECK_EQUAL(launch(), unsigned(ATOMR_CUTLASS_LAUNCH_DEPENDENT));
    fake::device().capturing = false;
    // A settled B may be read before the launch before has ended, but for the zeros that stand in for it.
    problem.b.settled = true;
    CHECK_EQUAL(launch(), unsigned(ATOMR_CUTLASS_LAUNCH_DEPENDENT));
    CHECK_EQUAL(seen.launches.back().settled, int(swapped ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED));
    launch(0.0);
    CHECK_EQUAL(seen.launches.back().settled, 0);
    CHECK(seen.prepared > prepared);
  }
  // Other kernels are launched as ever, and so is one whose workspace is cleared before it.
  Problem problem;
  problem.b.settled = true;
  LaunchPlan plain = problem.plan();
  launch_gemm(plain, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
  CHECK_EQUAL(seen.launch_bits.back(), 0u);
  CHECK_EQUAL(seen.launches.back().settled, 0);
  seen.bits = ATOMR_CUTLASS_LAUNCH_DEPENDENT;
  seen.workspace = seen.clear_bytes = 64;
  LaunchPlan cleared = problem.plan();
  launch_gemm(cleared, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
  CHECK_EQUAL(seen.launch_bits.back(), 0u);
}

void test_each_stream_has_a_workspace_of_its_own() {
  Problem problem;
  seen.workspace = 1024;
  seen.clear_bytes = 256;
  int const allocations = fake::device().allocations, frees = fake::device().frees;
  {
    LaunchPlan plan = problem.plan();
    CHECK_EQUAL(plan.workspace_bytes(), 1024u);
    CHECK_EQUAL(fake::device().allocations, allocations + 1);
    int const clears = fake::device().clears;
    void* const streams[] = {nullptr, reinterpret_cast<void*>(uintptr_t(1)), nullptr};
    for (void* const stream : streams) launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, stream);
    CHECK_EQUAL(fake::device().clears, clears + 3 + 1);  // the second stream's workspace is new
    // The first stream took the block that was there.
    CHECK_EQUAL(fake::device().allocations, allocations + 2);
    CHECK(seen.launches[0].workspace != seen.launches[1].workspace);
    CHECK(seen.launches[0].workspace == seen.launches[2].workspace);
    // A graph may be replayed beside the stream that it was captured on.
    fake::device().capturing = true;
    launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
    fake::device().capturing = false;
    CHECK(seen.launches[3].workspace != seen.launches[0].workspace);
    CHECK(seen.launches[3].workspace != seen.launches[1].workspace);
  }
  CHECK_EQUAL(fake::device().allocations, allocations + 3);
  // What a graph uses outlives the plan, as the graph may.
  CHECK_EQUAL(fake::device().frees, frees + 2);
}

void test_a_plan_may_go_while_its_launches_run() {
  Problem problem;
  seen.workspace = 1024;
  int const frees = fake::device().frees;
  {
    LaunchPlan plan = problem.plan();
    launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
    fake::device().busy = true;
  }
  CHECK_EQUAL(fake::device().frees, frees);
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees);
  fake::device().busy = false;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees + 1);
  CHECK_EQUAL(fake::device().events, 0);
}

void test_wrong_operands_launch_nothing() {
  Problem problem;
  LaunchPlan plan = problem.plan();
  auto launch = [&](Operand const& a, Operand const& b, Operand const* c, Operand const& d, double alpha, double beta) {
    launch_gemm(plan, a, b, c, d, alpha, beta, nullptr);
  };
  Problem const& p = problem;
  CHECK_THROWS(InvalidOperand, "a is float32 of shape (5, 4)",
               launch(operand(a_memory, {5, 4}, {4, 1}), p.b, nullptr, p.d, 1, 0));
  CHECK_THROWS(InvalidOperand, "b is", launch(p.a, p.a, nullptr, p.d, 1, 0));
  CHECK_THROWS(InvalidOperand, "c is", launch(p.a, p.b, &p.a, p.d, 1, 1));
  CHECK_THROWS(InvalidOperand, "out is", launch(p.a, p.b, nullptr, p.a, 1, 0));
  CHECK_THROWS(InvalidOperand, "beta is not 0, so c is needed", launch(p.a, p.b, nullptr, p.d, 1, 1));
  CHECK_THROWS(InvalidOperand, "c is given but beta is 0", launch(p.a, p.b, &p.c, p.d, 1, 0));
  Operand sealed = p.d;
  sealed.read_only = true;
  CHECK_THROWS(InvalidOperand, "out is read-only", launch(p.a, p.b, nullptr, sealed, 1, 0));
  CHECK_THROWS(InvalidOperand, "out overlaps a",
               launch(p.a, p.b, nullptr, operand(a_memory + 8, {4, 6}, {6, 1}), 1, 0));
  CHECK_THROWS(InvalidOperand, "out overlaps b",
               launch(p.a, p.b, nullptr, operand(b_memory + 8, {4, 6}, {6, 1}), 1, 0));
  CHECK_THROWS(InvalidOperand, "out overlaps c", launch(p.a, p.b, &p.c, operand(c_memory + 1, {4, 6}, {6, 1}), 1, 1));
  Operand odd = p.a;
  odd.data = reinterpret_cast<char*>(a_memory) + 2;
  CHECK_THROWS(InvalidOperand, "multiple of 2 bytes; this plan was made for 4", launch(odd, p.b, nullptr, p.d, 1, 0));
  CHECK_EQUAL(seen.launches.size(), 0u);
  launch(p.a, p.b, &p.c, p.c, 1, 1);  // out may be c
  CHECK_EQUAL(seen.launches.size(), 1u);
}

void test_out_may_not_be_one_batch_of_its_own_c() {
  Problem problem;
  problem.args.batch = 2;
  problem.a = operand(a_memory, {2, 4, 5}, {20, 5, 1});
  problem.d = operand(d_memory, {2, 4, 6}, {24, 6, 1});
  problem.c = operand(c_memory, {4, 6}, {6, 1});
  LaunchPlan plan = problem.plan();
  Operand first = problem.c;
  first.data = d_memory;
  CHECK_THROWS(InvalidOperand, "out overlaps c",
               launch_gemm(plan, problem.a, problem.b, &first, problem.d, 1.0, 1.0, nullptr));
  CHECK_EQUAL(seen.launches.size(), 0u);
}

void test_integers_take_whole_scalars() {
  Problem problem;
  problem.options.integral = true;
  LaunchPlan plan = problem.plan();
  launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 3.0, 0.0, nullptr);
  for (double const alpha : {0.5, std::nan("")}) {
    CHECK_THROWS(InvalidOperand, "must be whole numbers",
                 launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, alpha, 0.0, nullptr));
  }
  CHECK_EQUAL(seen.launches.size(), 1u);
}

void test_failures_are_typed() {
  Problem problem;
  LaunchPlan plan = problem.plan();
  auto launch = [&] { launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr); };
  seen.status = 1;
  CHECK_THROWS(LibraryFailure, "launching cutlass_fake: SOME_ERROR (what the driver says)", launch());
  for (int const sticky : {700, 716, 719}) {
    seen.status = sticky;
    CHECK_THROWS(ContextPoisoned, "restart the process", launch());
  }
  seen.status = ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  CHECK_THROWS(Unsupported, "cannot implement this problem", launch());
  seen.status = ATOMR_CUTLASS_OK;
  launch();
  seen.supports = ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  CHECK_THROWS(Unsupported, "cutlass_fake cannot implement this problem", problem.plan());
  problem.args.width = 64;
  CHECK_THROWS(Unsupported, "cutlass_fake has tiles of one width: the launch option width must be 0, not 64",
               problem.plan());
  problem.args.width = 0;
  problem.options.device = 1;
  CHECK_THROWS(DeviceUnavailable, "there is no GPU 1: 1 visible", problem.plan());
}

void test_waiting_for_the_device_may_fail() {
  DeviceGuard guard(0);
  synchronize_device();
  fake::device().synchronize_status = 1;
  CHECK_THROWS(LibraryFailure, "waiting for the device: SOME_ERROR (what the driver says)", synchronize_device());
  fake::device().synchronize_status = 700;
  CHECK_THROWS(ContextPoisoned, "restart the process", synchronize_device());
  fake::device().synchronize_status = 0;
}

// A launch that fails leaves memory that those before it use: its end is noted, and the next launch takes it again.
void test_a_failed_launch_keeps_no_memory() {
  Problem problem;
  seen.workspace = 1024;
  int const allocations = fake::device().allocations;
  {
    LaunchPlan plan = problem.plan();
    for (uint64_t incarnation = 1; incarnation <= 40; ++incarnation) {
      fake::device().incarnation = incarnation;
      seen.status = 1;
      CHECK_THROWS(LibraryFailure, "SOME_ERROR",
                   launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr));
      seen.status = 0;
      launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 0.0, 0.0, nullptr);
    }
  }
  fake::device().incarnation = 0;
  CHECK_EQUAL(fake::device().allocations, allocations + 2);  // the workspace, and zeros
}

void test_frameworks_allocate() {
  static int deleted = 0;
  alignas(256) static char memory[4096];
  DlExchangeApi api{};
  api.version = {1, 3};
  api.current_stream = [](auto, int32_t, void** stream) { return *stream = nullptr, 0; };
  static constexpr int kRelaxed = 2;  // another stream may be captured meanwhile: CU_STREAM_CAPTURE_MODE_RELAXED
  api.allocate = [](DlTensor* prototype, DlManagedVersioned** out, void*, auto) {
    CHECK_EQUAL(fake::device().capture_mode, kRelaxed);
    auto* made = new DlManagedVersioned{};
    made->tensor = *prototype;
    made->tensor.data = memory;
    made->deleter = [](DlManagedVersioned* managed) {
      CHECK_EQUAL(fake::device().capture_mode, kRelaxed);
      ++deleted, delete managed;
    };
    *out = made;
    return 0;
  };
  Problem problem;
  seen.workspace = 512;
  {
    LaunchPlan plan = problem.plan(&api);
    launch_gemm(plan, problem.a, problem.b, nullptr, problem.d, 1.0, 0.0, nullptr);
    CHECK(seen.launches[0].workspace == memory);
  }
  CHECK_EQUAL(deleted, 1);
  CHECK_EQUAL(fake::device().capture_mode, 0);
  api.allocate = [](DlTensor*, DlManagedVersioned**, void* context, auto set_error) {
    set_error(context, "OutOfMemory", "tried to allocate 512 bytes");
    return -1;
  };
  CHECK_THROWS(LibraryFailure, "OutOfMemory: tried to allocate 512 bytes", problem.plan(&api));
  CHECK_EQUAL(fake::device().capture_mode, 0);
}

}  // namespace

int main() {
  fake::libraries()["libcuda.so.1"] = fake::driver();
  CHECK(driver_available());
  CHECK_EQUAL(device_count(), 1);
  CHECK_EQUAL(device_properties(0).name, "a fake GPU");
  CHECK_EQUAL(device_properties(0).major, 9);
  // Attributes 36 and 37, kHz and bits, are their numbers there.
  CHECK_EQUAL(device_properties(0).memory_bytes_per_second, 2000u * 36 * 37 / 8);
  CHECK_THROWS(DeviceUnavailable, "there is no GPU 1: 1 visible", device_properties(1));
  CHECK_THROWS(DeviceUnavailable, "there is no GPU -1: 1 visible", DeviceGuard(-1));
  test_a_launch_is_given_the_callers_pointers();
  test_equal_launches_are_prepared_once();
  test_swapped_operands_change_places();
  test_a_product_of_nothing_reads_zeros();
  test_a_kernel_that_waits_itself_starts_early();
  test_each_stream_has_a_workspace_of_its_own();
  test_a_plan_may_go_while_its_launches_run();
  test_wrong_operands_launch_nothing();
  test_out_may_not_be_one_batch_of_its_own_c();
  test_integers_take_whole_scalars();
  test_failures_are_typed();
  test_waiting_for_the_device_may_fail();
  test_a_failed_launch_keeps_no_memory();
  test_frameworks_allocate();
  return check::result();
}

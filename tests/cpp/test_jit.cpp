// Kernels compiled at run time, over a driver whose device is the host: what their companion is asked, and how its
// answer serves launches with other pointers and scalars.
#include "jit.h"

#include <cstring>
#include <list>
#include <vector>

#include "atomr_cutlass/abi_layout.h"
#include "atomr_cutlass/small_tensor_map.h"
#include "check.h"
#include "driver.h"
#include "errors.h"
#include "fake_libraries.h"
#include "gemm_plan.h"

using namespace atomr_cutlass;

namespace {

using Args = atomr_cutlass_gemm_args;

// Parameters as CUTLASS's might be: pointers with and without a distance, scalars of every width, a tensor map.
struct Params {
  alignas(64) unsigned char map[128];
  void const* a;
  char* end_of_d;
  void* barriers;
  double alpha;
  float beta;
  int32_t whole_alpha;
  int32_t m, k;
  uint64_t leap;  // what a test makes depend on the arguments in its own way
};

uint64_t (*leap)(Args const&) = [](Args const&) { return uint64_t(5); };
std::vector<Args> asked;
std::vector<Params> launched;

Params evaluate(Args const& args) {
  Params made{};
  atomr_cutlass_tensor_map_request request{};
  request.magic = ATOMR_CUTLASS_TENSOR_MAP_MAGIC;
  request.address = reinterpret_cast<uint64_t>(args.c != nullptr ? args.c : args.b) + 256;
  request.rank = 3;
  request.dims[0] = uint64_t(args.k);
  std::memcpy(made.map, &request, sizeof(request));
  made.a = args.a;
  made.end_of_d = static_cast<char*>(args.d) + args.ldd * args.m;
  made.barriers = static_cast<char*>(args.workspace) + 512;
  made.alpha = args.alpha;
  made.beta = float(args.beta);
  made.whole_alpha = int32_t(args.alpha);
  made.m = args.m;
  made.k = args.k;
  made.leap = leap(args);
  return made;
}

std::string const kKernelImage = "kernel";

// The images of the fake driver: a companion begins with its constant and that one's size.
struct Companion {
  size_t bytes = sizeof(atomr_cutlass_jit_info);
  atomr_cutlass_jit_info info = {abi::kLayoutDigest, sizeof(Params), alignof(Params), 100 << 10, 384, {2, 1, 1}, 0};
};

void launch(void* function, void** arguments) {
  if (*static_cast<char const*>(function) == 'k') {
    launched.push_back(*static_cast<Params const*>(arguments[0]));
    return;
  }
  auto const* problems = reinterpret_cast<Args const*>(*static_cast<uint64_t*>(arguments[0]));
  auto* results = reinterpret_cast<unsigned char*>(*static_cast<uint64_t*>(arguments[1]));
  uint64_t const stride = *static_cast<uint64_t*>(arguments[2]);
  for (int i = 0; i < 2; ++i) {
    asked.push_back(problems[i]);
    atomr_cutlass_jit_evaluation answer{};
    answer.implementable = problems[i].n % 8 == 0;
    answer.grid[0] = uint32_t(problems[i].m);
    answer.setup_grid[0] = 2;
    answer.workspace_bytes = 1024;
    answer.clear_bytes = 64;
    std::memcpy(results + i * stride, &answer, sizeof(answer));
    Params const params = evaluate(problems[i]);
    std::memcpy(results + i * stride + ATOMR_CUTLASS_JIT_PARAMS_OFFSET, &params, sizeof(params));
  }
}

std::shared_ptr<JitKernel> kernel(uint32_t setup_threads = 0, Companion companion = {}) {
  companion.info.setup_threads = setup_threads;
  // The images live as long as the kernel does: a fake library is its image.
  static std::list<std::string> images;
  images.emplace_back(reinterpret_cast<char const*>(&companion), sizeof(companion));
  return std::make_shared<JitKernel>("cutlass_jit", "{}", kKernelImage, images.back());
}

Args problem() {
  Args args{};
  args.m = 4, args.n = 8, args.k = 16, args.batch = 1;
  args.lda = 16, args.ldb = args.ldc = args.ldd = 8;
  return args;
}

template <class Value>
Value* at(uint64_t address) {
  return reinterpret_cast<Value*>(address);
}

Args given(uint64_t base) {
  Args args = problem();
  args.a = at<void>(base + 0x1000);
  args.b = at<void>(base + 0x2000);
  args.d = at<void>(base + 0x3000);
  args.workspace = at<void>(base + 0x4000);
  args.alpha = 0.25 * double(base / 0x100000);
  args.beta = -3.0;
  return args;
}

void test_parameters_follow_pointers_and_scalars() {
  DeviceGuard guard(0);
  auto const row = make_jit_row(kernel(), *args_of("gemm"));
  CHECK_EQUAL(row->params_bytes, sizeof(Params));
  CHECK_EQUAL(row->shared_bytes, 100u << 10);
  asked.clear();
  for (bool const with_c : {false, true}) {
    for (uint64_t const base : {0x100000ull, 0x7ff00000000ull, 0x900000ull}) {
      Args args = given(base);
      args.c = with_c ? at<void>(base + 0x5000) : nullptr;
      alignas(128) Params made;
      atomr_cutlass_launch launch;
      CHECK_EQUAL(row->supports(row.get(), &args), ATOMR_CUTLASS_OK);
      CHECK_EQUAL(row->prepare(row.get(), &args, &made, &launch), ATOMR_CUTLASS_OK);
      Params const wanted = evaluate(args);
      CHECK_EQUAL(made.a, wanted.a);
      CHECK(made.end_of_d == wanted.end_of_d);
      CHECK_EQUAL(made.barriers, wanted.barriers);
      CHECK_EQUAL(made.alpha, wanted.alpha);
      CHECK_EQUAL(made.beta, wanted.beta);
      CHECK_EQUAL(made.whole_alpha, wanted.whole_alpha);
      CHECK_EQUAL(made.k, 16);
      CHECK_EQUAL(made.leap, 5u);
      // Encoded once, and moved to where this call's operand is.
      uint64_t address = 0;
      std::memcpy(&address, made.map, sizeof(address));
      CHECK_EQUAL(address, reinterpret_cast<uint64_t>(with_c ? args.c : args.b) + 256);
      CHECK_EQUAL(int(made.map[100]), 0xab);
      CHECK_EQUAL(launch.grid[0], 4u);
      CHECK_EQUAL(launch.block[0], 384u);
      CHECK_EQUAL(launch.cluster[0], 2u);
      CHECK_EQUAL(launch.clear_bytes, 64u);
    }
  }
  // Twice for each problem, whatever the calls: with a C and without.
  CHECK_EQUAL(asked.size(), 4u);
  CHECK_EQUAL(asked[0].max_active_clusters, 66);
}

bool has_bit_85(void const* map) { return (static_cast<unsigned char const*>(map)[10] & 1 << 5) != 0; }

// The fake driver sets the bit in every tensor map. The map of `evaluate` is of a small array.
void test_small_tensor_maps_are_corrected_from_sm_100_on() {
  DeviceGuard guard(0);
  for (int const major : {9, 10, 12}) {
    fake::device().major = major;
    auto const row = make_jit_row(kernel(), *args_of("gemm"));
    Args const args = given(0x100000);
    alignas(128) Params made;
    atomr_cutlass_launch launch;
    CHECK_EQUAL(row->prepare(row.get(), &args, &made, &launch), ATOMR_CUTLASS_OK);
    CHECK_EQUAL(has_bit_85(made.map), major == 9);
  }
  fake::device().major = 9;
}

void test_which_tensor_maps_are_small() {
  struct Case {
    int type;
    uint64_t dims[3], strides[2];
    bool small;
  };
  // CUtensorMapDataType: 0 bytes, 9 bf16, 14 fp4.
  Case const cases[] = {
      {9, {64, 1024, 1}, {128, 0}, false},  // 128 KiB, dense
      {9, {64, 1023, 1}, {128, 0}, true},
      {9, {64, 17, 1}, {8192, 0}, false},  // rows far apart: the last one ends
                                           // beyond
      {9, {64, 16, 1}, {8192, 0}, true},
      {0, {1, 1, 2}, {16, 131071}, false},
      {0, {1, 1, 2}, {16, 131070}, true},
      {14, {128, 2048, 1}, {64, 0}, false},
      {14, {128, 2047, 1}, {64, 0}, true},
  };
  for (Case const& one : cases) {
    unsigned char map[128];
    std::memset(map, 0xff, sizeof(map));
    correct_small_tensor_map(map, one.type, 3, one.dims, one.strides);
    CHECK_EQUAL(has_bit_85(map), !one.small);
    map[10] |= 1 << 5;
    for (unsigned char const byte : map) CHECK_EQUAL(int(byte), 0xff);  // nothing else was touched
  }
}

void test_a_setup_kernel_runs_first() {
  DeviceGuard guard(0);
  for (uint32_t const threads : {0u, 64u}) {
    auto const row = make_jit_row(kernel(threads), *args_of("gemm"));
    Args const args = given(0x100000);
    alignas(128) Params made;
    atomr_cutlass_launch launch;
    CHECK_EQUAL(row->prepare(row.get(), &args, &made, &launch), ATOMR_CUTLASS_OK);
    CHECK_EQUAL(launch.setup_grid[0], 2u);
    launched.clear();
    CHECK_EQUAL(row->launch(row.get(), &made, &launch, nullptr), 0);
    // With the same parameters: the fake driver has one function for all kernels of an image.
    CHECK_EQUAL(launched.size(), threads == 0 ? 1u : 2u);
    CHECK(launched.front().a == args.a && launched.back().a == args.a);
  }
}

void test_a_kernel_of_other_headers_is_refused() {
  DeviceGuard guard(0);
  Companion other;
  other.info.layout_digest += 1;
  CHECK_THROWS(LibraryFailure, "cutlass_jit was compiled with headers whose structs (kernel_abi.h, jit_abi.h) have",
               make_jit_row(kernel(0, other), *args_of("gemm")));
  CHECK_THROWS(LibraryFailure, "of one build", make_jit_row(kernel(0, other), *args_of("gemm")));
  Companion shorter;
  shorter.bytes -= 8;
  CHECK_THROWS(LibraryFailure, "cutlass_jit_info has 32 bytes, not 40: reinstall atomr_cutlass, so that",
               make_jit_row(kernel(0, shorter), *args_of("gemm")));
}

void test_a_problem_that_the_kernel_cannot_do() {
  DeviceGuard guard(0);
  auto const row = make_jit_row(kernel(), *args_of("gemm"));
  Args args = given(0x100000);
  args.n = 7;
  CHECK_EQUAL(row->supports(row.get(), &args), int(ATOMR_CUTLASS_CANNOT_IMPLEMENT));
}

void test_parameters_that_nothing_explains_are_refused() {
  DeviceGuard guard(0);
  Args const args = given(0x100000);
  leap = [](Args const& seen) { return reinterpret_cast<uint64_t>(seen.a) * 3; };
  auto const row = make_jit_row(kernel(), *args_of("gemm"));
  CHECK_THROWS(LibraryFailure, "in an unknown way", row->supports(row.get(), &args));
  // A difference of an odd width is as unexplained.
  Args second = args;
  second.a = at<void>(0x7777000);
  unsigned char bytes[2][3] = {{0, 0, 1}, {0, 0, 2}};
  CHECK(!find_relocations(*args_of("gemm"), &args, &second, bytes[0], bytes[1], 3));
  leap = [](Args const&) { return uint64_t(5); };
}

Operand operand(void* data, std::vector<int64_t> const& shape) {
  Operand made;
  made.data = data;
  made.device = {kDlCuda, 0};
  made.dtype = {2, 32, 1};
  made.rank = 2;
  made.shape[0] = shape[0], made.shape[1] = shape[1];
  made.strides[0] = shape[1], made.strides[1] = 1;
  return made;
}

void test_a_plan_asks_before_its_launches_do() {
  alignas(128) static float memory[4][1024];
  Operand const a = operand(memory[0], {4, 16}), b = operand(memory[1], {16, 8});
  Operand const c = operand(memory[2], {4, 8}), d = operand(memory[3], {4, 8});
  DeviceGuard guard(0);
  asked.clear();
  launched.clear();
  LaunchPlan plan(gemm_slots({a}, {b}, {c}, {d}), {},
                  gemm_steps(make_jit_row(kernel(), *args_of("gemm")), problem(), {}), with_zeros(128), nullptr);
  size_t const before = asked.size();
  CHECK(before > 0);
  launch_gemm(plan, a, b, nullptr, d, 1.0, 0.0, nullptr);
  launch_gemm(plan, a, b, &c, d, 2.0, 3.0, nullptr);
  launch_gemm(plan, a, b, nullptr, d, 0.0, 0.0, nullptr);  // A and B are not read
  fake::device().capturing = true;
  launch_gemm(plan, a, b, &c, d, 0.0, 1.0, nullptr);
  fake::device().capturing = false;
  CHECK_EQUAL(asked.size(), before);
  CHECK_EQUAL(launched.size(), 4u);
  CHECK_EQUAL(launched[0].a, static_cast<void const*>(memory[0]));
  CHECK_EQUAL(launched[1].alpha, 2.0);
  CHECK(launched[2].a != static_cast<void const*>(memory[0]));
  CHECK_EQUAL(launched[2].k, 4);
}

void test_a_better_plan_takes_over_but_never_in_a_capture() {
  alignas(128) static float memory[4][1024];
  Operand const a = operand(memory[0], {4, 16}), b = operand(memory[1], {16, 8}), d = operand(memory[3], {4, 8});
  Operand odd = a;
  odd.data = memory[0] + 1;
  DeviceGuard guard(0);
  OperandSpec const any{a, 4}, aligned{a, 128};
  auto const plan_of = [&](OperandSpec const& left) {
    return std::make_unique<LaunchPlan>(gemm_slots(left, {b, 4}, {d, 4}, {d, 4}), std::vector<size_t>{},
                                        gemm_steps(make_jit_row(kernel(), *args_of("gemm")), problem(), {}),
                                        with_zeros(128), nullptr);
  };
  auto const first = plan_of(any);
  leap = [](Args const&) { return uint64_t(6); };
  auto const second = plan_of(aligned);
  leap = [](Args const&) { return uint64_t(5); };
  launched.clear();
  auto const run = [&](Operand const& left) {
    launch_gemm(*first, left, b, nullptr, d, 1.0, 0.0, nullptr);
    return launched.back().leap;
  };
  CHECK_EQUAL(run(a), 5u);
  first->replace(second.get());
  fake::device().capturing = true;
  CHECK_EQUAL(run(a), 5u);
  fake::device().capturing = false;
  CHECK_EQUAL(run(a), 6u);
  CHECK(&first->serving() == second.get());
  CHECK_EQUAL(run(odd), 5u);
  fake::device().capturing = true;
  CHECK_EQUAL(run(a), 5u);  // a graph that began with the first goes on with it
  fake::device().capture = 78;
  CHECK_EQUAL(run(a), 6u);  // it had taken over before this one
  fake::device().capturing = false;
}

}  // namespace

int main() {
  fake::Symbols symbols = fake::driver();
  for (auto const& one : fake::library_driver()) symbols.insert(one);
  fake::libraries()["libcuda.so.1"] = symbols;
  fake::device().launch = &launch;
  test_parameters_follow_pointers_and_scalars();
  test_small_tensor_maps_are_corrected_from_sm_100_on();
  test_which_tensor_maps_are_small();
  test_a_setup_kernel_runs_first();
  test_a_kernel_of_other_headers_is_refused();
  test_a_problem_that_the_kernel_cannot_do();
  test_parameters_that_nothing_explains_are_refused();
  test_a_plan_asks_before_its_launches_do();
  test_a_better_plan_takes_over_but_never_in_a_capture();
  return check::result();
}

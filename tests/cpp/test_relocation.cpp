// How parameters follow from arguments: what is found is what the kernel would have evaluated, or nothing.
#include "relocation.h"

#include <cstring>

#include "check.h"
#include "driver.h"
#include "fake_libraries.h"
#include "kernel_launch.h"

using namespace atomr_cutlass;

namespace {

using Args = atomr_cutlass_gemm_args;

// Parameters of a prebuilt kernel: a tensor map looks as the driver likes, here with the address at its end, inverted.
struct Params {
  alignas(64) unsigned char map[128];
  uint64_t end_of_d;
  float alpha;
  int32_t m;
  uint64_t barriers;
  uint64_t odd;
};

int prepared = 0;
uint64_t (*odd)(Args const&) = nullptr;
uint32_t (*grid)(Args const&) = nullptr;
std::vector<Params> launched;

void put_address(unsigned char* map, uint64_t address) {
  address = ~address;
  std::memcpy(map + 120, &address, sizeof(address));
}

Params evaluate(Args const& args) {
  Params made{};
  std::memset(made.map, 0x5a, sizeof(made.map));
  put_address(made.map, reinterpret_cast<uint64_t>(args.c != nullptr ? args.c : args.b));
  made.end_of_d = reinterpret_cast<uint64_t>(args.d) + uint64_t(args.ldd) * uint64_t(args.m);
  made.alpha = float(args.alpha);
  made.m = args.m;
  made.barriers = reinterpret_cast<uint64_t>(args.workspace);
  made.odd = odd != nullptr ? odd(args) : 0;
  return made;
}

int prepare(atomr_cutlass_row const*, void const* given, void* params, atomr_cutlass_launch* launch) {
  auto const& args = *static_cast<Args const*>(given);
  Params const made = evaluate(args);
  std::memcpy(params, &made, sizeof(made));
  *launch = {};
  launch->grid[0] = grid != nullptr ? grid(args) : 4;
  ++prepared;
  return ATOMR_CUTLASS_OK;
}

int launch(atomr_cutlass_row const*, void const* params, atomr_cutlass_launch const*, void*) {
  launched.push_back(*static_cast<Params const*>(params));
  return ATOMR_CUTLASS_OK;
}

atomr_cutlass_row const kRow = {"cutlass_fake", "{}",    "",      sizeof(Params), 64,       1024,   128, 0,
                                13000,          nullptr, nullptr, nullptr,        &prepare, &launch};

Args given(uint64_t base, bool with_c, double alpha) {
  Args args;
  std::memset(&args, 0, sizeof(args));
  auto const at = [](uint64_t address) { return reinterpret_cast<void*>(address); };
  args.m = 4, args.n = args.k = 8, args.batch = 1, args.ldd = 8;
  args.a = at(base + 0x1000), args.b = at(base + 0x2000), args.d = at(base + 0x3000);
  args.c = with_c ? at(base + 0x5000) : nullptr;
  args.workspace = at(base + 0x4000);
  args.alpha = alpha;
  return args;
}

// Launches with other pointers and scalars each time; returns how often the row evaluated after the first two times.
int evaluated_after_the_second() {
  KernelLaunch kernel({&kRow, [](atomr_cutlass_row const*) {}}, *args_of("gemm"));
  int before = 0;
  for (int i = 0; i < 6; ++i) {
    for (bool const with_c : {false, true}) {
      if (i == 2 && !with_c) before = prepared;
      Args const args = given(0x100000 * uint64_t(i + 1) << (8 * i), with_c, 0.25 * i);
      kernel.launch(&args, nullptr, nullptr);
      Params const wanted = evaluate(args);
      CHECK(std::memcmp(&launched.back(), &wanted, sizeof(wanted)) == 0);
    }
  }
  return prepared - before;
}

void test_pointers_scalars_and_tensor_maps_are_moved() { CHECK_EQUAL(evaluated_after_the_second(), 0); }

void test_what_nothing_explains_is_evaluated() {
  odd = [](Args const& args) { return reinterpret_cast<uint64_t>(args.a) * 3; };
  CHECK_EQUAL(evaluated_after_the_second(), 8);
  // As a sum of two pointers does.
  odd = [](Args const& args) { return reinterpret_cast<uint64_t>(args.a) + reinterpret_cast<uint64_t>(args.d); };
  CHECK_EQUAL(evaluated_after_the_second(), 8);
  // What the two compared evaluations do not show is seen in the launch's own.
  odd = [](Args const& args) { return uint64_t(reinterpret_cast<uint64_t>(args.a) >> 40 < 0x7a); };
  CHECK_EQUAL(evaluated_after_the_second(), 8);
  odd = nullptr;
  grid = [](Args const& args) { return uint32_t(reinterpret_cast<uint64_t>(args.a) >> 39); };
  CHECK_EQUAL(evaluated_after_the_second(), 8);
  grid = nullptr;
}

void test_an_odd_width_is_unexplained() {
  Args const first = given(0x100000, false, 1.0), second = given(0x7777000, false, 1.0);
  unsigned char bytes[2][3] = {{0, 0, 1}, {0, 0, 2}};
  size_t unexplained = 99;
  CHECK(!find_relocations(*args_of("gemm"), &first, &second, bytes[0], bytes[1], 3, &unexplained));
  CHECK_EQUAL(unexplained, 0u);
}

}  // namespace

int main() {
  fake::Symbols symbols = fake::driver();
  for (auto const& symbol : fake::library_driver()) symbols.insert(symbol);
  symbols["cuTensorMapReplaceAddress"] = fake::symbol(+[](void* map, void* address) {
    return put_address(static_cast<unsigned char*>(map), reinterpret_cast<uint64_t>(address)), 0;
  });
  fake::libraries()["libcuda.so.1"] = symbols;
  DeviceGuard guard(0);
  test_pointers_scalars_and_tensor_maps_are_moved();
  test_what_nothing_explains_is_evaluated();
  test_an_odd_width_is_unexplained();
  return check::result();
}

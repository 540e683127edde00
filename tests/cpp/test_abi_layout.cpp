// The layout of the C ABI as it was last agreed on. A struct that changes fails here: raise ATOMR_CUTLASS_ABI_VERSION
// where packs of the former layout are about, and write down the new layout, which the test prints.
#include "atomr_cutlass/abi_layout.h"

#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"

using namespace atomr_cutlass;

namespace {

struct Agreed {
  char const* name;
  uint32_t bytes;
  uint64_t digest;
};

constexpr int kVersion = 7;
constexpr uint64_t kDigest = 0xf4f646f4092a95d9;
constexpr Agreed kAgreed[] = {
    {"atomr_cutlass_tree_operand", 32, 0xbc264293a3a872fe},
    {"atomr_cutlass_gemm_args", 752, 0x75f2d24564fdb27b},
    {"atomr_cutlass_group", 96, 0xd944592bbea0693c},
    {"atomr_cutlass_grouped_args", 752, 0x11816f3afd6f00d0},
    {"atomr_cutlass_conv_args", 744, 0x862be786a4e14015},
    {"atomr_cutlass_cast_args", 88, 0x16f08afb620ce982},
    {"atomr_cutlass_quantize_args", 88, 0xb93d14eeead52b3c},
    {"atomr_cutlass_launch", 88, 0x4ddcfaf4e9f8682f},
    {"atomr_cutlass_row", 88, 0xad0a7ad444aaa109},
    {"atomr_cutlass_field_layout", 24, 0x007e63e8a34cc6e7},
    {"atomr_cutlass_struct_layout", 24, 0x392a2d8648f7ec2c},
    {"atomr_cutlass_pack", 48, 0x94fec87102846e4a},
    {"atomr_cutlass_jit_info", 40, 0x9a4479beada7fb6b},
    {"atomr_cutlass_jit_evaluation", 56, 0xe8ba6040784b8558},
    {"atomr_cutlass_tensor_map_request", 120, 0xf2b5537ddd47e5f7},
};

void test_the_layout_is_the_one_agreed_on() {
  CHECK_EQUAL(ATOMR_CUTLASS_ABI_VERSION, kVersion);
  CHECK_EQUAL(abi::kStructCount, std::size(kAgreed));
  bool same = abi::kLayoutDigest == kDigest;
  for (uint32_t i = 0; i < abi::kStructCount; ++i) {
    atomr_cutlass_struct_layout const& one = abi::kStructs[i];
    Agreed const& agreed = kAgreed[i < std::size(kAgreed) ? i : 0];
    CHECK_EQUAL(std::string(one.name), agreed.name);
    CHECK_EQUAL(one.bytes, agreed.bytes);
    same &= abi::digest_of(&one, 1) == agreed.digest;
  }
  CHECK(same);
  if (check::failures == 0) return;
  std::fprintf(stderr, "constexpr uint64_t kDigest = 0x%016" PRIx64 ";\n", abi::kLayoutDigest);
  for (atomr_cutlass_struct_layout const& one : abi::kStructs) {
    std::fprintf(stderr, "    {\"%s\", %u, 0x%016" PRIx64 "},\n", one.name, one.bytes, abi::digest_of(&one, 1));
  }
}

atomr_cutlass_field_layout const kPair[] = {{"first", 0, 4, 'i', 0}, {"second", 4, 4, 'i', 0}};

uint64_t digest_of(char const* name, std::vector<atomr_cutlass_field_layout> const& fields, uint32_t bytes) {
  atomr_cutlass_struct_layout const one{name, fields.data(), uint32_t(fields.size()), bytes};
  return abi::digest_of(&one, 1);
}

void test_whatever_differs_shows_in_the_digest() {
  using Fields = std::vector<atomr_cutlass_field_layout>;
  Fields const pair(std::begin(kPair), std::end(kPair));
  uint64_t const digest = digest_of("pair", pair, 8);
  CHECK_EQUAL(digest_of("pair", pair, 8), digest);
  CHECK(digest_of("pain", pair, 8) != digest);
  CHECK(digest_of("pair", pair, 12) != digest);
  CHECK(digest_of("pair", {pair[0]}, 8) != digest);
  CHECK(digest_of("pair", {pair[1], pair[0]}, 8) != digest);
  auto const changed = [&](auto change) {
    Fields fields = pair;
    change(fields[1]);
    return digest_of("pair", fields, 8);
  };
  CHECK(changed([](auto& field) { field.name = "other"; }) != digest);
  CHECK(changed([](auto& field) { field.offset = 8; }) != digest);
  CHECK(changed([](auto& field) { field.bytes = 8; }) != digest);
  CHECK(changed([](auto& field) { field.kind = 'u'; }) != digest);
}

}  // namespace

int main() {
  test_the_layout_is_the_one_agreed_on();
  test_whatever_differs_shows_in_the_digest();
  return check::result();
}

// The rows that this build compiled, as a pack shows them: what they say of themselves, and which problems they refuse.
// No GPU is needed for any of it, but without a driver CUTLASS says that it can make no tensor map.
#define ATOMR_CUTLASS_PACK_NAME "rows"
#include "atomr_cutlass/table.h"

#include <set>
#include <string>

#include "check.h"
#include "kernel_launch.h"

using namespace atomr_cutlass;

namespace {

bool holds(char const* text, std::string const& part) { return std::string(text).find(part) != std::string::npos; }

void check_row(atomr_cutlass_row const& row) {
  std::string const name = row.name, content = row.content;
  CHECK(!name.empty());
  CHECK_EQUAL(row.key[0], '{');
  CHECK(holds(row.key, "\"arch\":\"sm_"));
  // Digest of source and headers, that of CUTLASS's, and the compiler.
  CHECK(content.find(' ') == 16 && content.find(" nvcc ") != std::string::npos);
  CHECK(row.params_bytes > 0 && row.params_bytes <= kParamsBytes);
  CHECK(row.params_align > 0 && (row.params_align & (row.params_align - 1)) == 0);
  CHECK(row.shared_bytes <= 227 * 1024);
  CHECK(row.threads > 0 && row.threads <= 1024 && row.threads % 32 == 0);
  CHECK(row.cuda_version >= 12000);
  CHECK(row.supports != nullptr && row.workspace_size != nullptr && row.prepare != nullptr && row.launch != nullptr);
}

// Nothing reads from it.
void* const kSomewhere = reinterpret_cast<void*>(uintptr_t(1) << 20);

void check_gemm(atomr_cutlass_row const& row) {
  atomr_cutlass_gemm_args args{};
  args.m = args.n = args.k = 128;
  args.batch = args.split_k = args.swizzle = 1;
  args.a = args.b = args.d = kSomewhere;
  args.scale_a = args.scale_b = static_cast<float const*>(kSomewhere);
  args.lda = args.ldb = args.ldc = args.ldd = 128;
  args.alpha = 1;
  args.sm_count = args.max_active_clusters = 100;
  for (auto& operand : args.operands) operand = {kSomewhere, 128, 1, 0};
  CHECK_EQUAL(row.supports(&row, &args), int(ATOMR_CUTLASS_OK));
  args.batch = args.split_k = 2;
  CHECK_EQUAL(row.supports(&row, &args), int(ATOMR_CUTLASS_CANNOT_IMPLEMENT));
}

void check_fprop(atomr_cutlass_row const& row) {
  atomr_cutlass_conv_args args{};
  args.n = args.r = args.s = args.stride_h = args.stride_w = args.dilation_h = args.dilation_w = 1;
  args.groups = args.split_k = args.swizzle = 1;
  args.h = args.w = args.p = args.q = 16;
  args.c = args.k = 64;
  args.a = args.b = args.d = kSomewhere;
  args.x_stride_w = args.y_stride_q = args.w_stride_s = args.w_stride_r = args.w_stride_k = 64;
  args.x_stride_h = args.y_stride_p = 16 * 64;
  args.x_stride_n = args.y_stride_n = 16 * 16 * 64;
  args.alpha = 1;
  args.sm_count = args.max_active_clusters = 100;
  for (auto& operand : args.operands) operand = {kSomewhere, 64, 1, 0};
  CHECK_EQUAL(row.supports(&row, &args), int(ATOMR_CUTLASS_OK));
  args.p = 17;  // more rows than the image has places for the filter
  CHECK_EQUAL(row.supports(&row, &args), int(ATOMR_CUTLASS_CANNOT_IMPLEMENT));
}

}  // namespace

int main() {
  atomr_cutlass_pack const* const pack = atomr_cutlass_pack_v1();
  CHECK_EQUAL(pack->abi_version, unsigned(ATOMR_CUTLASS_ABI_VERSION));
  CHECK_EQUAL(pack->layout_digest, abi::digest_of(pack->structs, pack->struct_count));
  CHECK_EQUAL(pack->count, kRowCount);
  std::set<std::string> names;
  for (unsigned i = 0; i < pack->count; ++i) {
    atomr_cutlass_row const& row = *pack->rows[i];
    names.insert(row.name);
    int const before = check::failures;
    check_row(row);
    if (holds(row.key, "\"op\":\"gemm\"")) check_gemm(row);
    if (holds(row.key, "\"op\":\"conv2d_fprop\"")) check_fprop(row);
    if (check::failures != before) std::fprintf(stderr, "... of %s\n", row.name);
  }
  CHECK_EQUAL(names.size(), size_t(kRowCount));
  std::printf("%u rows\n", kRowCount);
  return check::result();
}

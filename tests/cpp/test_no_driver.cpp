// A machine without a driver: everything says so with one typed error, and nothing crashes.
#include "fake_libraries.h"

#include "check.h"
#include "driver.h"
#include "errors.h"
#include "gemm_plan.h"
#include "registry.h"

using namespace atomr_cutlass;

namespace {

int fine(atomr_cutlass_row const*, void const*) { return ATOMR_CUTLASS_OK; }

atomr_cutlass_row row_with(uint32_t params_bytes, uint32_t params_align) {
  atomr_cutlass_row row{};
  row.name = "cutlass_fake";
  row.key = "{}";
  row.params_bytes = params_bytes;
  row.params_align = params_align;
  row.supports = &fine;
  return row;
}

void make_plan(atomr_cutlass_row const& row) {
  LaunchPlan(gemm_slots({}, {}, {}, {}), {},
             gemm_steps({&row, [](atomr_cutlass_row const*) {}}, atomr_cutlass_gemm_args{}, {}), {}, nullptr);
}

}  // namespace

int main() {
  std::string reason;
  CHECK(!driver_available(&reason));
  CHECK_EQUAL(reason, "no NVIDIA driver: libcuda.so.1 was not found");
  CHECK(!driver_available());
  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", driver_version());
  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", device_count());
  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", device_properties(0));
  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", DeviceGuard(0));
  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", allocate(16));

  CHECK_THROWS(DeviceUnavailable, "libcuda.so.1 was not found", make_plan(row_with(512, 64)));
  // A framework may allocate all the same.
  DlExchangeApi api{};
  api.allocate = [](DlTensor*, DlManagedVersioned**, void* context, auto set_error) {
    set_error(context, "RuntimeError", "no GPU");
    return -1;
  };
  DlTensor prototype{};
  CHECK_THROWS(LibraryFailure, "RuntimeError: no GPU", framework_allocate(&api, prototype));
  // What no device could change is said first.
  CHECK_THROWS(Unsupported, "cutlass_fake has larger parameters", make_plan(row_with(4097, 64)));
  CHECK_THROWS(Unsupported, "cutlass_fake has larger parameters", make_plan(row_with(64, 256)));

  // The table needs no driver.
  for (RegisteredRow const& entry : registered_rows()) {
    CHECK(find_row(entry.row->name) == entry.row);
    CHECK(entry.pack.empty());
  }
  CHECK(find_row("cutlass_fake") == nullptr);
  return check::result();
}

// A driver that does not start, or sees no GPU (CUDA_VISIBLE_DEVICES is empty), is as good as none.
#include "check.h"
#include "driver.h"
#include "errors.h"
#include "fake_libraries.h"

using namespace atomr_cutlass;

int main() {
  fake::libraries()["libcuda.so.1"] = fake::driver();
  fake::device().count = 0;
  std::string reason;
  CHECK(!driver_available(&reason));
  CHECK_EQUAL(reason, "the driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)");
  CHECK_THROWS(DeviceUnavailable, "sees no GPU", DeviceGuard(0));
  CHECK_THROWS(DeviceUnavailable, "sees no GPU", device_count());
  return check::result();
}

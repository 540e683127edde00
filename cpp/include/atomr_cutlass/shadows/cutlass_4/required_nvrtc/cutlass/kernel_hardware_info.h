// CUTLASS's own declares its queries of the device for host compilers only, yet its host code, which runs on the device
// here, names them. They are never reached: the arguments say how many multiprocessors there are.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/int_tuple.hpp>

#include "cutlass/device_kernel.h"

namespace cutlass {

struct KernelHardwareInfo {
  int device_id = 0;
  int sm_count = 0;
  int max_active_clusters = 0;
  dim3 cluster_shape = {0, 0, 0};
  dim3 cluster_shape_fallback = {0, 0, 0};

  CUTLASS_HOST_DEVICE static int query_device_multiprocessor_count(int = 0) { return 0; }
};

}  // namespace cutlass

// WMMA is left out under NVRTC: no cell uses it, and it needs a part of the toolkit that NVRTC does not come with.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

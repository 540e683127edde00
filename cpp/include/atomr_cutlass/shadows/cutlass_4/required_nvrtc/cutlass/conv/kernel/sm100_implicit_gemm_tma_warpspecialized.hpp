// CUTLASS's convolution kernel for sm_100 marks functions as the host's, which NVRTC refuses even where nothing uses
// them. No cell is made of it.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

// CUTLASS's convolution kernel for sm_100 marks functions as the host's, which NVRTC refuses even where nothing uses them.
// No cell is made of it.
#pragma once

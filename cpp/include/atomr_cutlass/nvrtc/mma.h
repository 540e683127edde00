// CUTLASS includes CUDA's WMMA header; no cell uses it, and it needs a part of the toolkit that NVRTC does not come
// with.
#pragma once

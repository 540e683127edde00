// WMMA is left out under NVRTC: no cell uses it, and it needs a part of the toolkit that NVRTC does not come with.
#pragma once

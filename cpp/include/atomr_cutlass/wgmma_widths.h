// WGMMA instructions of all widths that are multiples of 8, for tiles that would else be multiplied by several narrow
// ones. Included before every header of CuTe.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

// Stands in for CUTLASS's header where device code is compiled for the host, as one more function of it.
#pragma once

#define CUTLASS_DEVICE inline
#define CUTLASS_HOST_DEVICE inline

// How WGMMA with sparse operands, which no kernel of ours uses, lays out its operands: 7,700 lines of traits take half
// a second of each sm90 kernel's compilation. Templates of CUTLASS's name these layouts, so they are declared.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/arch/mma_sm90_gmma_sparse.hpp>

namespace cute::SM90::GMMA {
template <class, int>
struct Layout_MN_INTER_SpAtom;
template <class, int>
struct Layout_MN_SW32_SpAtom;
template <class, int>
struct Layout_MN_SW64_SpAtom;
template <class, int>
struct Layout_MN_SW128_SpAtom;
template <class, int>
struct Layout_K_INTER_SpAtom;
template <class, int>
struct Layout_K_SW32_SpAtom;
template <class, int>
struct Layout_K_SW64_SpAtom;
template <class, int>
struct Layout_K_SW128_SpAtom;
}  // namespace cute::SM90::GMMA

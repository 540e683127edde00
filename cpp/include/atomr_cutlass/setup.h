// What few cells have.
//
// A setup kernel: one that is launched right before the main kernel, on the same stream and with the same parameters,
// and fills what of the workspace the main kernel reads. `kSetupThreads` says so.
//
// A wait for the launch before (griddepcontrol.wait) ahead of all that the kernel reads and writes: `kDependent`.
#pragma once

namespace atomr_cutlass {

template <class Cell>
constexpr auto find_setup_threads(int) -> decltype(int(Cell::kSetupThreads)) {
  return Cell::kSetupThreads;
}
template <class Cell>
constexpr int find_setup_threads(long) {
  return 0;
}

// Threads of a block of the cell's setup kernel; 0 without one.
template <class Cell>
constexpr int kSetupThreadsOf = find_setup_threads<Cell>(0);

template <class Cell>
constexpr auto find_dependent(int) -> decltype(bool(Cell::kDependent)) {
  return Cell::kDependent;
}
template <class Cell>
constexpr bool find_dependent(long) {
  return false;
}

// Bits of atomr_cutlass_launch.padding that are true of the cell.
template <class Cell>
constexpr unsigned kLaunchBitsOf = find_dependent<Cell>(0) ? 1u : 0u;  // ATOMR_CUTLASS_LAUNCH_DEPENDENT

}  // namespace atomr_cutlass

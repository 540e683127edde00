// Whether a cell has a setup kernel: one that is launched right before the main kernel, on the same stream and with the
// same parameters, and fills what of the workspace the main kernel reads. `kSetupThreads` says so.
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

}  // namespace atomr_cutlass

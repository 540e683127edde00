// Makes the C ABI row of a cell compiled ahead of time: included by generated translation units only, never under
// NVRTC.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <new>
#include <type_traits>

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/setup.h"

#ifndef ATOMR_CUTLASS_HEADERS_DIGEST
#error "ATOMR_CUTLASS_HEADERS_DIGEST is what `python -m generator.content CUTLASS OURS` prints, as a string"
#endif

// What a row was compiled from and by, after the digest of its source, a literal.
#define ATOMR_CUTLASS_TEXT_OF(value) #value
#define ATOMR_CUTLASS_TEXT(value) ATOMR_CUTLASS_TEXT_OF(value)
#define ATOMR_CUTLASS_CONTENT(source)                                                                               \
  source " " ATOMR_CUTLASS_HEADERS_DIGEST " nvcc " ATOMR_CUTLASS_TEXT(__CUDACC_VER_MAJOR__) "." ATOMR_CUTLASS_TEXT( \
      __CUDACC_VER_MINOR__) "." ATOMR_CUTLASS_TEXT(__CUDACC_VER_BUILD__)

namespace atomr_cutlass {

// `kSetup` is the setup kernel of a cell that has one.
template <class Cell, auto kKernel, auto kSetup>
struct Row {
  using Args = typename Cell::Args;

  static constexpr int kMaxDevices = 64;

  // What a device must be told, or asked, about the kernel once: the shared memory it may use, and how many of its
  // clusters fit at once. Racing threads store the same value. 0 means "not asked yet".
  static int device_setup(int& clusters) {
    static std::atomic<int> known[kMaxDevices];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    clusters = known[device].load(std::memory_order_acquire);
    if (clusters != 0) return ATOMR_CUTLASS_OK;
    void const* function = reinterpret_cast<void const*>(kKernel);
    if constexpr (Cell::kSharedBytes > 48 * 1024) {
      error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Cell::kSharedBytes);
      if (error != cudaSuccess) return clear(error);
    }
    constexpr int kClusterSize = Cell::kClusterM * Cell::kClusterN * Cell::kClusterK;
    if constexpr (kClusterSize > 1) {
      cudaLaunchAttribute attribute = cluster_attribute();
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(Cell::kClusterM, Cell::kClusterN, Cell::kClusterK);
      config.blockDim = dim3(Cell::kThreads);
      config.dynamicSmemBytes = Cell::kSharedBytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      error = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
    } else {
      int blocks = 0, multiprocessors = 0;
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, Cell::kThreads, Cell::kSharedBytes);
      if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      }
      clusters = blocks * multiprocessors;
    }
    if (error != cudaSuccess) return clear(error);
    if (clusters == 0) return cudaErrorLaunchOutOfResources;
    known[device].store(clusters, std::memory_order_release);
    return ATOMR_CUTLASS_OK;
  }

  static int supports(atomr_cutlass_row const*, void const* args) {
    return Cell::can_implement(*static_cast<Args const*>(args)) ? ATOMR_CUTLASS_OK : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  }

  static int workspace_size(atomr_cutlass_row const*, void const* args, uint64_t* bytes) {
    Args completed = *static_cast<Args const*>(args);
    int const status = device_setup(completed.max_active_clusters);
    if (status == ATOMR_CUTLASS_OK) *bytes = Cell::workspace_size(completed);
    return status;
  }

  static int prepare(atomr_cutlass_row const*, void const* args, void* params, atomr_cutlass_launch* launch) {
    Args completed = *static_cast<Args const*>(args);
    int const status = device_setup(completed.max_active_clusters);
    if (status != ATOMR_CUTLASS_OK) return status;
    auto const* made = new (params) typename Cell::Params(Cell::params(completed));
    dim3 const grid = Cell::grid(*made);
    *launch = {{grid.x, grid.y, grid.z},
               {uint32_t(Cell::kThreads), 1, 1},
               {uint32_t(Cell::kClusterM), uint32_t(Cell::kClusterN), uint32_t(Cell::kClusterK)},
               uint32_t(Cell::kSharedBytes),
               {0, 0, 0},
               kLaunchBitsOf<Cell>,
               0,
               0};
    if constexpr (kSetupThreadsOf<Cell> > 0) {
      dim3 const setup_grid = Cell::setup_grid(*made);
      launch->setup_grid[0] = setup_grid.x;
      launch->setup_grid[1] = setup_grid.y;
      launch->setup_grid[2] = setup_grid.z;
    }
    Cell::clear_range(completed, launch->clear_offset, launch->clear_bytes);
    return ATOMR_CUTLASS_OK;
  }

  static int launch(atomr_cutlass_row const*, void const* params, atomr_cutlass_launch const* launch, void* stream) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    config.blockDim = dim3(Cell::kThreads);
    config.dynamicSmemBytes = Cell::kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    // GPUs before sm_90 know no clusters and refuse the attribute.
    if constexpr (Cell::kClusterM * Cell::kClusterN * Cell::kClusterK > 1) {
      attributes[config.numAttrs++] = cluster_attribute();
    }
    if (kLaunchBitsOf<Cell> != 0 && (launch->padding & ATOMR_CUTLASS_LAUNCH_DEPENDENT) != 0) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    void* arguments[] = {const_cast<void*>(params)};
    if constexpr (kSetupThreadsOf<Cell> > 0) {
      dim3 const setup_grid(launch->setup_grid[0], launch->setup_grid[1], launch->setup_grid[2]);
      cudaError_t const status = cudaLaunchKernel(reinterpret_cast<void const*>(kSetup), setup_grid,
                                                  dim3(Cell::kSetupThreads), arguments, 0, config.stream);
      if (status != cudaSuccess) return clear(status);
    }
    cudaError_t const error = cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(kKernel), arguments);
    return error == cudaSuccess ? ATOMR_CUTLASS_OK : clear(error);
  }

 private:
  static cudaLaunchAttribute cluster_attribute() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = Cell::kClusterM;
    attribute.val.clusterDim.y = Cell::kClusterN;
    attribute.val.clusterDim.z = Cell::kClusterK;
    return attribute;
  }

  // The runtime remembers the last error of a thread; one that is reported here must not surface in a later call.
  static int clear(cudaError_t error) {
    (void)cudaGetLastError();
    return int(error);
  }
};

template <class Cell, auto kKernel, auto kSetup = nullptr>
constexpr atomr_cutlass_row make_row(char const* name, char const* key, char const* content, bool ptx) {
  static_assert((kSetupThreadsOf<Cell> > 0) != std::is_null_pointer_v<decltype(kSetup)>,
                "ATOMR_CUTLASS_SETUP goes with kSetupThreads");
  using Made = Row<Cell, kKernel, kSetup>;
  return {name,
          key,
          content,
          uint32_t(sizeof(typename Cell::Params)),
          uint32_t(alignof(typename Cell::Params)),
          uint32_t(Cell::kSharedBytes),
          uint32_t(Cell::kThreads),
          ptx ? uint32_t(ATOMR_CUTLASS_FLAG_PTX) : 0u,
          uint32_t(CUDART_VERSION),
          nullptr,
          &Made::supports,
          &Made::workspace_size,
          &Made::prepare,
          &Made::launch};
}

}  // namespace atomr_cutlass

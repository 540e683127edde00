// Makes the C ABI row of a cell compiled ahead of time: included by generated translation units only, never under
// NVRTC.
#pragma once

#include <cuda.h>
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

  // What a device must be told, or asked, about the kernel once: the shared memory it may use, how many of its clusters
  // fit at once, and what the driver launches there. Racing threads store the same values, `clusters` last: 0 means
  // "not asked yet".
  struct OnDevice {
    std::atomic<int> clusters;
    std::atomic<cudaFunction_t> functions[2];  // the kernel's, and of a cell that has one the setup kernel's
  };

  static int on_device(OnDevice const*& found) {
    static OnDevice devices[kMaxDevices];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    found = &devices[device];
    if (found->clusters.load(std::memory_order_acquire) != 0) return ATOMR_CUTLASS_OK;
    int clusters = 0;
    error = ask_device(device, devices[device].functions, clusters);
    if (error != cudaSuccess) return clear(error);
    if (clusters == 0) return cudaErrorLaunchOutOfResources;
    devices[device].clusters.store(clusters, std::memory_order_release);
    return ATOMR_CUTLASS_OK;
  }

  static int supports(atomr_cutlass_row const*, void const* args) {
    return Cell::can_implement(*static_cast<Args const*>(args)) ? ATOMR_CUTLASS_OK : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  }

  static int workspace_size(atomr_cutlass_row const*, void const* args, uint64_t* bytes) {
    Args completed = *static_cast<Args const*>(args);
    OnDevice const* device = nullptr;
    int const status = on_device(device);
    if (status != ATOMR_CUTLASS_OK) return status;
    completed.max_active_clusters = device->clusters.load(std::memory_order_relaxed);
    *bytes = Cell::workspace_size(completed);
    return ATOMR_CUTLASS_OK;
  }

  static int prepare(atomr_cutlass_row const*, void const* args, void* params, atomr_cutlass_launch* launch) {
    Args completed = *static_cast<Args const*>(args);
    OnDevice const* device = nullptr;
    int const status = on_device(device);
    if (status != ATOMR_CUTLASS_OK) return status;
    completed.max_active_clusters = device->clusters.load(std::memory_order_relaxed);
    auto const* made = new (params) typename Cell::Params(Cell::params(completed));
    dim3 const grid = Cell::grid(*made);
    *launch = {
        {grid.x, grid.y, grid.z},
        {uint32_t(Cell::kThreads), 1, 1},
        {uint32_t(Cell::kClusterM), uint32_t(Cell::kClusterN), uint32_t(Cell::kClusterK)},
        uint32_t(Cell::kSharedBytes),
        {0, 0, 0},
        kLaunchBitsOf<Cell>,
        0,
        0,
        {device->functions[0].load(std::memory_order_relaxed), device->functions[1].load(std::memory_order_relaxed)}};
    if constexpr (kSetupThreadsOf<Cell> > 0) {
      dim3 const setup_grid = Cell::setup_grid(*made);
      launch->setup_grid[0] = setup_grid.x;
      launch->setup_grid[1] = setup_grid.y;
      launch->setup_grid[2] = setup_grid.z;
    }
    Cell::clear_range(completed, launch->clear_offset, launch->clear_bytes);
    return ATOMR_CUTLASS_OK;
  }

  // By the driver: the runtime would look the kernel up at each launch.
  static int launch(atomr_cutlass_row const*, void const* params, atomr_cutlass_launch const* launch, void* stream) {
    static auto const driver_launch = driver_entry();
    if (driver_launch == nullptr) return cudaErrorSymbolNotFound;
    void* arguments[] = {const_cast<void*>(params)};
    CUlaunchConfig config{};
    config.hStream = static_cast<CUstream>(stream);
    if constexpr (kSetupThreadsOf<Cell> > 0) {
      set_shape(config, launch->setup_grid, Cell::kSetupThreads, 0);
      CUresult const status = driver_launch(&config, function(launch->functions[1]), arguments, nullptr);
      if (status != CUDA_SUCCESS) return int(status);
    }
    CUlaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    // GPUs before sm_90 know no clusters and refuse the attribute.
    if constexpr (kClusterSize > 1) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim.x = Cell::kClusterM;
      attribute.value.clusterDim.y = Cell::kClusterN;
      attribute.value.clusterDim.z = Cell::kClusterK;
    }
    if (kLaunchBitsOf<Cell> != 0 && (launch->padding & ATOMR_CUTLASS_LAUNCH_DEPENDENT) != 0) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
    set_shape(config, launch->grid, Cell::kThreads, Cell::kSharedBytes);
    return int(driver_launch(&config, function(launch->functions[0]), arguments, nullptr));
  }

 private:
  using DriverLaunch = CUresult (*)(CUlaunchConfig const*, CUfunction, void**, void**);

  static constexpr int kClusterSize = Cell::kClusterM * Cell::kClusterN * Cell::kClusterK;

  // Null where the driver is too old to have it. A pack links no driver, so that it loads where there is none.
  static DriverLaunch driver_entry() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kSince = 11060;
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, kSince, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuLaunchKernelEx", &entry, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) clear(error);
    return error == cudaSuccess ? reinterpret_cast<DriverLaunch>(entry) : nullptr;
  }

  static CUfunction function(void const* handle) { return static_cast<CUfunction>(const_cast<void*>(handle)); }

  static void set_shape(CUlaunchConfig& config, uint32_t const (&grid)[3], unsigned threads, unsigned shared_bytes) {
    config.gridDimX = grid[0];
    config.gridDimY = grid[1];
    config.gridDimZ = grid[2];
    config.blockDimX = threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
  }

  static cudaError_t ask_device(int device, std::atomic<cudaFunction_t> (&functions)[2], int& clusters) {
    void const* kernel = reinterpret_cast<void const*>(kKernel);
    if constexpr (Cell::kSharedBytes > 48 * 1024) {
      cudaError_t const error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cell::kSharedBytes);
      if (error != cudaSuccess) return error;
    }
    cudaFunction_t function = nullptr;
    cudaError_t error = cudaGetFuncBySymbol(&function, kernel);
    if (error != cudaSuccess) return error;
    functions[0].store(function, std::memory_order_relaxed);
    if constexpr (kSetupThreadsOf<Cell> > 0) {
      error = cudaGetFuncBySymbol(&function, reinterpret_cast<void const*>(kSetup));
      if (error != cudaSuccess) return error;
      functions[1].store(function, std::memory_order_relaxed);
    }
    if constexpr (kClusterSize > 1) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = Cell::kClusterM;
      attribute.val.clusterDim.y = Cell::kClusterN;
      attribute.val.clusterDim.z = Cell::kClusterK;
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(Cell::kClusterM, Cell::kClusterN, Cell::kClusterK);
      config.blockDim = dim3(Cell::kThreads);
      config.dynamicSmemBytes = Cell::kSharedBytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    }
    int blocks = 0, multiprocessors = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Cell::kThreads, Cell::kSharedBytes);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    clusters = blocks * multiprocessors;
    return error;
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

// Casts, element by element: what rewrites need to bring operands into a type that a kernel multiplies, or a result
// out of the type that it was added up in, slice by slice.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `kWaits`: on GPUs of sm_90 on it starts beside the launch before, and waits for its end.
template <class ElementA, class ElementD, bool kWaits>
struct Cast {
  using Args = atomr_cutlass_cast_args;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = 0;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
  static constexpr bool kDependent = kWaits;
  static constexpr int kAtOnce = 8;  // slices that are read before they are added

  // 16 bytes of the wider type at once.
  static constexpr int kWide = sizeof(ElementA) > sizeof(ElementD) ? int(sizeof(ElementA)) : int(sizeof(ElementD));
  static constexpr int kVector = 16 / kWide;

  using Compute = cutlass::platform::conditional_t<cutlass::platform::is_same<ElementD, double>::value, double, float>;

  struct Params {
    ElementA const* a;
    ElementD const* c;
    ElementD* d;
    float const* scale;
    Compute alpha, beta;
    int64_t count, stride;
    int32_t slices, blocks;
  };

  static bool can_implement(Args const& args) {
    bool const aligned = reinterpret_cast<uint64_t>(args.a) % 16 == 0 && reinterpret_cast<uint64_t>(args.c) % 16 == 0 &&
                         reinterpret_cast<uint64_t>(args.d) % 16 == 0;
    return args.count > 0 && args.slices > 0 && aligned && (args.slices == 1 || args.slice_stride % kVector == 0);
  }
  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    int64_t const wanted = (args.count + int64_t(kThreads) * kVector - 1) / (int64_t(kThreads) * kVector);
    int64_t const most = int64_t(args.sm_count) * 16;
    return {static_cast<ElementA const*>(args.a),
            static_cast<ElementD const*>(args.c),
            static_cast<ElementD*>(args.d),
            static_cast<float const*>(args.scale),
            Compute(args.alpha),
            Compute(args.beta),
            args.count,
            args.slice_stride,
            args.slices,
            int32_t(wanted < most ? wanted : most)};
  }
  static dim3 grid(Params const& params) { return dim3(uint32_t(params.blocks)); }

  CUTLASS_DEVICE static void run(Params const& params, char*) {
    using Source = cutlass::AlignedArray<ElementA, kVector>;
    using Target = cutlass::AlignedArray<ElementD, kVector>;
    cutlass::NumericArrayConverter<Compute, ElementA, kVector> widen;
    cutlass::NumericArrayConverter<ElementD, Compute, kVector> narrow;
    cutlass::NumericArrayConverter<Compute, ElementD, kVector> widen_c;
    if constexpr (kWaits) asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    Compute const factor = params.alpha * (params.scale != nullptr ? Compute(*params.scale) : Compute(1));
    int64_t const vectors = params.count / kVector;
    int64_t const first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = first; i < vectors; i += step) {
      cutlass::Array<Compute, kVector> values;
      values.clear();
      for (int slice = 0; slice < params.slices; slice += kAtOnce) {
        Source parts[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kAtOnce; ++at) {
          if (slice + at < params.slices) {
            parts[at] = reinterpret_cast<Source const*>(params.a + (slice + at) * params.stride)[i];
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kAtOnce; ++at) {
          if (slice + at < params.slices) {
            cutlass::Array<Compute, kVector> const part = widen(parts[at]);
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < kVector; ++j) values[j] += part[j];
          }
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kVector; ++j) values[j] = times(factor, values[j]);
      if (params.c != nullptr) {
        cutlass::Array<Compute, kVector> const source = widen_c(reinterpret_cast<Target const*>(params.c)[i]);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kVector; ++j) values[j] = plus_source(values[j], params.beta, source[j]);
      }
      Target target;
      static_cast<cutlass::Array<ElementD, kVector>&>(target) = narrow(values);
      reinterpret_cast<Target*>(params.d)[i] = target;
    }
    for (int64_t i = vectors * kVector + first; i < params.count; i += step) {
      Compute value = 0;
      for (int slice = 0; slice < params.slices; ++slice) {
        value += cutlass::NumericConverter<Compute, ElementA>{}(params.a[slice * params.stride + i]);
      }
      value = times(factor, value);
      if (params.c != nullptr) {
        value = plus_source(value, params.beta, cutlass::NumericConverter<Compute, ElementD>{}(params.c[i]));
      }
      params.d[i] = cutlass::NumericConverter<ElementD, Compute>{}(value);
    }
  }
};

}  // namespace atomr_cutlass

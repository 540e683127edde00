// What timings taught beyond the model's formulas: logarithms of launches' times over their estimates, by networks of
// one hidden layer. benchmarks/fit_few.py wrote few_correction.inc from timings of every division of random problems,
// benchmarks/fit_kernels.py kernel_correction.inc from timings of kernels. Where the constants of the formulas change,
// run them again, in this order and with the package built in between: the second compares with what the first
// corrects.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace atomr_cutlass::estimate {

template <size_t kInputs_, size_t kHidden, size_t kOutputs>
struct Network {
  static constexpr size_t kInputs = kInputs_, kAtOnce = 8;
  static_assert(kHidden % kAtOnce == 0);

  // The inputs of the timings lay between these, and others are moved there.
  float least[kInputs], most[kInputs];
  // Of each input its weights in the hidden units, at the end their constants; of each output the weights of the units
  // and a constant.
  float hidden[kInputs + 1][kHidden];
  float outputs[kOutputs][kHidden + 1];

  // Of the first of some inputs.
  template <size_t kGiven>
  float operator()(std::array<float, kGiven> const& inputs, size_t output) const {
    static_assert(kGiven >= kInputs);
    std::array<float, kInputs> known;
    for (size_t j = 0; j < kInputs; ++j) known[j] = std::clamp(inputs[j], least[j], most[j]);
    float const* const weights = outputs[output];
    float sum = weights[kHidden];
    for (size_t first = 0; first < kHidden; first += kAtOnce) {
      float units[kAtOnce];  // which stay in registers
      for (size_t i = 0; i < kAtOnce; ++i) units[i] = hidden[kInputs][first + i];
      for (size_t j = 0; j < kInputs; ++j) {
        for (size_t i = 0; i < kAtOnce; ++i) units[i] += hidden[j][first + i] * known[j];
      }
      for (size_t i = 0; i < kAtOnce; ++i) sum += weights[first + i] * std::max(units[i], 0.0f);
    }
    return sum;
  }
};

// Of kernels for few rows. The outputs are for launches that wait for the one before, and for chains of launches with
// bound weights.
struct FewCorrection {
  // The fewest rows of weights of the timings, and bytes of a row. Of smaller problems nothing is known.
  static constexpr double kLeastRows = 1024, kLeastRowBytes = 2048;

  int clusters;  // the sizes of the clusters that were timed, powers of 2, added up
  Network<22, 32, 2> network;

  using Inputs = std::array<float, decltype(network)::kInputs>;
};

// Of weights along K (a column-major B), and of row-major ones.
#include "few_correction.inc"

// Of kernels of the sm90 generation that multiply 16-bit elements, but for few rows, and of those that multiply fp8,
// for few rows too: there what their own correction leaves, which was trained with bf16. Model::is_corrected says which
// of them. Corrections are kept between least() and kMost: the lower the former, the fewer kernels a bound on their
// time rules out. The formulas are up to 1.46 times too long for fp8: -0.2 left choices that take three times as long.
struct KernelCorrection {
  static constexpr double kMost = 0.4;
  static constexpr double least(bool fp8) { return fp8 ? -0.4 : -0.2; }
  // The last ones, which tell the kernels of fp8 apart, are no inputs of the network for 16-bit elements.
  static constexpr size_t kInputs = 38, kInputsOfHalf = 35;
  using Inputs = std::array<float, kInputs>;

  Network<kInputsOfHalf, 32, 1> half;
  Network<kInputs, 32, 1> fp8;
};

#include "kernel_correction.inc"

}  // namespace atomr_cutlass::estimate

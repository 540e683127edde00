// What timings taught about kernels for few rows beyond the model's formula: the logarithm of a launch's time over its
// estimate, by a network of one hidden layer. benchmarks/fit_few.py wrote its numbers, from timings of every division
// of random problems; it has to be run again where the formula's constants (FEW_*) change.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace atomr_cutlass::estimate {

struct FewCorrection {
  static constexpr size_t kInputs = 21, kHidden = 32;
  // The fewest rows of weights of the timings, and bytes of a row. Of smaller problems nothing is known.
  static constexpr double kLeastRows = 1024, kLeastRowBytes = 2048;

  using Inputs = std::array<float, kInputs>;

  int clusters;  // the sizes of the clusters that were timed, powers of 2, added up
  // The inputs of the timings lay between these, and others are moved there.
  float least[kInputs], most[kInputs];
  // Of each hidden unit the weights of the inputs and a constant, of each output those of the units and a constant. The
  // outputs are for launches that wait for the one before, and for chains of launches with bound weights.
  float hidden[kHidden][kInputs + 1];
  float outputs[2][kHidden + 1];

  float logarithm(Inputs const& inputs, bool bound) const {
    Inputs known;
    for (size_t j = 0; j < kInputs; ++j) known[j] = std::clamp(inputs[j], least[j], most[j]);
    float const* const weights = outputs[bound ? 1 : 0];
    float sum = weights[kHidden];
    for (size_t i = 0; i < kHidden; ++i) {
      float unit = hidden[i][kInputs];
      for (size_t j = 0; j < kInputs; ++j) unit += hidden[i][j] * known[j];
      sum += weights[i] * std::max(unit, 0.0f);
    }
    return sum;
  }
};

// Of weights along K (a column-major B), and of row-major ones.
#include "few_correction.inc"

}  // namespace atomr_cutlass::estimate

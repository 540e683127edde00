// The kernels that may serve problems of the same types, layouts and alignments, in the order of their estimated times.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "estimate.h"

namespace atomr_cutlass::estimate {

class Ranking {
 public:
  // A kernel, how well its arch suits the GPU (0 best), its shared memory, and which formulations of a problem match
  // it.
  struct Entry {
    int suitability;
    std::shared_ptr<Kernel const> kernel;
    int64_t shared_bytes;
    std::vector<int> places;
  };

  // An entry in a formulation, by their places, with the launch that is best for it.
  struct Found {
    size_t entry;
    int place;
    Launch launch;
  };

  Ranking(std::shared_ptr<Model const> model, Gpu gpu, std::vector<Entry> entries)
      : model_(std::move(model)),
        gpu_(gpu),
        entries_(std::move(entries)) {}

  // All that serve, best first: the suitable ones before others, then by their times and names.
  // `extents`: of each formulation; `whole`: K must not be divided.
  std::vector<Found> every(std::vector<std::vector<int64_t>> const& extents, bool whole) const;
  // The first of these; the launches of those that cannot be it are not estimated.
  std::optional<Found> first(std::vector<std::vector<int64_t>> const& extents, bool whole) const;

 private:
  struct Waiting {
    size_t entry;
    int place;
    Extents extents;
    double bound;
  };
  std::vector<Waiting> serving(std::vector<std::vector<int64_t>> const& extents) const;
  Found found(Waiting const& waiting, bool whole) const;
  bool before(Found const& a, Found const& b) const;

  std::shared_ptr<Model const> model_;
  Gpu gpu_;
  std::vector<Entry> entries_;
};

}  // namespace atomr_cutlass::estimate

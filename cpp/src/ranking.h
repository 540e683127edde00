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

  Ranking(std::shared_ptr<Model const> model, Gpu gpu, std::vector<Entry> const& entries);

  // All entries that serve, best first: by the arch's suitability, then by time and name.
  // `extents`: of each formulation; `whole`: K must not be divided.
  std::vector<Found> every(std::vector<std::vector<int64_t>> const& extents, bool whole) const;
  // The best entry; launches of entries that cannot be the best are not estimated.
  std::optional<Found> first(std::vector<std::vector<int64_t>> const& extents, bool whole) const;

 private:
  // An entry as it lies beside the others, in memory that the first call of a shape finds in no cache.
  struct Ranked {
    Kernel kernel;
    int suitability;
    int64_t shared_bytes;
  };
  // A formulation of a problem that matches a kernel.
  struct Pair {
    size_t entry;
    int place;
  };
  struct Waiting {
    Pair pair;
    Extents const* extents;
    double bound;
  };
  // The problem in each formulation that has been read.
  using Read = std::vector<std::optional<Extents>>;
  std::vector<Waiting> serving(std::vector<std::vector<int64_t>> const& extents, Read& read) const;
  Found found(Waiting const& waiting, bool whole) const;
  bool before(Found const& a, Found const& b) const;

  std::shared_ptr<Model const> model_;
  Gpu gpu_;
  std::vector<Ranked> entries_;
  std::vector<Pair> pairs_;  // in the order of entries and formulations, which breaks ties
};

}  // namespace atomr_cutlass::estimate

#include "ranking.h"

#include <algorithm>

namespace atomr_cutlass::estimate {

// In the order of entries and formulations, which decides where all else is alike.
std::vector<Ranking::Waiting> Ranking::serving(std::vector<std::vector<int64_t>> const& extents) const {
  std::vector<Waiting> made;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Kernel const& kernel = *entries_[i].kernel;
    for (int const place : entries_[i].places) {
      Extents const of = Extents::of(kernel.op, extents.at(size_t(place)));
      if (kernel.mainloop == Mainloop::kFew && !is_few(kernel, of.m, of.n)) continue;
      if (of.divided && model_->slices(kernel, of, gpu_).empty()) continue;
      made.push_back({i, place, of, 0.0});
    }
  }
  return made;
}

Ranking::Found Ranking::found(Waiting const& waiting, bool whole) const {
  Entry const& entry = entries_[waiting.entry];
  Launch launch = model_->best(*entry.kernel, waiting.extents, gpu_, entry.shared_bytes, whole);
  launch.seconds *= model_->part(*entry.kernel);
  return {waiting.entry, waiting.place, launch};
}

bool Ranking::before(Found const& a, Found const& b) const {
  Entry const &of_a = entries_[a.entry], &of_b = entries_[b.entry];
  if (of_a.suitability != of_b.suitability) return of_a.suitability < of_b.suitability;
  if (a.launch.seconds != b.launch.seconds) return a.launch.seconds < b.launch.seconds;
  if (int const order = of_a.kernel->name.compare(of_b.kernel->name); order != 0) return order < 0;
  return std::pair(a.entry, a.place) < std::pair(b.entry, b.place);
}

std::vector<Ranking::Found> Ranking::every(std::vector<std::vector<int64_t>> const& extents, bool whole) const {
  std::vector<Found> made;
  for (Waiting const& waiting : serving(extents)) made.push_back(found(waiting, whole));
  std::sort(made.begin(), made.end(), [this](Found const& a, Found const& b) { return before(a, b); });
  return made;
}

std::optional<Ranking::Found> Ranking::first(std::vector<std::vector<int64_t>> const& extents, bool whole) const {
  std::vector<Waiting> waiting = serving(extents);
  for (Waiting& each : waiting) {
    Kernel const& kernel = *entries_[each.entry].kernel;
    each.bound = model_->bound(kernel, each.extents, gpu_) * model_->part(kernel);
  }
  auto const promise = [this](Waiting const& of) { return std::pair(entries_[of.entry].suitability, of.bound); };
  std::vector<Waiting const*> order;
  order.reserve(waiting.size());
  for (Waiting const& each : waiting) order.push_back(&each);
  std::sort(order.begin(), order.end(), [&](Waiting const* a, Waiting const* b) { return promise(*a) < promise(*b); });
  std::optional<Found> best;
  for (Waiting const* each : order) {
    if (best && promise(*each) > std::pair(entries_[best->entry].suitability, best->launch.seconds)) break;
    Found const tried = found(*each, whole);
    if (!best || before(tried, *best)) best = tried;
  }
  return best;
}

}  // namespace atomr_cutlass::estimate

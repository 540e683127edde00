#include "ranking.h"

#include <algorithm>

namespace atomr_cutlass::estimate {

Ranking::Ranking(std::shared_ptr<Model const> model, Gpu gpu, std::vector<Entry> const& entries)
    : model_(std::move(model)),
      gpu_(gpu) {
  for (Entry const& entry : entries) {
    for (int const place : entry.places) pairs_.push_back({entries_.size(), place});
    entries_.push_back({*entry.kernel, entry.suitability, entry.shared_bytes});
  }
}

std::vector<Ranking::Waiting> Ranking::serving(std::vector<std::vector<int64_t>> const& extents, Read& read) const {
  read.resize(extents.size());
  std::vector<Waiting> made;
  made.reserve(pairs_.size());
  for (Pair const& pair : pairs_) {
    Kernel const& kernel = entries_[pair.entry].kernel;
    std::optional<Extents>& of = read.at(size_t(pair.place));
    if (!of) of = Extents::of(kernel.op, extents[size_t(pair.place)]);
    if (!is_for(kernel, of->m, of->n, of->k)) continue;
    if (of->divided != 0 && model_->slices(kernel, *of, gpu_).empty()) continue;
    made.push_back({pair, &*of, 0.0});
  }
  return made;
}

Ranking::Found Ranking::found(Waiting const& waiting, bool whole) const {
  auto const [entry, place] = waiting.pair;
  Ranked const& of = entries_[entry];
  Launch launch = model_->best(of.kernel, *waiting.extents, gpu_, of.shared_bytes, whole);
  launch.seconds *= model_->part(of.kernel);
  return {entry, place, launch};
}

bool Ranking::before(Found const& a, Found const& b) const {
  Ranked const &of_a = entries_[a.entry], &of_b = entries_[b.entry];
  if (of_a.suitability != of_b.suitability) return of_a.suitability < of_b.suitability;
  if (a.launch.seconds != b.launch.seconds) return a.launch.seconds < b.launch.seconds;
  if (int const order = of_a.kernel.name.compare(of_b.kernel.name); order != 0) return order < 0;
  return std::pair(a.entry, a.place) < std::pair(b.entry, b.place);
}

std::vector<Ranking::Found> Ranking::every(std::vector<std::vector<int64_t>> const& extents, bool whole) const {
  Read read;
  std::vector<Found> made;
  for (Waiting const& waiting : serving(extents, read)) made.push_back(found(waiting, whole));
  std::sort(made.begin(), made.end(), [this](Found const& a, Found const& b) { return before(a, b); });
  return made;
}

std::optional<Ranking::Found> Ranking::first(std::vector<std::vector<int64_t>> const& extents, bool whole) const {
  Read read;
  std::vector<Waiting> waiting = serving(extents, read);
  for (Waiting& each : waiting) {
    Kernel const& kernel = entries_[each.pair.entry].kernel;
    each.bound = model_->bound(kernel, *each.extents, gpu_) * model_->part(kernel);
  }
  auto const promise = [this](Waiting const& of) { return std::pair(entries_[of.pair.entry].suitability, of.bound); };
  // A heap, of which few are taken, the most promising first.
  auto const after = [&](Waiting const& a, Waiting const& b) { return promise(a) > promise(b); };
  std::make_heap(waiting.begin(), waiting.end(), after);
  std::optional<Found> best;
  for (; !waiting.empty(); waiting.pop_back()) {
    std::pop_heap(waiting.begin(), waiting.end(), after);
    Waiting const& each = waiting.back();
    if (best && promise(each) > std::pair(entries_[best->entry].suitability, best->launch.seconds)) break;
    Found const tried = found(each, whole);
    if (!best || before(tried, *best)) best = tried;
  }
  return best;
}

}  // namespace atomr_cutlass::estimate

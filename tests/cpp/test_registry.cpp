// The table: rows that are linked in, and packs that add to them.
#include "registry.h"

#include <set>
#include <vector>

#include "check.h"
#include "errors.h"
#include "fake_libraries.h"

using namespace atomr_cutlass;

namespace {

atomr_cutlass_row row_named(char const* name, uint32_t cuda_version = 13000) {
  atomr_cutlass_row row{};
  row.name = name;
  row.key = "{}";
  row.cuda_version = cuda_version;
  return row;
}

// Packs are libraries, whose function has no parameters: each has its own type here.
template <int kNumber>
struct Pack {
  inline static std::vector<atomr_cutlass_row const*> rows;
  inline static atomr_cutlass_pack pack;

  static atomr_cutlass_pack const* entry() { return &pack; }

  static void install(char const* path, std::vector<atomr_cutlass_row const*> given,
                      unsigned abi = ATOMR_CUTLASS_ABI_VERSION) {
    rows = std::move(given);
    pack = {abi, path, uint32_t(rows.size()), rows.data()};
    fake::libraries()[path] = {{ATOMR_CUTLASS_PACK_SYMBOL, fake::symbol(&entry)}};
  }
};

}  // namespace

int main() {
  fake::libraries()["libcuda.so.1"] = fake::driver();
  fake::device().version = 13000;
  size_t const own = registered_rows().size();
  CHECK_EQUAL(registry_generation(), 0u);

  static atomr_cutlass_row const one = row_named("one"), two = row_named("two"), other_one = row_named("one");
  Pack<1>::install("first", {&one});
  CHECK_EQUAL(load_pack("first"), 1u);
  CHECK_EQUAL(registry_generation(), 1u);
  CHECK(find_row("one") == &one);
  CHECK_EQUAL(registered_rows().back().pack, "first");

  // Again: nothing is new.
  CHECK_EQUAL(load_pack("first"), 0u);
  CHECK_EQUAL(registry_generation(), 1u);
  CHECK_EQUAL(registered_rows().size(), own + 1);

  // An earlier pack wins over a later one.
  Pack<2>::install("second", {&other_one, &two});
  CHECK_EQUAL(load_pack("second"), 1u);
  CHECK(find_row("one") == &one);
  CHECK(find_row("two") == &two);
  CHECK_EQUAL(registry_generation(), 2u);

  // One row twice in a pack is one row.
  static atomr_cutlass_row const three = row_named("three");
  Pack<3>::install("third", {&three, &three});
  CHECK_EQUAL(load_pack("third"), 1u);

  Pack<4>::install("empty", {});
  CHECK_EQUAL(load_pack("empty"), 0u);
  CHECK_EQUAL(registry_generation(), 3u);

  CHECK_THROWS(LibraryFailure, "cannot open missing: no such file", load_pack("missing"));
  fake::libraries()["other"] = {};
  CHECK_THROWS(LibraryFailure, "other is not an atomr_cutlass pack: it does not export atomr_cutlass_pack_v1",
               load_pack("other"));
  static atomr_cutlass_row const unwanted = row_named("unwanted");
  Pack<5>::install("later", {&unwanted}, ATOMR_CUTLASS_ABI_VERSION + 1);
  CHECK_THROWS(LibraryFailure,
               "later was built for ABI " + std::to_string(ATOMR_CUTLASS_ABI_VERSION + 1) +
                   "; this package speaks ABI " + std::to_string(ATOMR_CUTLASS_ABI_VERSION) + ": rebuild the pack",
               load_pack("later"));
  static atomr_cutlass_row const newer = row_named("newer", 14000), minor = row_named("minor", 13090);
  Pack<6>::install("newer", {&unwanted, &newer});
  CHECK_THROWS(LibraryFailure, "newer was built with CUDA 14; the driver knows CUDA up to 13: update the driver",
               load_pack("newer"));
  // Nothing of a refused pack is in the table.
  CHECK(find_row("unwanted") == nullptr);
  CHECK_EQUAL(registry_generation(), 3u);
  // Minor versions of one major version go together.
  Pack<7>::install("minor", {&minor});
  CHECK_EQUAL(load_pack("minor"), 1u);

  std::set<std::string> names;
  for (RegisteredRow const& entry : registered_rows()) {
    CHECK(names.insert(entry.row->name).second);
    CHECK(find_row(entry.row->name) == entry.row);
  }
  CHECK_EQUAL(names.size(), own + 4);
  return check::result();
}

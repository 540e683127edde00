// The table: rows that are linked in, and packs that add to them.
#include "registry.h"

#include <iterator>
#include <list>
#include <set>
#include <stdexcept>
#include <vector>

#include "atomr_cutlass/abi_layout.h"
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
                      unsigned version = ATOMR_CUTLASS_ABI_VERSION) {
    rows = std::move(given);
    pack = {version, abi::kStructCount, abi::kLayoutDigest, abi::kStructs, path, rows.data(), uint32_t(rows.size()), 0};
    fake::libraries()[path] = {{ATOMR_CUTLASS_PACK_SYMBOL, fake::symbol(&entry)}};
  }

  // Of a pack whose compiler laid these structs out in its own way.
  static void lay_out(std::vector<atomr_cutlass_struct_layout> const& structs) {
    static std::vector<atomr_cutlass_struct_layout> kept;
    kept = structs;
    pack.structs = kept.data();
    pack.struct_count = uint32_t(kept.size());
    pack.layout_digest = abi::digest_of(pack.structs, pack.struct_count);
  }
};

using Structs = std::vector<atomr_cutlass_struct_layout>;
using FieldList = std::vector<atomr_cutlass_field_layout>;

Structs own_structs() { return {std::begin(abi::kStructs), std::end(abi::kStructs)}; }

atomr_cutlass_struct_layout& struct_named(Structs& structs, std::string const& name) {
  for (auto& one : structs) {
    if (one.name == name) return one;
  }
  throw std::logic_error("there is no struct " + name);
}

// The structs of this package, where one has these fields.
Structs with_fields(std::string const& name, FieldList const& fields, uint32_t bytes) {
  static std::list<FieldList> kept;
  kept.push_back(fields);
  Structs structs = own_structs();
  auto& one = struct_named(structs, name);
  one = {one.name, kept.back().data(), uint32_t(fields.size()), bytes};
  return structs;
}

void test_a_pack_of_another_layout_is_refused() {
  static atomr_cutlass_row const strange = row_named("strange");
  unsigned const generation = registry_generation();
  Structs structs = own_structs();
  auto const row = struct_named(structs, "atomr_cutlass_row");
  FieldList const fields(row.fields, row.fields + row.field_count);
  auto const refused = [&](Structs const& theirs, std::string const& says) {
    Pack<8>::install("strange", {&strange});
    Pack<8>::lay_out(theirs);
    CHECK_THROWS(LibraryFailure, "strange was built for another layout of the ABI's structs (", load_pack("strange"));
    CHECK_THROWS(LibraryFailure, "): " + says, load_pack("strange"));
    CHECK(find_row("strange") == nullptr);
    CHECK_EQUAL(registry_generation(), generation);
  };

  FieldList more = fields;  // a field that this package does not know moves all that follow
  more.insert(more.begin() + 2, {"novelty", 16, 8, 'u', 0});
  for (size_t i = 3; i < more.size(); ++i) more[i].offset += 8;
  refused(with_fields("atomr_cutlass_row", more, row.bytes + 8), "this package lacks atomr_cutlass_row.novelty");

  FieldList fewer = fields;
  fewer.pop_back();
  refused(with_fields("atomr_cutlass_row", fewer, row.bytes - 8), "the pack lacks atomr_cutlass_row.launch");

  FieldList moved = fields;
  std::swap(moved[0].offset, moved[1].offset);
  refused(with_fields("atomr_cutlass_row", moved, row.bytes),
          "atomr_cutlass_row.name is 8 bytes (address) at 8 in the pack and 8 bytes (address) at 0 in this package");
  FieldList other = fields;
  other[3].kind = 'i';
  refused(with_fields("atomr_cutlass_row", other, row.bytes),
          "atomr_cutlass_row.params_bytes is 4 bytes (signed) at 24 in the pack and 4 bytes (unsigned) at 24");
  refused(with_fields("atomr_cutlass_row", fields, row.bytes + 64),
          "atomr_cutlass_row has " + std::to_string(row.bytes + 64) + " bytes in the pack and ");
  Structs without = structs;
  without.pop_back();
  refused(without, std::string("the pack lacks ") + structs.back().name);
  Structs with = structs;
  with.push_back({"atomr_cutlass_future", row.fields, 1, 8});
  refused(with, "this package lacks atomr_cutlass_future");
  refused({}, "the pack lacks atomr_cutlass_tree_operand; the pack lacks ");

  // The same pack, as this package lays it out.
  Pack<8>::install("strange", {&strange});
  CHECK_EQUAL(load_pack("strange"), 1u);
}

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

  // Every row is looked at before the first one is registered.
  static atomr_cutlass_row const good = row_named("good"), bad = row_named("bad");
  std::vector<std::string> seen;
  RowCheck const check = [&seen](char const* name, char const* key) {
    seen.push_back(std::string(name) + key);
    if (seen.back() == "bad{}") throw LibraryFailure("pack", "bad is no kernel");
  };
  Pack<20>::install("mixed", {&good, &bad});
  CHECK_THROWS(LibraryFailure, "bad is no kernel", load_pack("mixed", check));
  CHECK(find_row("good") == nullptr);
  CHECK_EQUAL(registry_generation(), 4u);
  CHECK((seen == std::vector<std::string>{"good{}", "bad{}"}));
  Pack<21>::install("checked", {&good});
  CHECK_EQUAL(load_pack("checked", check), 1u);

  std::set<std::string> names;
  for (RegisteredRow const& entry : registered_rows()) {
    CHECK(names.insert(entry.row->name).second);
    CHECK(find_row(entry.row->name) == entry.row);
  }
  CHECK_EQUAL(names.size(), own + 5);
  test_a_pack_of_another_layout_is_refused();
  return check::result();
}

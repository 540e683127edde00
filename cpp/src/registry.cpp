#include "registry.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "atomr_cutlass/abi_layout.h"
#include "atomr_cutlass/table.h"
#include "driver.h"
#include "errors.h"

namespace atomr_cutlass {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<RegisteredRow> rows;
  std::unordered_map<std::string, atomr_cutlass_row const*> by_name;
  unsigned generation = 0;

  Registry() {
    for (unsigned i = 0; i < kRowCount; ++i) add(kRows[i], "");
  }

  bool add(atomr_cutlass_row const* row, std::string const& pack) {
    if (!by_name.emplace(row->name, row).second) return false;
    rows.push_back({row, pack});
    return true;
  }
};

Registry& registry() {
  static Registry instance;
  return instance;
}

using FieldLayout = atomr_cutlass_field_layout;
using StructLayout = atomr_cutlass_struct_layout;

template <class Named>
Named const* find_named(Named const* all, uint32_t count, char const* name) {
  for (uint32_t i = 0; i < count; ++i) {
    if (std::strcmp(all[i].name, name) == 0) return &all[i];
  }
  return nullptr;
}

// "struct.field" of each of `some` that `others` lack.
std::vector<std::string> lacking(StructLayout const& some, StructLayout const& others) {
  std::vector<std::string> names;
  for (uint32_t i = 0; i < some.field_count; ++i) {
    char const* const name = some.fields[i].name;
    if (find_named(others.fields, others.field_count, name) == nullptr) {
      names.push_back(std::string(some.name) + "." + name);
    }
  }
  return names;
}

std::string place(FieldLayout const& field) {
  static std::pair<char, char const*> constexpr kKinds[] = {
      {'i', "signed"}, {'u', "unsigned"}, {'f', "floating point"}, {'p', "address"}, {'s', "struct"}};
  std::string kind = "unknown";
  for (auto const& [letter, name] : kKinds) {
    if (field.kind == uint32_t(letter)) kind = name;
  }
  return std::to_string(field.bytes) + " bytes (" + kind + ") at " + std::to_string(field.offset);
}

// How a pack's struct differs from this package's; empty when it does not. Fields that were added or removed have moved
// all others: those are not told.
std::string difference(StructLayout const& theirs, StructLayout const& ours) {
  std::string said;
  auto const tell = [&said](std::string const& text) { said += (said.empty() ? "" : "; ") + text; };
  for (std::string const& name : lacking(ours, theirs)) tell("the pack lacks " + name);
  for (std::string const& name : lacking(theirs, ours)) tell("this package lacks " + name);
  for (uint32_t i = 0; said.empty() && i < ours.field_count; ++i) {
    FieldLayout const& here = ours.fields[i];
    FieldLayout const& there = *find_named(theirs.fields, theirs.field_count, here.name);
    if (here.offset != there.offset || here.bytes != there.bytes || here.kind != there.kind) {
      tell(std::string(ours.name) + "." + here.name + " is " + place(there) + " in the pack and " + place(here) +
           " in this package");
    }
  }
  if (said.empty() && theirs.bytes != ours.bytes) {
    tell(std::string(ours.name) + " has " + std::to_string(theirs.bytes) + " bytes in the pack and " +
         std::to_string(ours.bytes) + " in this package");
  }
  return said;
}

std::string layout_difference(atomr_cutlass_pack const& pack) {
  std::string said;
  auto const tell = [&said](std::string const& text) { said += (said.empty() || text.empty() ? "" : "; ") + text; };
  for (StructLayout const& ours : abi::kStructs) {
    StructLayout const* theirs = find_named(pack.structs, pack.struct_count, ours.name);
    tell(theirs == nullptr ? std::string("the pack lacks ") + ours.name : difference(*theirs, ours));
  }
  for (uint32_t i = 0; i < pack.struct_count; ++i) {
    char const* const name = pack.structs[i].name;
    if (find_named(abi::kStructs, abi::kStructCount, name) == nullptr) {
      tell(std::string("this package lacks ") + name);
    }
  }
  if (said.empty()) said = "the same fields in another order";
  return said;
}

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

std::vector<RegisteredRow> registered_rows() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().rows;
}

atomr_cutlass_row const* find_row(std::string const& name) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto const found = registry().by_name.find(name);
  return found == registry().by_name.end() ? nullptr : found->second;
}

unsigned registry_generation() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().generation;
}

void note_table_growth() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  ++registry().generation;
}

size_t load_pack(std::string const& path, RowCheck const& check) {
  // RTLD_LOCAL: two packs may hold symbols of the same name. Never closed: rows point into it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw LibraryFailure("pack", "cannot open " + path + ": " + dlerror());
  auto const entry = reinterpret_cast<atomr_cutlass_pack_fn>(dlsym(library, ATOMR_CUTLASS_PACK_SYMBOL));
  if (entry == nullptr) {
    dlclose(library);
    throw LibraryFailure("pack", path + " is not an atomr_cutlass pack: it does not export " ATOMR_CUTLASS_PACK_SYMBOL);
  }
  atomr_cutlass_pack const* pack = entry();
  if (pack->abi_version != ATOMR_CUTLASS_ABI_VERSION) {
    unsigned const version = pack->abi_version;
    dlclose(library);
    throw LibraryFailure("pack", path + " was built for ABI " + std::to_string(version) + "; this package speaks ABI " +
                                     std::to_string(ATOMR_CUTLASS_ABI_VERSION) + ": rebuild the pack");
  }
  if (pack->layout_digest != abi::kLayoutDigest) {
    std::string const said = path + " was built for another layout of the ABI's structs (" +
                             hexadecimal(pack->layout_digest) + "; this package has " +
                             hexadecimal(abi::kLayoutDigest) + "): " + layout_difference(*pack) + ": rebuild the pack";
    dlclose(library);
    throw LibraryFailure("pack", said);
  }
  if (driver_available()) {
    for (unsigned i = 0; i < pack->count; ++i) {
      unsigned const built = pack->rows[i]->cuda_version;
      if (built / 1000 > unsigned(driver_version()) / 1000) {
        dlclose(library);
        throw LibraryFailure("pack", path + " was built with CUDA " + std::to_string(built / 1000) +
                                         "; the driver knows CUDA up to " + std::to_string(driver_version() / 1000) +
                                         ": update the driver or build the pack with an older toolkit");
      }
    }
  }
  if (check) {
    try {
      for (unsigned i = 0; i < pack->count; ++i) check(pack->rows[i]->name, pack->rows[i]->key);
    } catch (...) {
      dlclose(library);
      throw;
    }
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  size_t added = 0;
  for (unsigned i = 0; i < pack->count; ++i) added += registry().add(pack->rows[i], pack->name);
  if (added != 0) ++registry().generation;
  return added;
}

}  // namespace atomr_cutlass

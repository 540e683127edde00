#include "registry.h"

#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

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

size_t load_pack(std::string const& path) {
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
  std::lock_guard<std::mutex> lock(registry().mutex);
  size_t added = 0;
  for (unsigned i = 0; i < pack->count; ++i) added += registry().add(pack->rows[i], pack->name);
  if (added != 0) ++registry().generation;
  return added;
}

}  // namespace atomr_cutlass

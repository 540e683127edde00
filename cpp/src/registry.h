// All rows that this process can launch: those linked in, and those of packs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

struct RegisteredRow {
  atomr_cutlass_row const* row;
  std::string pack;  // empty for the rows linked into the extension
};

// A snapshot; rows are never removed.
std::vector<RegisteredRow> registered_rows();

// The row of this name, or null. A row linked in wins over a pack's, an earlier pack over a later one.
atomr_cutlass_row const* find_row(std::string const& name);

// Counts the packs loaded so far: a cheap way to see that the table has grown.
unsigned registry_generation();
// Counts a pack whose kernels Python knows.
void note_table_growth();

// Loads a pack and returns how many of its rows are new. Loading one twice changes nothing. Throws LibraryFailure
// naming the pack when it can't be opened, is no pack, or was built for another ABI or another layout of its structs.
//
// `check`, if given, sees the name and the key of every row before the first of them is registered, and throws where
// they are no kernel's: then nothing of the pack is in the table.
using RowCheck = std::function<void(char const* name, char const* key)>;
size_t load_pack(std::string const& path, RowCheck const& check = nullptr);

}  // namespace atomr_cutlass

#include "environment.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace atomr_cutlass {
namespace {

// How often the environment has changed, as far as anybody looked. The C library writes no string of it in place, but
// puts another one there: to compare addresses takes a tenth of what comparing names takes.
unsigned long changes() {
  static auto& seen = *new std::vector<char*>();
  static char** place = nullptr;
  static unsigned long count = 0;
  static char* none = nullptr;
  char** const now = environ != nullptr ? environ : &none;
  // At the same place there is room for as many as there were; the null at their end is compared too.
  if (now == place && std::memcmp(now, seen.data(), seen.size() * sizeof(char*)) == 0) return count;
  place = now;
  seen.clear();
  for (char** entry = now; *entry != nullptr; ++entry) seen.push_back(*entry);
  seen.push_back(nullptr);
  return ++count;
}

}  // namespace

std::vector<std::string> const& Environment::values() {
  unsigned long const now = changes();
  if (now == change_) return values_;
  values_.clear();
  for (std::string const& name : names_) {
    char const* const value = std::getenv(name.c_str());
    values_.emplace_back(value != nullptr ? value : "");
  }
  change_ = now;
  return values_;
}

}  // namespace atomr_cutlass

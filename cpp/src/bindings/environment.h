// Variables of the process's environment that every call depends on.
#pragma once

#include <string>
#include <vector>

namespace atomr_cutlass {

// What some variables hold, read again only where the environment has changed since. The GIL guards it, as it guards
// `os.environ`.
class Environment {
 public:
  explicit Environment(std::vector<std::string> names) : names_(std::move(names)) {}

  // In the order of the names; empty for what is not set.
  std::vector<std::string> const& values();

 private:
  std::vector<std::string> names_, values_;
  unsigned long change_ = 0;  // that the values are as of
};

}  // namespace atomr_cutlass

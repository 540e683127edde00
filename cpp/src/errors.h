// C++ exceptions that become the package's Python errors (module.cpp registers the translation).
#pragma once

#include <stdexcept>
#include <string>

namespace atomr_cutlass {

struct InvalidOperand : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DeviceUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ContextPoisoned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LibraryFailure : std::runtime_error {
  LibraryFailure(std::string library, std::string const& message)
      : std::runtime_error(message),
        library(std::move(library)) {}
  std::string library;
};

}  // namespace atomr_cutlass

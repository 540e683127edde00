// Assertions for the C++ tests: each failure is printed with its place, and the executable exits with how many there
// were.
#pragma once

#include <cstdio>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>

namespace check {

inline int failures = 0;

inline void report(char const* file, int line, std::string const& what) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class Left, class Right>
void equal(Left const& left, Right const& right, char const* text, char const* file, int line) {
  if (left == right) return;
  std::ostringstream message;
  message << text << ": " << left << " is not " << right;
  report(file, line, message.str());
}

// Whether `call` throws an Error whose message holds `says`.
template <class Error>
void throws(std::function<void()> const& call, std::string const& says, char const* file, int line) {
  try {
    call();
  } catch (Error const& error) {
    if (std::string(error.what()).find(says) == std::string::npos) {
      report(file, line, "expected a message with \"" + says + "\", not \"" + error.what() + "\"");
    }
    return;
  } catch (std::exception const& error) {
    report(file, line, std::string("another exception: ") + error.what());
    return;
  }
  report(file, line, "nothing was thrown; expected \"" + says + "\"");
}

// The end of main: says how it went and gives the exit status.
inline int result() {
  if (failures != 0) std::fprintf(stderr, "%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) check::report(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)
#define CHECK_EQUAL(left, right) check::equal((left), (right), #left, __FILE__, __LINE__)
#define CHECK_THROWS(Error, says, ...) check::throws<Error>([&] { (void)(__VA_ARGS__); }, says, __FILE__, __LINE__)

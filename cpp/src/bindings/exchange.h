// From Python arrays to operands: through DLPack's C exchange API where the array's type has one (PyTorch), which costs
// some ten nanoseconds; through the package's Python code otherwise.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "../driver.h"
#include "../operand.h"

namespace atomr_cutlass {

// An operand that keeps alive what it points into. Python sees it as `_core.Operand`.
struct OwnedOperand {
  Operand operand;
  pybind11::object owner;
  std::shared_ptr<Event const> written;  // the end of the launch that wrote it last; null where none is known of
};

// Notes that a launch on the stream writes the operand: whoever imports it waits for that. What is captured is left to
// the graph.
void note_written(OwnedOperand& operand, void* stream);

// Has the stream wait for the launch that wrote the operand last.
void await_written(OwnedOperand const& operand, void* stream);

// Properties of an array's type.
struct ArrayType {
  DlExchangeApi const* api;  // or null
  PyObject* requires_grad;  // the descriptor of tensors' attribute, or null
  bool own;  // `_core.Operand`
  bool numpy;  // NumPy's, in host memory
};

// Cheap from the second array of a type on; the type stays for ever.
ArrayType const& type_of(pybind11::handle array);

// The exchange API of the array's type, or null.
DlExchangeApi const* exchange_api(pybind11::handle array);

// A view of an array whose type has the API, as it is.
Operand view_through(DlExchangeApi const* api, pybind11::handle array);

// Throws InvalidOperandError for a tensor that requires a gradient while gradients are recorded; errors call it `name`.
void refuse_gradient(pybind11::handle array, char const* name);

// A result that a call makes: the array, what kernels write, and, unless the array is ready for the caller as it is,
// what its framework is given once the launch is under way. Of a framework that imports finished results only there is
// no array.
struct NewArray {
  pybind11::object array;
  Operand operand;  // row-major
  pybind11::object view;
  std::vector<int> const* axes;  // in which the caller gets its dimensions; null: as they are
};

// The arrays of one call, on the stream that it launches on: that is settled before any of them is imported.
//
// The stream waits for what the arrays' frameworks have under way on streams of their own, and those wait for what the
// call launches. Frameworks are left alone where the caller names the stream, but for memory that comes from them.
class CallArrays {
 public:
  // `stream` is the caller's, or None for the current one of the framework of `first`, which errors call `name`.
  CallArrays(pybind11::handle stream, pybind11::handle first, char const* name);

  // A view, which lives as long as this; of `first` too. Throws as `refuse_gradient` does.
  Operand import(pybind11::handle array, char const* name);

  // A row-major result of the framework of the first array, uninitialised. The caller gets it with its dimensions in
  // the order of `axes`, which outlive this.
  NewArray allocate(Operand const& layout, std::vector<int> const* axes = nullptr);

  // Calls `launch` with the stream, without the GIL. `finish` is to follow.
  template <class Launch>
  void run(Launch&& launch) {
    pybind11::gil_scoped_release release_gil;
    if (!others_.empty()) acquire();
    launch(stream_);
    if (!others_.empty()) release();
  }

  // `run` for a launch that holds the GIL.
  template <class Launch>
  void run_in_python(Launch&& launch) {
    if (!others_.empty()) acquire();
    launch(stream_);
    if (!others_.empty()) release();
  }

  // Notes that the launch writes an array of the caller's.
  void written(pybind11::handle array) const;
  // The array of a new result, in the form for the caller.
  pybind11::object exported(NewArray&& made) const;
  // To be called after all launches.
  void finish() const;

  // The package's `LaunchStream`, which has imported the arrays that Python reads; null where there are none.
  pybind11::object const& launch_stream() const { return launch_stream_; }

 private:
  struct Other {
    void* stream;
    bool fork;
  };

  void acquire() const;
  void release() const;
  pybind11::object const& python();

  pybind11::handle first_;
  Operand view_;  // of the first array, where that has an exchange API
  DlExchangeApi const* api_;
  bool named_;
  void* stream_ = nullptr;
  int device_ = 0;
  std::vector<Other> others_;
  std::vector<pybind11::object> keep_;
  pybind11::object launch_stream_;  // the package's `LaunchStream`, once an array is imported by Python
};

}  // namespace atomr_cutlass

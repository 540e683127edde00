#include "../errors.h"

#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

void raise(char const* name, char const* message) {
  py::set_error(py::module_::import("atomr_cutlass.errors").attr(name), message);
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (InvalidOperand const& error) {
      raise("InvalidOperandError", error.what());
    } catch (Unsupported const& error) {
      raise("UnsupportedError", error.what());
    } catch (DeviceUnavailable const& error) {
      raise("DeviceUnavailableError", error.what());
    } catch (ContextPoisoned const& error) {
      raise("ContextPoisonedError", error.what());
    } catch (LibraryFailure const& error) {
      py::object type = py::module_::import("atomr_cutlass.errors").attr("LibraryError");
      py::object value = type(error.library, error.what());
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

}  // namespace atomr_cutlass

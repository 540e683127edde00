// Python's way of calling objects without a tuple and a dictionary of arguments, which pybind11's types do not have.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace atomr_cutlass {

// Makes instances of a pybind11 class callable: `py::custom_type_setup(&Vectorcall<Class, &call>::setup)`. Arguments
// come as they lie on Python's stack, those that `names` (a tuple, or null) names last. What `Call` throws becomes
// Python's.
template <class Class, pybind11::object (*Call)(Class&, PyObject* const* values, size_t count, PyObject* names)>
class Vectorcall {
 public:
  static void setup(PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    offset = type.tp_basicsize;
    type.tp_basicsize += Py_ssize_t(sizeof(Callable));
    type.tp_vectorcall_offset = offset + Py_ssize_t(offsetof(Callable, call));
    type.tp_call = PyVectorcall_Call;
    type.tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    base_new = type.tp_base->tp_new;
    type.tp_new = [](PyTypeObject* made, PyObject* args, PyObject* kwargs) {
      PyObject* const self = base_new(made, args, kwargs);
      if (self != nullptr) callable_of(self) = {&called, nullptr};
      return self;
    };
  }

 private:
  // What instances have behind pybind11's part.
  struct Callable {
    vectorcallfunc call;
    Class* object;  // once it has been called
  };

  static Callable& callable_of(PyObject* self) {
    return *reinterpret_cast<Callable*>(reinterpret_cast<char*>(self) + offset);
  }

  static PyObject* called(PyObject* self, PyObject* const* values, size_t count, PyObject* names) {
    try {
      Callable& callable = callable_of(self);
      if (callable.object == nullptr) {
        // An instance that `__new__` made alone holds no object.
        auto* const made = reinterpret_cast<pybind11::detail::instance*>(self);
        if (!made->get_value_and_holder().holder_constructed()) throw pybind11::type_error("__init__ was not called");
        callable.object = pybind11::handle(self).cast<Class*>();
      }
      return Call(*callable.object, values, size_t(PyVectorcall_NARGS(count)), names).release().ptr();
    } catch (pybind11::error_already_set& error) {
      error.restore();
    } catch (...) {
      pybind11::detail::try_translate_exceptions();
    }
    return nullptr;
  }

  inline static Py_ssize_t offset = 0;
  inline static newfunc base_new = nullptr;
};

}  // namespace atomr_cutlass

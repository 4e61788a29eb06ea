// What pending operations hold of Python's and torch's, and on which thread it dies.
//
// The end of a Python object, or of a tensor that Python made, may want the GIL, which the core's own threads must not
// take: they would hang when the interpreter ends, or dead-lock with a caller that holds it. So what they let go of
// waits on the core's list of such objects (base/work_state.h).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "base/work_state.h"

namespace axo {

class PythonObject {
 public:
  explicit PythonObject(const pybind11::object& object) : object_(object.inc_ref().ptr()) {}
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;
  ~PythonObject() {
    if (Py_IsInitialized() == 0) return;
    pybind11::gil_scoped_acquire acquire;
    Py_DECREF(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

inline std::shared_ptr<PythonObject> held(const pybind11::object& object) {
  return object.is_none() ? nullptr : std::make_shared<PythonObject>(object);
}

// `object`, for an owner that may let go on any thread: it dies at once where that thread has the GIL, else with the
// program's next call or wait, or in the interpreter's pending-call queue.
template <class T>
std::shared_ptr<T> by_program(std::shared_ptr<T> object) {
  T* const address = object.get();
  if (address == nullptr) return nullptr;
  return std::shared_ptr<T>(address, [object = std::move(object)](T*) mutable {
    if (PyGILState_Check() != 0) return object.reset();
    release_later(std::move(object));
    Py_AddPendingCall([](void*) { return release_now(), 0; }, nullptr);
  });
}

}  // namespace axo

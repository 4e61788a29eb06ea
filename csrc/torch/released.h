// What finished operations held: destroyed on a thread of the program, never on one of the core's.
//
// A pending operation holds Python objects and tensors, whose end may want the GIL. A thread of the core never takes
// the GIL (it would hang when the interpreter ends, or dead-lock with a caller that holds it): it leaves the object on
// one list, which the next call or wait, or the interpreter's pending-call queue, empties.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace axo {

class Released {
 public:
  static void add(std::shared_ptr<void> object) {
    bool first = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      objects_.push_back(std::move(object));
      first = !any_.exchange(true, std::memory_order_release);
    }
    if (first) Py_AddPendingCall([](void*) { return drain(), 0; }, nullptr);
  }
  static void drain() {
    if (!any_.load(std::memory_order_acquire)) return;
    std::vector<std::shared_ptr<void>> objects;  // die after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    objects.swap(objects_);
    any_.store(false, std::memory_order_release);
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<std::shared_ptr<void>> objects_;
  static inline std::atomic<bool> any_{false};
};

// `object`, for the core to hold: its last owner destroys it at once if it has the GIL, else leaves it on the list.
template <class T>
std::shared_ptr<T> held(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(object.release(), [](T* last) {
    std::shared_ptr<T> owner(last);
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) Released::add(std::move(owner));
  });
}

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
  if (object.is_none()) return nullptr;
  return held(std::make_unique<PythonObject>(object));
}

}  // namespace axo

// What every binding of a collective is made of: codes into types, Python objects kept alive, one launch.
//
// Keep-alive. A pending operation holds Python objects, and the core may let go of them on a thread of its own. Such a
// thread never takes the GIL (it would hang at interpreter exit, or dead-lock with a caller that holds it): it leaves
// the object on a list, which the next bound call, or the interpreter's pending-call queue, empties.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/error.h"
#include "base/types.h"
#include "base/work.h"

namespace axo {

namespace py = pybind11;
using Address = std::uintptr_t;
using Counts = std::vector<std::size_t>;

class Discarded {
 public:
  static void add(PyObject* object) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      objects_.push_back(object);
      any_.store(true, std::memory_order_release);
    }
    Py_AddPendingCall([](void*) { return drain(), 0; }, nullptr);
  }
  // Call with the GIL held.
  static void drain() {
    if (!any_.load(std::memory_order_acquire)) return;
    std::vector<PyObject*> objects;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      objects.swap(objects_);
      any_.store(false, std::memory_order_release);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<PyObject*> objects_;
  static inline std::atomic<bool> any_{false};
};

inline std::shared_ptr<void> hold(const py::object& object) {
  if (object.is_none()) return {};
  return std::shared_ptr<void>(object.inc_ref().ptr(), [](void* held) {
    if (!Py_IsInitialized()) return;
    if (PyGILState_Check()) {
      Py_DECREF(static_cast<PyObject*>(held));
    } else {
      Discarded::add(static_cast<PyObject*>(held));
    }
  });
}

template <class T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int code) {
  AXO_CHECK(code >= 0 && code < kDTypeCount, "dtype code", code, "0 to " + std::to_string(kDTypeCount - 1));
  return static_cast<DType>(code);
}

inline ReduceOp op_of(int code) {
  AXO_CHECK(code >= 0 && code < kReduceOpCount, "op code", code, "0 to " + std::to_string(kReduceOpCount - 1));
  return static_cast<ReduceOp>(code);
}

// What every collective ends with: blocking, timeout in milliseconds (-1: the communicator's own), object to keep
// alive; on devices then the caller's stream, and whether the operation comes after what is on it. `call` runs without
// the GIL. A blocking call has nothing left to wait for, so it returns None.
template <class Call>
WorkPtr launch(bool blocking, std::int64_t timeout_ms, const py::object& keep, const Call& call, Address stream = 0,
               bool after_caller = true) {
  Discarded::drain();
  CallOptions options;
  options.blocking = blocking;
  options.timeout = Milliseconds(timeout_ms);
  options.stream = pointer(stream);
  options.after_caller = after_caller;
  if (!blocking) options.keep_alive = hold(keep);
  py::gil_scoped_release release;
  WorkPtr work = call(options);
  return blocking ? nullptr : work;
}

// The collectives of C, a Communicator. Stream: what a call takes beyond those of the host.
template <class C, class... Stream, class Class>
void bind_collectives(Class& bound) {
  bound
      .def("all_reduce",
           [](C& c, Address in, Address out, std::size_t n, int dtype, int op, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) {
                   return c.all_reduce(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), o);
                 },
                 stream...);
           })
      .def("all_gather",
           [](C& c, Address in, Address out, std::size_t n, int dtype, bool b, std::int64_t t, const py::object& keep,
              Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.all_gather(pointer(in), pointer(out), n, dtype_of(dtype), o); },
                 stream...);
           })
      .def("reduce_scatter",
           [](C& c, Address in, Address out, std::size_t n, int dtype, int op, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) {
                   return c.reduce_scatter(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), o);
                 },
                 stream...);
           })
      .def("broadcast",
           [](C& c, Address data, std::size_t n, int dtype, int root, bool b, std::int64_t t, const py::object& keep,
              Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.broadcast(pointer(data), n, dtype_of(dtype), root, o); },
                 stream...);
           })
      .def("reduce",
           [](C& c, Address in, Address out, std::size_t n, int dtype, int op, int root, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) {
                   return c.reduce(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), root, o);
                 },
                 stream...);
           })
      .def("gather",
           [](C& c, Address in, Address out, std::size_t n, int dtype, int root, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.gather(pointer(in), pointer(out), n, dtype_of(dtype), root, o); },
                 stream...);
           })
      .def(
          "scatter",
          [](C& c, Address in, Address out, std::size_t n, int dtype, int root, bool b, std::int64_t t,
             const py::object& keep, Stream... stream) {
            return launch(
                b, t, keep,
                [&](const CallOptions& o) { return c.scatter(pointer(in), pointer(out), n, dtype_of(dtype), root, o); },
                stream...);
          })
      .def("all_to_all",
           [](C& c, Address in, Address out, std::size_t n, int dtype, bool b, std::int64_t t, const py::object& keep,
              Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.all_to_all(pointer(in), pointer(out), n, dtype_of(dtype), o); },
                 stream...);
           })
      .def("all_to_all_v",
           [](C& c, Address in, const Counts& send_counts, const Counts& send_offsets, Address out,
              const Counts& recv_counts, const Counts& recv_offsets, int dtype, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) {
                   return c.all_to_all_v(pointer(in), send_counts, send_offsets, pointer(out), recv_counts,
                                         recv_offsets, dtype_of(dtype), o);
                 },
                 stream...);
           })
      .def("send",
           [](C& c, Address data, std::size_t n, int dtype, int peer, int tag, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.send(pointer(data), n, dtype_of(dtype), peer, tag, o); },
                 stream...);
           })
      .def("recv",
           [](C& c, Address data, std::size_t n, int dtype, int peer, int tag, bool b, std::int64_t t,
              const py::object& keep, Stream... stream) {
             return launch(
                 b, t, keep,
                 [&](const CallOptions& o) { return c.recv(pointer(data), n, dtype_of(dtype), peer, tag, o); },
                 stream...);
           })
      .def("barrier", [](C& c, bool b, std::int64_t t, Stream... stream) {
        return launch(b, t, py::none(), [&](const CallOptions& o) { return c.barrier(o); }, stream...);
      });
}

}  // namespace axo

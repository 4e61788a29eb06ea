// pybind11: conversion only, no logic. Python passes addresses, counts and codes; python/axo/collectives.py checks
// them.
//
// The GIL is released around every call that enters the core, since any of them may wait: for a peer, for a lock, or
// for the progress thread. Keep-alive. A pending operation holds Python objects, and the core may let go of them on a
// thread of its own. Such a thread never takes the GIL (it would hang at interpreter exit, or dead-lock with a caller
// that holds it): it leaves the object on a list, which the next bound call, or the interpreter's pending-call queue,
// empties. Errors. axo::Error and its kinds become axo.errors.*, for torch's own pybind functions too (one set of
// internals).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator.h"
#include "error.h"
#include "shared_buffers.h"
#include "types.h"
#include "work.h"

namespace py = pybind11;

namespace axo {

void bind_c10d(py::module_& m);  // c10d_bindings.cpp

namespace {

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

std::shared_ptr<void> hold(const py::object& object) {
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

DType dtype_of(int code) {
  AXO_CHECK(code >= 0 && code < kDTypeCount, "dtype code", code, "0 to " + std::to_string(kDTypeCount - 1));
  return static_cast<DType>(code);
}

ReduceOp op_of(int code) {
  AXO_CHECK(code >= 0 && code < kReduceOpCount, "op code", code, "0 to " + std::to_string(kReduceOpCount - 1));
  return static_cast<ReduceOp>(code);
}

// What every collective ends with: blocking, timeout in milliseconds (-1: the communicator's own), object to keep
// alive. `call` runs without the GIL. A blocking call has nothing left to wait for, so it returns None.
template <class Call>
WorkPtr launch(bool blocking, std::int64_t timeout_ms, const py::object& keep, const Call& call) {
  Discarded::drain();
  CallOptions options;
  options.blocking = blocking;
  options.timeout = Milliseconds(timeout_ms);
  if (!blocking) options.keep_alive = hold(keep);
  py::gil_scoped_release release;
  WorkPtr work = call(options);
  return blocking ? nullptr : work;
}

void set_python_error(const char* kind, const py::tuple& args) {
  py::object type = py::module_::import("axo.errors").attr(kind);
  PyErr_SetObject(type.ptr(), type(*args).ptr());
}

void translate(std::exception_ptr error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    set_python_error("PeerLost", py::make_tuple(e.what(), e.peer()));
  } catch (const Timeout& e) {
    set_python_error("Timeout", py::make_tuple(e.what()));
  } catch (const Mismatch& e) {
    set_python_error("Mismatch", py::make_tuple(e.what()));
  } catch (const Aborted& e) {
    set_python_error("Aborted", py::make_tuple(e.what()));
  } catch (const Error& e) {
    set_python_error("Error", py::make_tuple(e.what()));
  }
}

py::object exception_of(const Work& work) {
  std::exception_ptr error;
  {
    py::gil_scoped_release release;
    error = work.exception();
  }
  if (!error) return py::none();
  try {
    translate(error);
  } catch (const std::exception& e) {  // not one of ours
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return py::reinterpret_steal<py::object>(value);
}

using Address = std::uintptr_t;
using Counts = std::vector<std::size_t>;

void bind_work(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Work, WorkPtr>(m, "Work")
      .def("wait", &Work::wait, Release())
      .def(
          "synchronize", [](Work& w, std::int64_t ms) { w.synchronize(Milliseconds(ms)); }, Release())
      .def("is_completed", &Work::is_completed, Release())
      .def("exception", &exception_of)
      .def("seconds", &Work::seconds, Release());
}

void bind_communicator(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("transport", &Communicator::transport)
      .def("all_reduce",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, int op, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.all_reduce(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), o);
             });
           })
      .def("all_gather",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.all_gather(pointer(in), pointer(out), n, dtype_of(dtype), o);
             });
           })
      .def("reduce_scatter",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, int op, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.reduce_scatter(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), o);
             });
           })
      .def("broadcast",
           [](Communicator& c, Address data, std::size_t n, int dtype, int root, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.broadcast(pointer(data), n, dtype_of(dtype), root, o);
             });
           })
      .def("reduce",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, int op, int root, bool b,
              std::int64_t t, const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.reduce(pointer(in), pointer(out), n, dtype_of(dtype), op_of(op), root, o);
             });
           })
      .def("gather",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, int root, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.gather(pointer(in), pointer(out), n, dtype_of(dtype), root, o);
             });
           })
      .def("scatter",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, int root, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.scatter(pointer(in), pointer(out), n, dtype_of(dtype), root, o);
             });
           })
      .def("all_to_all",
           [](Communicator& c, Address in, Address out, std::size_t n, int dtype, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.all_to_all(pointer(in), pointer(out), n, dtype_of(dtype), o);
             });
           })
      .def("all_to_all_v",
           [](Communicator& c, Address in, const Counts& send_counts, const Counts& send_offsets, Address out,
              const Counts& recv_counts, const Counts& recv_offsets, int dtype, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.all_to_all_v(pointer(in), send_counts, send_offsets, pointer(out), recv_counts, recv_offsets,
                                     dtype_of(dtype), o);
             });
           })
      .def("send",
           [](Communicator& c, Address data, std::size_t n, int dtype, int peer, int tag, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.send(pointer(data), n, dtype_of(dtype), peer, tag, o);
             });
           })
      .def("recv",
           [](Communicator& c, Address data, std::size_t n, int dtype, int peer, int tag, bool b, std::int64_t t,
              const py::object& keep) {
             return launch(b, t, keep, [&](const CallOptions& o) {
               return c.recv(pointer(data), n, dtype_of(dtype), peer, tag, o);
             });
           })
      .def("barrier",
           [](Communicator& c, bool b, std::int64_t t) {
             return launch(b, t, py::none(), [&](const CallOptions& o) { return c.barrier(o); });
           })
      .def("split", &Communicator::split, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Communicator::abort, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &Communicator::shutdown, py::call_guard<py::gil_scoped_release>());
}

// Memory of allocate_shared, as an object with the buffer protocol: whoever views it keeps it.
struct SharedMemory {
  std::shared_ptr<void> data;
  std::size_t bytes;
};

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init([](std::size_t bytes) { return SharedMemory{allocate_shared(bytes), bytes}; }))
      .def_buffer([](SharedMemory& memory) {
        return py::buffer_info(static_cast<std::uint8_t*>(memory.data.get()), static_cast<py::ssize_t>(memory.bytes));
      });
}

}  // namespace
}  // namespace axo

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of Axo; use axo.collectives and axo.runtime.";
  m.attr("torch_version") = AXO_TORCH_VERSION;
  py::register_exception_translator(&axo::translate);
  axo::bind_work(m);
  axo::bind_communicator(m);
  axo::bind_shared_memory(m);
  m.def("group_start", &axo::group_start, py::call_guard<py::gil_scoped_release>());
  m.def("group_end", &axo::group_end, py::call_guard<py::gil_scoped_release>());
  m.def("item_size", [](int dtype) { return axo::item_size(axo::dtype_of(dtype)); });
  m.def("can_reduce", [](int dtype, int op) { return axo::can_reduce(axo::dtype_of(dtype), axo::op_of(op)); });
  axo::bind_c10d(m);
}

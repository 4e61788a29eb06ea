// pybind11: conversion only, no logic. Python passes addresses, counts and codes; python/axo/comm checks them.
//
// The GIL is released around every call that enters the core, since any of them may wait: for a peer, for a lock, or
// for the progress thread. Errors. axo::Error and its kinds become axo.errors.*, for torch's own pybind functions too
// (one set of internals).
#include <cstdio>
#include <cstdlib>

#include <sys/syscall.h>
#include <unistd.h>

#include "base/flight_recorder.h"
#include "base/identity.h"
#include "device/nccl_api.h"
#include "memory/reduce.h"
#include "memory/shared_buffers.h"
#include "torch/bindings_calls.h"
#include "torch/future_thread.h"

namespace py = pybind11;

namespace axo {

void bind_c10d(py::module_& m);     // torch/c10d_bindings.cpp
void bind_device(py::module_& m);   // torch/bindings_device.cpp
void bind_tensors(py::module_& m);  // torch/bindings_tensors.cpp

namespace {

// A text may hold what a peer has told: bytes that are no UTF-8 must not hide the error.
py::object text_of(const std::exception& error) {
  const std::string text = error.what();
  PyObject* decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(decoded);
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
    set_python_error("PeerLost", py::make_tuple(text_of(e), e.peer()));
  } catch (const Timeout& e) {
    set_python_error("Timeout", py::make_tuple(text_of(e)));
  } catch (const Mismatch& e) {
    set_python_error("Mismatch", py::make_tuple(text_of(e)));
  } catch (const Aborted& e) {
    set_python_error("Aborted", py::make_tuple(text_of(e)));
  } catch (const ResourceError& e) {
    set_python_error("ResourceError", py::make_tuple(text_of(e)));
  } catch (const Error& e) {
    set_python_error("Error", py::make_tuple(text_of(e)));
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

void bind_work(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Work, WorkPtr>(m, "Work")
      .def("wait", &Work::wait, Release())
      .def(
          "wait_on", [](Work& w, Address stream) { w.wait_on(pointer(stream)); }, Release())
      .def("keep_until",
           [](Work& w, Address stream, const py::object& object) {
             auto kept = by_program(held(object));
             py::gil_scoped_release release;
             w.keep_until(pointer(stream), std::move(kept));
           })
      .def(
          "synchronize", [](Work& w, std::int64_t ms) { w.synchronize(Milliseconds(ms)); }, Release())
      .def("is_completed", &Work::is_completed, Release())
      .def("exception", &exception_of)
      .def("seconds", &Work::seconds, Release())
      .def("source", &Work::source, Release())
      // Calls `callback` on the thread of futures once the operation has ended, with or without an error.
      .def("when_completed", [](Work& w, const py::function& callback) {
        std::shared_ptr<PythonObject> kept = by_program(held(callback));
        py::gil_scoped_release release;
        w.on_completion([kept] {
          FutureThread::post([kept] {
            py::gil_scoped_acquire acquire;
            PyObject* result = PyObject_CallNoArgs(kept->get());
            if (result == nullptr) PyErr_WriteUnraisable(kept->get());
            Py_XDECREF(result);
          });
        });
      });
  m.def("stop_futures", &FutureThread::stop, Release());
}

void bind_communicator(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>> bound(m, "Communicator");
  bound.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transport", &Communicator::transport)
      .def("split", &Communicator::split, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Communicator::abort, py::call_guard<py::gil_scoped_release>())
      .def("give_up", &Communicator::give_up, py::call_guard<py::gil_scoped_release>())
      .def(
          "until_heard", [](Communicator& c, std::int64_t ms) { c.until_heard(Milliseconds(ms)); },
          py::call_guard<py::gil_scoped_release>())
      .def("set_timeout",
           [](Communicator& c, std::int64_t ms) -> std::int64_t { return c.set_timeout(Milliseconds(ms)).count(); })
      .def("shutdown", &Communicator::shutdown, py::call_guard<py::gil_scoped_release>());
  bind_collectives(bound);
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

template <class Code>
std::vector<std::string> names_of(int count) {
  std::vector<std::string> names;
  for (int code = 0; code < count; ++code) names.emplace_back(name_of(static_cast<Code>(code)));
  return names;
}

// Lets Python's signal handlers run while its main thread waits in the core; what they raise ends the wait.
void run_signal_handlers() {
  if (::syscall(SYS_gettid) != ::getpid() || !Py_IsInitialized()) return;  // only the main thread handles signals
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace
}  // namespace axo

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of Axo; use axo.comm.communicator and axo.comm.connect.";
  m.attr("torch_version") = AXO_TORCH_VERSION;
  m.attr("sources_digest") = axo::sources_digest();
  py::register_exception_translator(&axo::translate);
  axo::set_interrupt_check(&axo::run_signal_handlers);
  axo::bind_work(m);
  axo::bind_communicator(m);
  axo::bind_shared_memory(m);
  m.def("group_start", &axo::group_start, py::call_guard<py::gil_scoped_release>());
  m.def("group_end", &axo::group_end, py::call_guard<py::gil_scoped_release>());
  m.attr("DTYPES") = axo::names_of<axo::DType>(axo::kDTypeCount);  // in the order of their codes
  m.attr("OPS") = axo::names_of<axo::ReduceOp>(axo::kReduceOpCount);
  m.def("can_reduce", [](int dtype, int op) { return axo::can_reduce(axo::dtype_of(dtype), axo::op_of(op)); });
  m.def("set_flight_directory", &axo::set_flight_directory, py::call_guard<py::gil_scoped_release>());
  m.def("write_flight_file", &axo::write_flight_file, py::call_guard<py::gil_scoped_release>());
  // "nccl 2.32.3, /path/libnccl.so.2"; throws where there is none.
  m.def("collective_library", [](bool amd) {
    const auto api = axo::NcclApi::open(amd ? axo::GpuVendor::hip : axo::GpuVendor::cuda);
    return std::string(api->transport()) + " " + api->version_text() + ", " + api->path();
  });
  // The process ends with 1 once the interpreter, which takes no other code by then, has ended.
  m.def("end_with_failure", [] {
    const int full = Py_AtExit([] {
      std::fflush(nullptr);
      std::_Exit(1);
    });
    if (full != 0) throw axo::Error("the interpreter takes no more functions that run at its end");
  });
  m.def("reduce_instruction_set", &axo::reduce_instruction_set);
  m.def("flight_lines", &axo::flight_lines, py::call_guard<py::gil_scoped_release>());
  axo::bind_c10d(m);
  axo::bind_device(m);
  axo::bind_tensors(m);
}

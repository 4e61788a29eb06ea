// pybind11 for collectives on tensors as they are: one call looks at them and issues, where Python would ask in a
// dozen, which take longer than a small message.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string>
#include <type_traits>
#include <utility>

#include "base/group.h"
#include "base/work_state.h"
#include "torch/bindings_calls.h"
#include "torch/c10d_launch.h"

namespace py = pybind11;

namespace axo {
namespace {

// A tensor, or parameter, on the CPU whose memory is its values in order.
struct Plain {
  const at::Tensor* tensor = nullptr;  // null: whatever else, which Python then looks at
  char* data = nullptr;
  std::size_t count = 0;
  DType dtype{};

  explicit Plain(const py::handle& object) {
    if (!THPVariable_CheckExact(object.ptr())) return;
    const at::Tensor& t = THPVariable_Unpack(object.ptr());
    if (!t.device().is_cpu() || t.layout() != at::kStrided || !t.has_storage() || !t.is_contiguous() || t.is_conj() ||
        t.is_neg() || t._is_zerotensor()) {
      return;
    }
    const auto code = dtype_of(t.scalar_type());
    if (!code) return;
    tensor = &t;
    data = static_cast<char*>(t.mutable_data_ptr());
    count = static_cast<std::size_t>(t.numel());
    dtype = *code;
  }
  std::size_t bytes() const { return count * item_size(dtype); }
  bool reduces(int op) const { return tensor && op >= 0 && op < kReduceOpCount && can_reduce(dtype, op_of(op)); }
};

// Whether `whole` has one part of `part` a rank, and they do not overlap, or `part` is that of rank `place`.
bool fit(const Plain& part, const Plain& whole, int size, int place) {
  if (!part.tensor || !whole.tensor || part.dtype != whole.dtype) return false;
  if (whole.count != static_cast<std::size_t>(size) * part.count) return false;
  return part.data + part.bytes() <= whole.data || whole.data + whole.bytes() <= part.data ||
         (place >= 0 && part.data == whole.data + static_cast<std::size_t>(place) * part.bytes());
}

// The core has written to the tensor: autograd refuses a backward that would read the old values.
void count_as_modified(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

void modified(const py::handle& tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw py::type_error("modified: not a tensor");
  count_as_modified(THPVariable_Unpack(tensor.ptr()));
}

// Issues `call` on `source` and `target`: its Work, or the seconds that a blocking one took.
template <class Call>
py::object issue(const Plain& source, const Plain& target, bool written, bool blocking, std::int64_t timeout_ms,
                 const Call& call) {
  if (blocking && inside_group()) return py::none();
  release_now();
  if (written) count_as_modified(*target.tensor);
  CallOptions options;
  options.blocking = blocking;
  options.timeout = Milliseconds(timeout_ms);
  if (!blocking) {
    using Both = std::pair<at::Tensor, at::Tensor>;
    options.keep_alive = by_program(std::make_shared<Both>(*source.tensor, *target.tensor));
  }
  WorkPtr work;
  {
    py::gil_scoped_release release;
    work = call(options);
  }
  if (!blocking) return py::cast(work);
  return py::float_(work->seconds());
}

py::object all_reduce(Communicator& c, py::handle tensor, int op, bool blocking, std::int64_t ms) {
  const Plain t(tensor);
  if (!t.reduces(op)) return py::none();
  return issue(t, t, true, blocking, ms, [&](const CallOptions& options) {
    return c.all_reduce(t.data, t.data, t.count, t.dtype, op_of(op), options);
  });
}

py::object all_gather(Communicator& c, py::handle tensor, py::handle out, bool blocking, std::int64_t ms) {
  const Plain part(tensor), whole(out);
  if (!fit(part, whole, c.size(), c.rank())) return py::none();
  return issue(part, whole, true, blocking, ms, [&](const CallOptions& options) {
    return c.all_gather(part.data, whole.data, part.count, part.dtype, options);
  });
}

// `out_and_op`: a tuple, so that Python passes as many arguments as to the others.
py::object reduce_scatter(Communicator& c, py::handle tensor, py::handle out_and_op, bool blocking, std::int64_t ms) {
  if (!PyTuple_Check(out_and_op.ptr()) || PyTuple_GET_SIZE(out_and_op.ptr()) != 2) {
    throw py::type_error("plain_reduce_scatter: expected (out, op)");
  }
  const Plain whole(tensor), part(PyTuple_GET_ITEM(out_and_op.ptr(), 0));
  const int op = py::handle(PyTuple_GET_ITEM(out_and_op.ptr(), 1)).cast<int>();
  if (!fit(part, whole, c.size(), -1) || !part.reduces(op)) return py::none();
  if (whole.tensor->dim() == 0 || whole.tensor->size(0) % c.size() != 0) return py::none();
  return issue(whole, part, true, blocking, ms, [&](const CallOptions& options) {
    return c.reduce_scatter(whole.data, part.data, part.count, part.dtype, op_of(op), options);
  });
}

py::object broadcast(Communicator& c, py::handle tensor, int root, bool blocking, std::int64_t ms) {
  const Plain t(tensor);
  if (!t.tensor) return py::none();
  return issue(t, t, c.rank() != root, blocking, ms,
               [&](const CallOptions& options) { return c.broadcast(t.data, t.count, t.dtype, root, options); });
}

// Equal parts; nothing in place.
py::object all_to_all(Communicator& c, py::handle tensor, py::handle out, bool blocking, std::int64_t ms) {
  const Plain source(tensor), target(out);
  if (!fit(source, target, 1, -1)) return py::none();
  for (const at::Tensor* t : {source.tensor, target.tensor}) {
    if (t->dim() == 0 || t->size(0) % c.size() != 0) return py::none();
  }
  const std::size_t count = source.count / static_cast<std::size_t>(c.size());
  return issue(source, target, true, blocking, ms, [&](const CallOptions& options) {
    return c.all_to_all(source.data, target.data, count, source.dtype, options);
  });
}

template <class T>
T from(py::handle argument) {
  if constexpr (std::is_same_v<T, py::handle>)
    return argument;
  else
    return argument.cast<T>();
}

// A method of Communicator in Python's own calling convention: pybind11's takes 0.1 us more, and a small collective 2.
template <auto call>
struct Method;
template <class... P, py::object (*call)(Communicator&, P...)>
struct Method<call> {
  template <std::size_t... I>
  static py::object with(PyObject* self, PyObject* const* given, std::index_sequence<I...>) {
    return call(py::handle(self).cast<Communicator&>(), from<P>(given[I])...);
  }

  static PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    try {
      constexpr Py_ssize_t kWanted = sizeof...(P);
      if (count != kWanted) throw py::type_error("expected " + std::to_string(kWanted) + " arguments");
      return with(self, given, std::index_sequence_for<P...>()).release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (...) {
      py::detail::try_translate_exceptions();
    }
    return nullptr;
  }

  static PyMethodDef named(const char* name) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL, nullptr};
  }
};

}  // namespace

void bind_tensors(py::module_& m) {
  m.def("modified", &modified);
  // None: something is not plain, or does not fit, or a blocking call is inside a group; Python then looks closely.
  // `op` is a code, or -1.
  static std::array methods{
      Method<&all_reduce>::named("plain_all_reduce"), Method<&all_gather>::named("plain_all_gather"),
      Method<&reduce_scatter>::named("plain_reduce_scatter"), Method<&broadcast>::named("plain_broadcast"),
      Method<&all_to_all>::named("plain_all_to_all")};
  const py::object bound = m.attr("Communicator");
  for (PyMethodDef& each : methods) {
    PyObject* const made = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(bound.ptr()), &each);
    if (made == nullptr) throw py::error_already_set();
    py::setattr(bound, each.ml_name, py::reinterpret_steal<py::object>(made));
  }
}

}  // namespace axo

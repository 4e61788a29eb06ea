// pybind11 for one look at a torch tensor: what Python would ask in a dozen calls, which take longer than a small
// collective.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/c10d_launch.h"

namespace py = pybind11;

namespace axo {
namespace {

// (address, elements, dtype code, bytes) of a tensor, or parameter, on the CPU whose memory is its values in order;
// None for whatever else, which Python then looks at.
py::object plain_memory(const py::handle& object) {
  if (!THPVariable_CheckExact(object.ptr())) return py::none();
  const at::Tensor& t = THPVariable_Unpack(object.ptr());
  if (!t.device().is_cpu() || t.layout() != at::kStrided || !t.has_storage() || !t.is_contiguous() || t.is_conj() ||
      t.is_neg() || t._is_zerotensor()) {
    return py::none();
  }
  const auto dtype = dtype_of(t.scalar_type());
  if (!dtype) return py::none();
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(t.mutable_data_ptr()), t.numel(), static_cast<int>(*dtype),
                        t.nbytes());
}

// The core has written to the tensor: autograd refuses a backward that would read the old values.
void modified(const py::handle& tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw py::type_error("modified: not a tensor");
  const at::Tensor& t = THPVariable_Unpack(tensor.ptr());
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void bind_tensors(py::module_& m) {
  m.def("plain", &plain_memory);
  m.def("modified", &modified);
}

}  // namespace axo

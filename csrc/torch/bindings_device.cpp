// pybind11 for the communicator of GPUs, its memory, and the caller's stream as torch knows it.
#include <ATen/DLConvertor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>

#include "base/composition.h"
#include "device/communicator.h"
#include "device/peers.h"
#include "torch/bindings_calls.h"
#include "torch/c10d_backend.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)  // as torch/csrc/utils/pybind.h declares it

namespace axo {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Bound = py::class_<DeviceCommunicator, Communicator, std::shared_ptr<DeviceCommunicator>>;

StreamPolicy streams_of(const std::string& text) {
  if (text == "own") return StreamPolicy::own;
  if (text == "shared") return StreamPolicy::shared;
  AXO_CHECK(text == "auto", "streams", text, "auto, own or shared");
  return StreamPolicy::automatic;
}

Composed composed_of(const std::tuple<int, int, std::string, std::size_t>& row) {
  const auto& [hosts, local, name, least] = row;
  for (int i = 0; i < kKindCount; ++i) {
    Operation one;
    one.count = 1;
    one.kind = static_cast<Kind>(i);
    if (name == name_of(one.kind) && Composition::composes(one)) return {hosts, local, one.kind, least};
  }
  throw Error("composed: got '" + name + "', expected a collective that can be composed");
}

void bind_options(py::module_& m) {
  py::class_<DeviceOptions>(m, "DeviceOptions")
      .def(py::init([](const std::string& name, std::int64_t timeout_ms, int device, int min_ctas, int max_ctas,
                       int cga_cluster_size, bool zero_cta, bool high_priority, bool timing, bool split_share,
                       const std::string& streams, int check,
                       const std::vector<std::tuple<int, int, std::string, std::size_t>>& composed) {
        DeviceOptions o;
        o.name = name;
        o.timeout = Milliseconds(timeout_ms);
        o.device = device;
        o.min_ctas = min_ctas;
        o.max_ctas = max_ctas;
        o.cga_cluster_size = cga_cluster_size;
        o.zero_cta = zero_cta;
        o.high_priority = high_priority;
        o.timing = timing;
        o.split_share = split_share;
        o.streams = streams_of(streams);
        o.check = check;
        for (const auto& row : composed) o.composed.push_back(composed_of(row));
        return o;
      }));
}

// Memory of the library, a window of each of `lines`, as a DLPack capsule of bytes; whoever views it keeps both.
py::object device_memory(const std::vector<std::shared_ptr<DeviceCommunicator>>& lines, std::size_t bytes,
                         const std::string& device) {
  struct Held {
    std::shared_ptr<void> memory;
    std::vector<std::shared_ptr<void>> windows;  // go first
  };
  auto held = std::make_shared<Held>();
  {
    py::gil_scoped_release release;
    held->memory = lines.at(0)->allocate(bytes);
    for (const auto& line : lines) held->windows.push_back(line->register_buffer(held->memory.get(), bytes, true));
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(c10::Device(device));
  // Dropping a window waits for its turn: not with the GIL, which whoever has the turn may want.
  const auto drop = [held](void*) mutable {
    std::unique_ptr<py::gil_scoped_release> release;
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) release = std::make_unique<py::gil_scoped_release>();
    held.reset();
  };
  const auto tensor =
      at::from_blob(held->memory.get(), {static_cast<std::int64_t>(bytes)}, drop, options, options.device());
  return py::capsule(at::toDLPack(tensor), "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // somebody has taken it
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  });
}

// The registration, to hold; None where the library cannot.
py::object register_buffer(DeviceCommunicator& c, Address data, std::size_t bytes, bool symmetric) {
  std::shared_ptr<void> registration;
  {
    py::gil_scoped_release release;
    registration = c.register_buffer(pointer(data), bytes, symmetric);
  }
  if (!registration) return py::none();
  return py::capsule(new std::shared_ptr<void>(std::move(registration)), [](void* p) {
    py::gil_scoped_release release;
    delete static_cast<std::shared_ptr<void>*>(p);
  });
}

}  // namespace

void bind_device(py::module_& m) {
  bind_options(m);
  Bound bound(m, "DeviceCommunicator");
  bind_collectives<Address, bool>(bound);
  bind_collective<Address, bool>(bound, "all_reduce_scaled", &DeviceCommunicator::all_reduce_scaled);
  bind_collective<Address, bool>(bound, "reduce_scatter_scaled", &DeviceCommunicator::reduce_scatter_scaled);
  bound.def("register_buffer", &register_buffer);
  m.def("device_memory", &device_memory);
  m.def("leave_devices", &DevicePeers::leave_all, py::call_guard<py::gil_scoped_release>());
  bound
      .def(
          "split",
          [](DeviceCommunicator& c, int color, int key, const std::string& name) {
            return std::static_pointer_cast<DeviceCommunicator>(c.split(color, key, name));
          },
          Release())
      .def("capped", &DeviceCommunicator::capped, Release())
      .def(
          "follow", [](DeviceCommunicator& c, Address stream) { c.follow(pointer(stream)); }, Release())
      .def(
          "wait_flag", [](DeviceCommunicator& c, Address at, std::uint32_t value) { c.wait_flag(pointer(at), value); },
          Release())
      .def(
          "write_flag",
          [](DeviceCommunicator& c, Address at, std::uint32_t value) { c.write_flag(pointer(at), value); }, Release())
      .def_property_readonly("stream", [](DeviceCommunicator& c) { return reinterpret_cast<Address>(c.stream()); })
      .def_property_readonly("reserved_ctas", &DeviceCommunicator::reserved_ctas)
      .def_property_readonly("shares_buffers", &DeviceCommunicator::shares_buffers)
      .def_property_readonly("composed", &DeviceCommunicator::composed)
      .def_property_readonly("library_version", &DeviceCommunicator::library_version);

  m.def(
      "create_device_communicator",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, int rank, int size,
         const DeviceOptions& options) {
        // A connection of its own: the watchdog asks while the program may be waiting for a key.
        const auto own = store ? std::make_shared<C10dStore>(store->clone()) : nullptr;
        return create_device_communicator(own, key, rank, size, options);
      },
      Release());
  // The handle of torch's current stream on a device, e.g. of torch.device("cuda", 1).
  m.def("current_stream", [](int type, int index) {
    const c10::Device device(static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index));
    return reinterpret_cast<Address>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
  });
  m.def("device_type_code", [](const std::string& device) { return static_cast<int>(c10::Device(device).type()); });
}

}  // namespace axo

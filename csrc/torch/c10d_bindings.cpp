// pybind11 for what carries torch's types: the rendezvous over a c10d::Store, and the c10d backend.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <sstream>

#include "base/identity.h"
#include "host/communicator.h"
#include "hosts/communicator.h"
#include "hosts/link_limit.h"
#include "hosts/socket_wire.h"
#include "progress/process_life.h"
#include "torch/c10d_backend.h"
#include "torch/held.h"

namespace py = pybind11;
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)  // as torch/csrc/utils/pybind.h declares it

namespace axo {
namespace {

// `lost` gives None, or the rank that will not come (-1: one whose time is over) and what is said of it.
host::Watch watch_of(const py::object& lost) {
  if (lost.is_none()) return {};
  return [kept = by_program(held(lost))] {
    py::gil_scoped_acquire acquire;
    const py::object told = py::reinterpret_borrow<py::object>(kept->get())();
    if (told.is_none()) return;
    const auto [rank, text] = told.cast<std::pair<int, std::string>>();
    throw Failure{rank < 0 ? FailureKind::timeout : FailureKind::peer_lost, rank, text};
  };
}

}  // namespace

void bind_c10d(py::module_& m) {
  // c10d::Store and c10d::Backend are bound by torch; it must be loaded before they are named here.
  py::module_::import("torch.distributed");
  // A rank that may lead those of its host: it listens at `address` until it is closed or a communicator is made.
  py::class_<host::Leader, std::shared_ptr<host::Leader>>(m, "Leader")
      .def(py::init<>())
      .def_property_readonly("address", [](const host::Leader& leader) { return leader.address().text(); });
  m.def(
      "create_host_communicator",
      [](const std::shared_ptr<host::Leader>& own, const std::string& address, int rank, int size,
         const std::string& name, std::int64_t timeout_ms, const py::object& lost) {
        const host::Watch watch = watch_of(lost);
        py::gil_scoped_release release;
        return create_host_communicator(own, address, rank, size, HostOptions{name, Milliseconds(timeout_ms)}, watch);
      },
      py::arg("own"), py::arg("address"), py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("timeout_ms"),
      py::arg("lost") = py::none());

  // A thread of a rank, as it tells of itself in a store: process, thread, and where these numbers mean something.
  const auto space = [] { return process_space() + "@" + boot_id(); };
  m.def("this_thread",
        [space] { return std::to_string(::getpid()) + " " + std::to_string(::syscall(SYS_gettid)) + " " + space(); });
  // Whether the thread that has told this is no more; false where that cannot be known.
  m.def("thread_gone", [space](const std::string& told) {
    int pid = 0, tid = 0;
    std::string of;
    std::istringstream(told) >> pid >> tid >> of;
    const bool known = of.rfind("unknown@", 0) != 0 && !of.empty() && of.back() != '@';
    return known && of == space() && RankThread(pid, tid, process_space()).gone();
  });
  m.def("host_identity", &host_identity);
  m.def("host_name", &host_name);
  m.def("simulate_host", &simulate_host);
  m.def("simulate_link", [](double rate, double latency) { hosts::simulate_link({rate, latency}); });
  // `data` and `pulse`: descriptors of this rank's connections, which the communicator takes over.
  m.def("create_hosts_communicator",
        [](const std::shared_ptr<host::Leader>& own, const std::string& address, int rank, const std::vector<int>& data,
           const std::vector<int>& pulse, const std::string& key, const std::vector<std::string>& hosts,
           const std::string& name, std::int64_t timeout_ms, const py::object& lost) {
          const host::Watch watch = watch_of(lost);
          py::gil_scoped_release release;
          auto wire = std::make_unique<hosts::SocketWire>(rank, data, pulse, hosts);
          return create_hosts_communicator(own, address, std::move(wire), key, hosts,
                                           HostOptions{name, Milliseconds(timeout_ms)}, watch);
        });

  using Options = C10dBackend::C10dOptions;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "C10dOptions")
      .def("__deepcopy__",
           [](const Options& options, const py::dict&) { return c10::make_intrusive<Options>(options); });
  py::class_<C10dBackend, c10d::Backend, c10::intrusive_ptr<C10dBackend>>(m, "C10dBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, const std::string& key,
                       const std::shared_ptr<Communicator>& communicator, std::int64_t timeout_ms) {
             return c10::make_intrusive<C10dBackend>(store, key, communicator, Milliseconds(timeout_ms));
           }),
           py::call_guard<py::gil_scoped_release>())
      .def("get_error", &C10dBackend::getError, py::call_guard<py::gil_scoped_release>())  // as ProcessGroupNCCL has it
      .def_property_readonly("communicator", &C10dBackend::communicator)
      .def_property_readonly("options", &C10dBackend::options);
}

}  // namespace axo

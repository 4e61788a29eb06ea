// The communicator of GPUs: issues operations. See device/communicator.h; the library's calls stand in
// device/library_call.h.
#include "device/communicator.h"

#include "base/group.h"
#include "device/core.h"

namespace axo {
namespace {

class Impl final : public DeviceCommunicator {
 public:
  explicit Impl(std::shared_ptr<DeviceCore> core) : core_(std::move(core)) {}

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  const std::string& name() const override { return core_->member().name; }
  const char* transport() const override { return core_->nccl().transport(); }
  int device() const override { return core_->context().device(); }
  void* stream() const override { return core_->stream(); }
  int reserved_ctas() const override { return core_->context().reserved_ctas(); }
  bool shares_buffers() const override { return core_->shares_buffers(); }
  int library_version() const override { return core_->nccl().version(); }
  std::map<std::string, std::size_t> composed() const override {
    std::map<std::string, std::size_t> least;
    if (core_->levels())
      for (const auto& [kind, bytes] : core_->levels()->least) least[name_of(kind)] = bytes;
    return least;
  }

  // The blocking form holds the host, as its name promises.
  WorkPtr barrier(const CallOptions& options) override {
    auto work = Communicator::barrier(options);
    if (options.blocking && !core_->gpu().capture_info(options.stream).active()) work->synchronize(kNoTimeout);
    return work;
  }

  WorkPtr all_reduce_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                            const CallOptions& options) override {
    return issue_scaled(Kind::all_reduce, in, out, count, dtype, scale, options);
  }
  WorkPtr reduce_scatter_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                                const CallOptions& options) override {
    return issue_scaled(Kind::reduce_scatter, in, out, count, dtype, scale, options);
  }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    AXO_CHECK(!inside_group(), "split", "a call inside a group", "one outside: ranks must meet at once");
    auto child = core_->split(color, key, name);
    if (child) child->compose();
    return child ? std::make_shared<Impl>(std::move(child)) : nullptr;
  }
  std::shared_ptr<DeviceCommunicator> capped(int max_ctas, const std::string& name) override {
    AXO_CHECK(max_ctas >= 0, "capped: max_ctas", max_ctas, "at least 0");
    AXO_CHECK(core_->nccl().keeps_caps(), "capped: library", transport(), "nccl: RCCL takes more than it is told");
    AXO_CHECK(max_ctas > 0 || core_->nccl().has_zero_cta(), "capped at no thread block: version",
              core_->nccl().version_text(), "2.28 or newer");
    // It runs beside this one, and the library asks the parent whether a part shares its buffers.
    AXO_CHECK(!core_->shares_buffers(), "capped: split_share", "true", "false");
    AXO_CHECK(!inside_group(), "capped", "a call inside a group", "one outside: ranks must meet at once");
    return std::make_shared<Impl>(core_->split(0, rank(), name, max_ctas > 0 ? max_ctas : -1));
  }
  void abort(const std::string& reason) override {
    core_->fail(std::make_exception_ptr(Aborted("communicator '" + name() + "' was aborted: " + reason)));
  }
  void give_up(const std::string& error) override {
    const std::string who = "rank " + std::to_string(rank()) + " ";
    core_->fail(std::make_exception_ptr(PeerLost("communicator '" + name() + "': " + who + error, rank())));
  }
  Milliseconds set_timeout(Milliseconds timeout) override { return core_->set_timeout(timeout); }
  std::exception_ptr failure() override { return core_->failure(); }
  void shutdown() override { core_->shutdown(); }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    AXO_CHECK(core_->nccl().has_windows(), ("allocate: version of " + core_->nccl().path()).c_str(),
              core_->nccl().version_text(), "2.27 or newer");
    const auto turn = core_->context().queue().turn();
    DeviceGuard guard(core_->gpu(), device());
    void* data = nullptr;
    core_->nccl().check(core_->nccl()->MemAlloc(&data, bytes), "ncclMemAlloc");
    return std::shared_ptr<void>(data, [c = core_](void* p) {
      DeviceContext::release_when_idle(c->shared_context(), [free = c->nccl()->MemFree, p] { free(p); });
    });
  }
  std::shared_ptr<void> register_buffer(void* data, std::size_t bytes, bool symmetric) override {
    AXO_CHECK(data && bytes, "register_buffer: bytes", bytes, "some memory");
    return core_->register_buffer(data, bytes, symmetric);
  }

  void follow(void* stream) override {
    on_stream([&] { core_->order(core_->stream(), stream, true, core_->gpu().capture_info(stream)); });
  }
  void wait_flag(const void* address, std::uint32_t value) override {
    check_flag("wait_flag", address);
    on_stream([&] { core_->gpu().wait_value(core_->stream(), address, value); });
  }
  void write_flag(void* address, std::uint32_t value) override {
    check_flag("write_flag", address);
    on_stream([&] { core_->gpu().write_value(core_->stream(), address, value); });
  }

 private:
  WorkPtr issue(Request r, const CallOptions& options) override {
    if (r.kind == Kind::recv && r.root == kAnyPeer) {
      throw Error("recv on '" + name() + "': " + std::string(transport()) +
                  " matches messages by rank and cannot receive from any; name the peer, or move a CPU tensor");
    }
    AXO_CHECK(!r.point_to_point() || r.root != rank(), (std::string(name_of(r.kind)) + ": peer").c_str(), r.root,
              "another rank");
    auto work = std::make_shared<DeviceWork>(core_, std::move(r), options);  // refuses what the library cannot reduce
    core_->check_usable();
    check_group(work->request, options);
    if (!record_in_group(core_->shared_context(), work)) core_->context().queue().issue({work});
    return work;
  }

  WorkPtr issue_scaled(Kind kind, const void* in, void* out, std::size_t count, DType dtype, double scale,
                       const CallOptions& options) {
    NcclScalar(dtype, scale);  // refuses integers
    Request r = reduction(kind, in, out, count, dtype, ReduceOp::sum);
    r.scale = scale;
    return issue(std::move(r), options);
  }

  template <class Action>
  void on_stream(const Action& action) {
    core_->check_usable();
    const auto turn = core_->context().queue().turn();
    DeviceGuard guard(core_->gpu(), device());
    action();
  }

  static void check_flag(const char* what, const void* address) {
    AXO_CHECK(address && reinterpret_cast<std::uintptr_t>(address) % 4 == 0, (std::string(what) + ": address").c_str(),
              address, "a device address, 4-byte aligned");
  }

  std::shared_ptr<DeviceCore> core_;
};

}  // namespace

std::shared_ptr<DeviceCommunicator> create_device_communicator(std::shared_ptr<Store> store, const std::string& key,
                                                               int rank, int size, const DeviceOptions& options) {
  auto core = create_device_core(store, key, rank, size, options);
  core->compose();
  return std::make_shared<Impl>(std::move(core));
}

}  // namespace axo

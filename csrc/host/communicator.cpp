// The public face of the host transport: issues operations. The checks are in base/requests.cpp, the machinery in
// host/core.h.
#include "host/communicator.h"

#include "base/group.h"
#include "base/requests.h"
#include "host/create.h"

namespace axo {
namespace {

using host::HostCore;
using host::HostWork;

class HostCommunicator final : public RequestCommunicator {
 public:
  explicit HostCommunicator(std::shared_ptr<HostCore> core) : core_(std::move(core)) {}
  ~HostCommunicator() override { core_->release(); }

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  const std::string& name() const override { return core_->member().name; }
  const char* transport() const override { return "shared-memory"; }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    if (inside_group()) throw Error("split: got a call inside a group, expected one outside");
    auto core =
        host::split_core(*core_, [this](const std::string& mine) { return gather_bytes(mine); }, color, key, name);
    return core ? std::make_shared<HostCommunicator>(std::move(core)) : nullptr;
  }

  void abort(const std::string& reason) override { core_->abort({FailureKind::aborted, -1, reason}); }
  void give_up(const std::string& error) override { core_->abort({FailureKind::peer_lost, rank(), error}); }
  Milliseconds set_timeout(Milliseconds timeout) override { return core_->set_timeout(timeout); }
  std::exception_ptr failure() override { return core_->failure(); }
  void shutdown() override { core_->shutdown(); }

 private:
  WorkPtr issue(Request r, const CallOptions& options) override {
    core_->check_usable(name_of(r.kind));
    check_group(r, options);
    release_now();
    auto work = std::make_shared<HostWork>(core_, std::move(r), options);
    if (record_in_group(core_, work)) return work;
    core_->submit({work});
    if (options.blocking) {
      try {
        work->wait();
      } catch (...) {
        // Interrupted (set_interrupt_check): the caller's buffers are its own again, so the operation must end.
        if (!work->is_completed()) abort(work->describe() + " was interrupted");
        throw;
      }
    } else {
      core_->engine().watch();
    }
    return work;
  }

  std::shared_ptr<HostCore> core_;
};

}  // namespace

std::shared_ptr<Communicator> host::wrap_core(std::shared_ptr<HostCore> core) {
  return std::make_shared<HostCommunicator>(std::move(core));
}

std::shared_ptr<Communicator> create_host_communicator(Store& store, const std::string& key, int rank, int size,
                                                       const HostOptions& options) {
  return host::wrap_core(host::create_core(store, key, rank, size, options));
}

}  // namespace axo

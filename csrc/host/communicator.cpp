// The public face of the host transport. Operations are issued in progress/cpu_communicator.cpp, the machinery is in
// host/core.h.
#include "host/communicator.h"

#include "host/create.h"

namespace axo {
namespace {

using host::HostCore;
using host::HostWork;

class HostCommunicator final : public CpuCommunicator {
 public:
  explicit HostCommunicator(const std::shared_ptr<HostCore>& core) : CpuCommunicator(core), core_(core) {}

  const char* transport() const override { return "shared-memory"; }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    const auto gather = [this](const std::string& mine) { return gather_bytes(mine); };
    const auto core = host::split_core(*core_, gather, split_members(color, key), color >= 0, name);
    return core ? std::make_shared<HostCommunicator>(core) : nullptr;
  }

 private:
  std::shared_ptr<CpuWork> make_work(Request r, const CallOptions& options) override {
    return std::make_shared<HostWork>(core_, std::move(r), options);
  }

  const std::shared_ptr<HostCore> core_;
};

}  // namespace

std::shared_ptr<Communicator> host::wrap_core(const std::shared_ptr<HostCore>& core) {
  return std::make_shared<HostCommunicator>(core);
}

std::shared_ptr<Communicator> create_host_communicator(const std::shared_ptr<host::Leader>& own,
                                                       const std::string& address, int rank, int size,
                                                       const HostOptions& options, const host::Watch& watch) {
  return host::wrap_core(host::create_core(own, address, rank, size, options, watch));
}

}  // namespace axo

// One operation of a host communicator.
#pragma once

#include "base/work_state.h"
#include "host/layout.h"

namespace axo::host {

class HostCore;

class HostWork final : public WorkState {
 public:
  HostWork(std::shared_ptr<HostCore> core, Request request, const CallOptions& options);
  int source() const override { return taken_from.load(std::memory_order_acquire); }

  // The progress of a point-to-point transfer.
  std::uint64_t message = 0;
  std::size_t moved = 0;
  std::atomic<int> taken_from{-1};  // recv: whose message it has matched
  // The rank that a send or recv waits for; kAnyPeer while that may be any.
  int peer() const { return request.root != kAnyPeer ? request.root : source(); }

 private:
  const Member& member() const override;
  Operation operation() const override;
  void wait_until(Clock::time_point deadline) override;

  const std::shared_ptr<HostCore> core_;
};

using HostWorkPtr = std::shared_ptr<HostWork>;

}  // namespace axo::host

// One operation of a host communicator.
#pragma once

#include "host/layout.h"
#include "progress/cpu_communicator.h"

namespace axo::host {

class HostWork final : public CpuWork {
 public:
  using CpuWork::CpuWork;
  int source() const override { return taken_from.load(std::memory_order_acquire); }

  // The progress of a point-to-point transfer.
  std::uint64_t message = 0;
  std::size_t moved = 0;
  std::atomic<int> taken_from{-1};  // recv: whose message it has matched
  // The rank that a send or recv waits for; kAnyPeer while that may be any.
  int peer() const { return request.root != kAnyPeer ? request.root : source(); }

 private:
  Operation operation() const override;
};

using HostWorkPtr = std::shared_ptr<HostWork>;

}  // namespace axo::host

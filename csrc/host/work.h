// One operation of a host communicator: what was asked, and how it ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "progress/engine.h"
#include "host/layout.h"

namespace axo::host {

class HostCore;

struct Request {
  Kind kind = Kind::barrier;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;  // elements, of one part where the operation has parts
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;  // the peer of send and recv; kAnyPeer: that of no rank in particular
  int tag = 0;
  // all_to_all_v only, in bytes.
  std::vector<std::size_t> send_bytes, send_offsets, recv_bytes, recv_offsets;

  std::size_t bytes() const { return count * item_size(dtype); }
  bool point_to_point() const { return kind == Kind::send || kind == Kind::recv; }
};

class HostWork final : public Work {
 public:
  HostWork(std::shared_ptr<HostCore> core, Request request, const CallOptions& options, Milliseconds timeout);
  ~HostWork() override;

  void wait() override;
  void synchronize(Milliseconds timeout) override;
  bool is_completed() const override { return done_.load(std::memory_order_acquire); }
  std::exception_ptr exception() const override;
  void on_completion(std::function<void()> callback) override;
  double seconds() const override;
  int source() const override { return taken_from.load(std::memory_order_acquire); }

  // For the core.
  void issued(std::uint64_t sequence);
  void complete(std::exception_ptr error);
  Clock::time_point issue_time() const { return issue_time_; }
  Clock::time_point deadline() const { return deadline_; }
  Milliseconds timeout() const { return timeout_; }

  const Request request;
  std::uint64_t sequence = 0;
  std::uint64_t flight = 0;  // its number in the flight recorder
  // The progress of a point-to-point transfer.
  std::uint64_t message = 0;
  std::size_t moved = 0;
  std::atomic<int> taken_from{-1};  // recv: whose message it has matched
  // The rank that a send or recv waits for; kAnyPeer while that may be any.
  int peer() const { return request.root != kAnyPeer ? request.root : source(); }

 private:
  void wait_until(Clock::time_point deadline);
  void finish_wait();

  std::shared_ptr<HostCore> core_;
  Milliseconds timeout_;
  Clock::time_point issue_time_{}, end_time_{}, deadline_{};
  std::atomic<bool> issued_{false};
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  mutable std::mutex mutex_;
  std::shared_ptr<void> keep_alive_;
  std::vector<std::function<void()>> callbacks_;
};

using HostWorkPtr = std::shared_ptr<HostWork>;

// Between group_start and group_end: takes the operation and returns true; otherwise false.
bool record_in_group(const std::shared_ptr<HostCore>& core, const HostWorkPtr& work);
bool inside_group();
// For the other transport: the outermost group_end of this thread calls `launch`, once a group.
using GroupEnd = void (*)() noexcept;
void at_group_end(GroupEnd launch);

}  // namespace axo::host

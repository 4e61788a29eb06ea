// What the communicators of CPU ranks share, on one host and on several: a core that the progress engine drives, which
// takes and ends operations and knows how the communicator has failed; a work that waits by that engine; and the
// communicator that issues operations.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/failure.h"
#include "base/flight_recorder.h"
#include "base/group.h"
#include "progress/engine.h"

namespace axo {

// The state of one rank of one communicator.
class CpuCore : public ProgressClient, public GroupLauncher, public std::enable_shared_from_this<CpuCore> {
 public:
  // `id` tells communicators of one name apart in flight files.
  CpuCore(Member member, Milliseconds timeout, std::uint64_t id);

  int rank() const { return member_.rank; }
  int size() const { return member_.size; }
  const Member& member() const { return member_; }
  ProgressEngine& engine() const { return engine_; }
  Milliseconds timeout() const { return timeout_.load(); }
  Milliseconds set_timeout(Milliseconds timeout) { return timeout_.exchange(timeout); }

  // Throws when the communicator cannot take operations (aborted, closed, forked child).
  void check_usable(const char* what) const;
  // A forked child has none of the threads that drive this core, and must not wait for them.
  void check_not_forked(const char* what) const;
  // Takes one operation, which the caller waits for at once where it is `blocking`.
  void submit(const WorkStatePtr& work, bool blocking);
  void launch(const std::vector<WorkStatePtr>& works) final;  // of a group
  // Of this rank's own accord, from any thread.
  virtual void abort(const Failure& failure) = 0;
  virtual std::exception_ptr failure();
  // Waits for pending operations, then tells the peers.
  virtual void shutdown() = 0;
  // The communicator object is gone: leave as soon as nothing is pending.
  virtual void release() = 0;

 protected:
  using Ended = std::vector<std::pair<WorkStatePtr, std::exception_ptr>>;

  // Queues operations that have their numbers, in this order, under queue_mutex_; then start() moves what can be moved.
  virtual void queue(const WorkStatePtr* works, std::size_t count) = 0;
  virtual void start() = 0;
  // No operation is taken from here on. Whether that was so before.
  bool close();
  // Ends operations, each with its error, or well, in two steps. The first one comes before a later operation can
  // complete: who has waited for that one sees these complete. The second one, under no lock, runs their callbacks.
  // `tell`: the communicator has failed; the second step is both, once the flight file is written.
  void settle(const Ended& ended);
  void end(const Ended& ended, bool tell);

  // The first failure counts: false for a later one. One that tells the peers that this rank is lost is Aborted here.
  bool set_failure(const Failure& failure);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure_text() const;
  // What the failure, once set, is for an operation that it ends.
  std::exception_ptr error_for(const WorkState& work) const;
  std::exception_ptr error_at(const std::string& where) const;  // the same for a call
  virtual std::string place_of(int rank) const = 0;             // " (process 4711)"

  // Who has come to a collective, for the error of one that is late. `missing`: what is said of a rank that has not.
  std::string arrivals(const std::function<bool(int)>& has_come, const std::function<std::string(int)>& missing) const;

  ProgressEngine& engine_;  // of the process that made this
  const std::shared_ptr<FlightRecorder> flight_;
  std::mutex queue_mutex_;
  std::atomic<bool> closed_{false};

 private:
  void take(const WorkStatePtr* works, std::size_t count);
  std::exception_ptr error(const Failure& failure, const std::string& where, const std::string& waited) const;

  const Member member_;
  std::atomic<Milliseconds> timeout_;
  std::uint64_t next_sequence_ = 0, next_message_ = 0;  // under queue_mutex_; of collectives, of send and recv
  mutable std::mutex failure_mutex_;
  Failure failure_;
  std::atomic<bool> failed_{false};
  mutable std::atomic<bool> told_{false};  // the caller has got the failure: what comes after it is Aborted
};

class CpuWork : public WorkState {
 public:
  CpuWork(std::shared_ptr<CpuCore> core, Request request, const CallOptions& options);
  int source() const override { return request.kind == Kind::recv && is_completed() ? request.root : -1; }

 private:
  const Member& member() const final { return core_->member(); }
  void wait_until(Clock::time_point deadline) final;

  const std::shared_ptr<CpuCore> core_;
};

class CpuCommunicator : public Communicator {
 public:
  explicit CpuCommunicator(std::shared_ptr<CpuCore> core) : core_(std::move(core)) {}
  ~CpuCommunicator() override { core_->release(); }

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  const std::string& name() const override { return core_->member().name; }
  void abort(const std::string& reason) override { core_->abort({FailureKind::aborted, -1, reason}); }
  void give_up(const std::string& error) override { core_->abort({FailureKind::peer_lost, rank(), error}); }
  Milliseconds set_timeout(Milliseconds timeout) override { return core_->set_timeout(timeout); }
  std::exception_ptr failure() override { return core_->failure(); }
  void shutdown() override { core_->shutdown(); }

 private:
  // The work of a request; throws Error for one that this transport cannot serve.
  virtual std::shared_ptr<CpuWork> make_work(Request request, const CallOptions& options) = 0;
  WorkPtr issue(Request request, const CallOptions& options) final;

  const std::shared_ptr<CpuCore> core_;
};

}  // namespace axo

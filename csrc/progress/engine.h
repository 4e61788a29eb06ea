// The progress engine of a process: who moves pending operations forward, and who sleeps meanwhile.
//
// Every communicator is a ProgressClient: a state machine behind a try-lock. Whoever has time drives all clients: a
// caller that blocks, or, when nobody blocks and something is pending, the progress thread. So a blocking call on an
// idle communicator runs in its caller's thread, and a non-blocking one advances while the caller computes.
//
// Waiting is a bounded spin, then a futex in the process's page (progress/process_life.h). A peer wakes the sleepers
// after it has published; they wake at least every kTick to look for dead peers and for timeouts. The progress thread
// also holds the process's life word.
//
// After fork the child has no progress thread and no mappings: its copy of the engine is `forked()` and must not be
// used; ProgressEngine::get() makes a new one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/shared_buffers.h"
#include "progress/core_spread.h"
#include "progress/process_life.h"

namespace axo {

inline constexpr std::chrono::milliseconds kTick{25};

// Something with pending operations.
class ProgressClient {
 public:
  virtual ~ProgressClient() = default;
  // What holds the client up: an operation, and the process that it waits for (0: none in particular).
  virtual std::string blocked_in(int* on) = 0;
  // Moves what can be moved, without blocking; true when anything moved. `check` also looks for dead peers and
  // timeouts.
  virtual bool progress(bool check) = 0;
  std::atomic<int> pending{0};  // operations that are not complete
};

class ProgressEngine {
 public:
  // The engine of this process, made at the first call.
  static ProgressEngine& get();

  bool forked() const { return forked_.load(std::memory_order_relaxed); }
  int page_fd() const { return page_fd_.get(); }
  const std::shared_ptr<Process>& self() const { return self_; }
  SharedHeap& heap() { return heap_; }
  // Whether ranks outnumber the cores: then spinning only steals time from the rank that is waited for.
  bool crowded() const { return ranks_.load(std::memory_order_relaxed) > cores_; }
  // The calling thread issues operations: its core is seen by the others (progress/core_spread.h), as when it waits in
  // vain.
  void record_core() { spread_->record_core(); }
  // The processes of a communicator's ranks, by rank.
  void meet(const std::vector<std::shared_ptr<Process>>& ranks);

  void add(const std::shared_ptr<ProgressClient>& client);
  void remove(const ProgressClient* client);

  // Drives all clients until done() or `deadline`; true when done. `own` is looked at most often.
  bool wait(ProgressClient& own, const std::function<bool()>& done, Clock::time_point deadline);

  // Counts of pending operations, kept by clients. started() leaves the progress thread asleep; call watch() when the
  // caller goes away before its operation is complete.
  void started() { pending_.fetch_add(1); }
  void finished() { pending_.fetch_sub(1); }
  void watch();

 private:
  using Clients = std::vector<std::shared_ptr<ProgressClient>>;

  ProgressEngine();
  void run();
  bool drive(const ProgressClient* except, bool check);
  std::shared_ptr<const Clients> clients();
  void tell_blocked(ProgressClient* client);
  static void after_fork_in_child();

  std::atomic<bool> forked_{false};
  SharedHeap& heap_ = SharedHeap::get();
  Fd page_fd_;
  std::shared_ptr<Process> self_;
  const int cores_ = count_cores();
  std::unique_ptr<CoreSpread> spread_;
  std::atomic<int> caller_cpu_{-1};  // where a thread last gave the progress thread something to do
  std::atomic<int> ranks_{1};

  std::mutex clients_mutex_;
  std::shared_ptr<const Clients> clients_;

  std::atomic<int> pending_{0};
  std::atomic<int> waiters_{0};
  std::atomic<ProgressClient*> told_{nullptr};  // whose wait stands in the process page
  std::atomic<bool> on_duty_{false};
  std::mutex duty_mutex_;
  std::condition_variable duty_;
  bool running_ = false;
};

}  // namespace axo

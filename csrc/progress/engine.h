// The progress engine of a process: who moves pending operations forward, and who sleeps meanwhile.
//
// Every communicator is a Client: a state machine behind a try-lock. Whoever has time drives all clients: a caller that
// blocks, or, when nobody blocks and something is pending, the progress thread. So a blocking call on an idle
// communicator runs in its caller's thread, and a non-blocking one advances while the caller computes.
//
// Waiting is a bounded spin, then a futex on the process's doorbell. A peer rings after it has published; sleepers wake
// at least every kTick to look for dead peers and for timeouts. The doorbell lives in the process's page, a shared
// segment of its own, beside the life word: the kernel marks that word FUTEX_OWNER_DIED when the progress thread dies,
// whatever the reason, before it frees the process's memory.
//
// After fork the child has no progress thread and no mappings: its copy of the engine is `forked()` and must not be
// used; Engine::get() makes a new one.
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

#include "base/flight_recorder.h"
#include "progress/core_spread.h"
#include "memory/segment.h"
#include "memory/shared_buffers.h"

namespace axo::host {

using Clock = std::chrono::steady_clock;
inline constexpr std::chrono::milliseconds kTick{25};

// What a process shows its peers.
struct ProcessPage {
  static constexpr std::size_t kBlockedWords = 24;
  static constexpr std::uint64_t kMagic = 0x3165676150'6f7841ull;
  std::uint64_t magic;
  std::int32_t pid;
  std::uint64_t heap_bytes;
  alignas(64) std::atomic<std::uint32_t> life;  // thread id of the progress thread; FUTEX_OWNER_DIED once it is dead
  alignas(64) std::atomic<std::uint32_t> bell;  // counts rings
  std::atomic<std::uint32_t> sleepers;          // threads that sleep, or are about to, on the bell
  // Where a thread of the process has been blocked for longer than a tick: for the messages of those who wait for it.
  alignas(64) std::atomic<std::uint32_t> blocked_version;  // odd while it changes
  std::atomic<std::int32_t> blocked_on;                    // the process that it waits for; 0 when it is not blocked
  std::atomic<std::uint64_t> blocked_text[kBlockedWords];
  // When the host's link to other hosts is free again (hosts/link_limit.h); the page of one process of a host counts.
  alignas(64) std::atomic<std::uint64_t> link_free;
  SeatRow seats;
};
inline constexpr std::size_t kPageBytes = 4096;

// A process as its peers see it.
class Process {
 public:
  // Maps the page and the heap of a process; throws Error when a descriptor is something else.
  Process(int page, int heap);
  bool dead() const;
  int pid() const { return page_->pid; }
  // Wakes the process's sleepers. Call it after the store that they wait for.
  void ring() const;
  bool sleeping() const;
  ProcessPage* page() const { return page_; }
  std::shared_ptr<const SeatRow> seats() const { return {mapping_, &page_->seats}; }  // keeps the page alone
  // Where the process is blocked, "" when it is not; and the process that it waits for there.
  std::string blocked(int* on) const;
  // The process's heap of shared buffers; null when this process has no room in its address space for it.
  char* heap() const { return heap_ ? heap_->base() : nullptr; }
  std::size_t heap_bytes() const { return heap_ ? heap_->bytes() : 0; }

 private:
  std::shared_ptr<Mapping> mapping_, heap_;
  ProcessPage* page_;
};

// Calls what set_interrupt_check (base/work.h) was given, if anything.
void check_interrupt();

// Something with pending operations.
class Client {
 public:
  virtual ~Client() = default;
  // What holds the client up: an operation, and the process that it waits for (0: none in particular).
  virtual std::string blocked_in(int* on) = 0;
  // Moves what can be moved, without blocking; true when anything moved. `check` also looks for dead peers and
  // timeouts.
  virtual bool progress(bool check) = 0;
  std::atomic<int> pending{0};  // operations that are not complete
};

class Engine {
 public:
  // The engine of this process, made at the first call.
  static Engine& get();

  bool forked() const { return forked_.load(std::memory_order_relaxed); }
  int page_fd() const { return page_fd_.get(); }
  const std::shared_ptr<Process>& self() const { return self_; }
  Heap& heap() { return heap_; }
  // Whether ranks outnumber the cores: then spinning only steals time from the rank that is waited for.
  bool crowded() const { return ranks_.load(std::memory_order_relaxed) > cores_; }
  // The calling thread issues operations: its core is seen by the others (progress/core_spread.h), as when it waits in vain.
  void sit() { seats_->sit(); }
  // The processes of a communicator's ranks, by rank.
  void meet(const std::vector<std::shared_ptr<Process>>& ranks);
  FlightLog& flight() { return flight_; }

  void add(const std::shared_ptr<Client>& client);
  void remove(const Client* client);

  // Drives all clients until done() or `deadline`; true when done. `own` is looked at most often.
  bool wait(Client& own, const std::function<bool()>& done, Clock::time_point deadline);

  // Counts of pending operations, kept by clients. started() leaves the progress thread asleep; call watch() when the
  // caller goes away before its operation is complete.
  void started() { pending_.fetch_add(1); }
  void finished() { pending_.fetch_sub(1); }
  void watch();

  // Objects that an operation kept alive are destroyed on a thread of the program, never on the progress thread.
  void bury(std::shared_ptr<void> object);
  void drain_graveyard();

 private:
  using Clients = std::vector<std::shared_ptr<Client>>;

  Engine();
  void run();
  bool drive(const Client* except, bool check);
  std::shared_ptr<const Clients> clients();
  void tell_blocked(Client* client);
  static void after_fork_in_child();

  std::atomic<bool> forked_{false};
  Fd page_fd_;
  std::shared_ptr<Process> self_;
  Heap heap_;
  const int cores_ = count_cores();
  std::unique_ptr<Seats> seats_;
  std::atomic<int> caller_cpu_{-1};  // where a thread last gave the progress thread something to do
  std::atomic<int> ranks_{1};

  std::mutex clients_mutex_;
  std::shared_ptr<const Clients> clients_;

  std::atomic<int> pending_{0};
  std::atomic<int> waiters_{0};
  std::atomic<Client*> told_{nullptr};  // whose wait stands in the process page
  std::atomic<bool> on_duty_{false};
  std::mutex duty_mutex_;
  std::condition_variable duty_;
  bool running_ = false;

  FlightLog flight_;

  std::mutex graveyard_mutex_;
  std::vector<std::shared_ptr<void>> graveyard_;
  std::atomic<bool> graves_{false};
};

}  // namespace axo::host

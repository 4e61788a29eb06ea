// The progress thread and the waits; see progress/engine.h.
#include "progress/engine.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/flight_recorder.h"
#include "base/work_state.h"

namespace axo {
namespace {

std::atomic<ProgressEngine*> g_engine{nullptr};

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// False when a signal handler of the program ran in this thread meanwhile.
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit) {
  timespec t{};
  t.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  t.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &t, nullptr, 0) == 0 ||
         errno != EINTR;
}

// Asks the scheduler for short turns of the calling thread: it shall run soon after a peer has rung, not when the
// computation beside it has used up a slice of milliseconds. Its share of the core stays the same. Needs no privilege;
// kernels before 6.12 take no notice.
void take_short_turns() {
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime, deadline, period;  // nanoseconds
  } turn{};
  if (::syscall(SYS_sched_getattr, 0, &turn, sizeof(turn), 0) != 0 || turn.policy != SCHED_OTHER) return;
  turn.size = sizeof(turn);
  turn.runtime = 100'000;
  ::syscall(SYS_sched_setattr, 0, &turn, 0);  // a refusal costs speed only
}

}  // namespace

// Says in the process page where a thread is blocked, or, with null, that it is not any more. One wait at a time.
void ProgressEngine::tell_blocked(ProgressClient* client) {
  int on = 0;
  const std::string text = client ? client->blocked_in(&on) : std::string();
  self_->set_blocked(text, on);
}

ProgressEngine& ProgressEngine::get() {
  static std::mutex mutex;
  ProgressEngine* engine = g_engine.load(std::memory_order_acquire);
  if (engine != nullptr) return *engine;
  std::lock_guard<std::mutex> lock(mutex);
  engine = g_engine.load(std::memory_order_acquire);
  if (engine == nullptr) {
    static const int registered = ::pthread_atfork(nullptr, nullptr, &ProgressEngine::after_fork_in_child);
    (void)registered;
    engine = new ProgressEngine;  // never destroyed: its thread lives as long as the process
    g_engine.store(engine, std::memory_order_release);
  }
  return *engine;
}

void ProgressEngine::after_fork_in_child() {
  ProgressEngine* engine = g_engine.exchange(nullptr);
  if (engine != nullptr) engine->forked_.store(true);
}

ProgressEngine::ProgressEngine()
    : page_fd_(make_process_page(heap_.bytes())),
      self_(std::make_shared<Process>(page_fd_.get(), heap_.fd())),
      spread_(std::make_unique<CoreSpread>(&self_->page()->cores)),
      clients_(std::make_shared<Clients>()) {
  // The thread blocks all signals: they belong to the program's own threads.
  sigset_t all, old;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    std::thread(&ProgressEngine::run, this).detach();
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  std::unique_lock<std::mutex> lock(duty_mutex_);
  duty_.wait(lock, [this] { return running_; });
}

void ProgressEngine::run() {
  ::prctl(PR_SET_NAME, "axo-progress", 0, 0, 0);
  take_short_turns();
  hold_life_word(*self_->page());

  std::unique_lock<std::mutex> lock(duty_mutex_);
  running_ = true;
  duty_.notify_all();
  for (;;) {
    on_duty_.store(false);
    const bool work = duty_.wait_for(lock, std::chrono::milliseconds(500),
                                     [this] { return pending_.load() > 0 && waiters_.load() == 0; });
    on_duty_.store(work);
    lock.unlock();
    // Where every core has a rank, the scheduler may wake two ranks' progress threads on one core, beside one rank's
    // computation, and the other core computes alone: a collective then takes half again as long.
    if (work && ranks_.load() >= cores_) come_to(caller_cpu_.load(std::memory_order_relaxed));
    FlightLog::poll();
    auto last_check = Clock::now();
    while (pending_.load() > 0 && waiters_.load() == 0) {
      if (drive(nullptr, false)) continue;
      auto& page = *self_->page();
      page.sleepers.fetch_add(1);
      const std::uint32_t ticket = page.bell.load();
      const bool moved = drive(nullptr, false);
      if (!moved && pending_.load() > 0 && waiters_.load() == 0) futex_wait(page.bell, ticket, kTick);
      page.sleepers.fetch_sub(1);
      const auto now = Clock::now();
      if (now - last_check >= kTick) {
        drive(nullptr, true);
        FlightLog::poll();
        last_check = now;
      }
    }
    lock.lock();
  }
}

void ProgressEngine::meet(const std::vector<std::shared_ptr<Process>>& ranks) {
  const int count = static_cast<int>(ranks.size());
  int known = ranks_.load();
  while (count > known && !ranks_.compare_exchange_weak(known, count)) {
  }
  CoreSpread::Rows rows;
  for (const auto& process : ranks) rows.push_back(process->cores());
  spread_->meet(std::move(rows));
}

void ProgressEngine::watch() {
  if (waiters_.load() > 0 || pending_.load() == 0 || on_duty_.load()) return;
  caller_cpu_.store(::sched_getcpu(), std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(duty_mutex_);
  duty_.notify_one();
}

std::shared_ptr<const ProgressEngine::Clients> ProgressEngine::clients() {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  return clients_;
}

void ProgressEngine::add(const std::shared_ptr<ProgressClient>& client) {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  auto next = std::make_shared<Clients>(*clients_);
  next->push_back(client);
  clients_ = next;
}

void ProgressEngine::remove(const ProgressClient* client) {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  auto next = std::make_shared<Clients>(*clients_);
  next->erase(std::remove_if(next->begin(), next->end(), [&](const auto& c) { return c.get() == client; }),
              next->end());
  clients_ = next;
}

bool ProgressEngine::drive(const ProgressClient* except, bool check) {
  const auto all = clients();
  bool moved = false;
  for (const auto& client : *all) {
    if (client.get() == except || client->pending.load(std::memory_order_acquire) == 0) continue;
    moved |= client->progress(check);
  }
  return moved;
}

bool ProgressEngine::wait(ProgressClient& own, const std::function<bool()>& done, Clock::time_point deadline) {
  constexpr int kSpins = 400, kLook = 32;
  constexpr unsigned kTurns = 8;  // between two looks at who shares the core, where ranks outnumber cores
  constexpr auto kAskPeriod = std::chrono::milliseconds(250);
  if (done()) return true;
  waiters_.fetch_add(1);
  auto& page = *self_->page();
  const bool shares_core = crowded();
  const int spins = shares_core ? 0 : kSpins;
  int idle = 0;
  bool yielded = false, gives_way = false;
  Clock::time_point last_check{}, last_ask{};
  bool finished = false, told = false;
  const auto end = [&] {
    if (told) {
      tell_blocked(nullptr);
      told_.store(nullptr);
    }
    if (waiters_.fetch_sub(1) == 1) watch();
  };
  for (;;) {
    bool moved = own.progress(false);
    if ((finished = done())) break;
    if (!moved && (idle >= spins || (idle & 15) == 15)) moved = drive(&own, false);
    if ((finished = done())) break;
    if (moved) {
      idle = 0;
      yielded = false;
      continue;
    }
    if (idle < spins) {
      if (++idle == kLook) gives_way = spread_->spread() == Crowding::crowded;
      gives_way ? static_cast<void>(::sched_yield()) : pause_cpu();
      continue;
    }
    // The peer that is waited for may be next on this core. To sleep and be rung awake costs both of them more.
    if (shares_core && !yielded) {
      yielded = true;
      static thread_local unsigned turns = 0;
      if (++turns % kTurns == 0) spread_->spread();
      ::sched_yield();
      continue;
    }
    yielded = false;
    auto now = Clock::now();
    if (now >= deadline) break;
    bool signalled = false;
    page.sleepers.fetch_add(1);
    const std::uint32_t ticket = page.bell.load();
    moved = own.progress(false);
    moved |= drive(&own, false);
    if (!moved && !done()) {
      signalled = !futex_wait(page.bell, ticket, std::min<std::chrono::nanoseconds>(kTick, deadline - now));
      now = Clock::now();
    }
    page.sleepers.fetch_sub(1);
    if (last_check == Clock::time_point{}) last_check = last_ask = now;
    if (signalled || now - last_ask >= kAskPeriod) {
      // It may wait for a lock of the program's: the progress thread takes over meanwhile.
      if (waiters_.fetch_sub(1) == 1) watch();
      std::exception_ptr interrupt;
      try {
        check_interrupt();
      } catch (...) {
        interrupt = std::current_exception();
      }
      waiters_.fetch_add(1);
      if (interrupt) {
        end();
        std::rethrow_exception(interrupt);
      }
      last_ask = now;
    }
    if (now - last_check >= kTick) {
      drive(nullptr, true);
      last_check = now;
      ProgressClient* nobody = nullptr;
      if (told_.compare_exchange_strong(nobody, &own)) told = true;
      if (told) tell_blocked(&own);
    }
  }
  end();
  return finished;
}

}  // namespace axo

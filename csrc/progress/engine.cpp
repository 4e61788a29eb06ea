// The progress thread, the doorbell and the life word; see progress/engine.h.
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
#include <climits>
#include <cstring>
#include <new>
#include <thread>

#include "base/error.h"

#if defined(__SANITIZE_THREAD__)
#define AXO_TSAN 1
#endif

namespace axo::host {
namespace {

std::atomic<Engine*> g_engine{nullptr};
std::atomic<void (*)()> g_interrupt_check{nullptr};

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

// The published data must be visible before the sleeper count is read, and the sleeper's count before it looks at the
// data again: then one of the two sees the other. ThreadSanitizer knows no fences, so it gets the costlier form.
std::uint32_t sleepers_after_publish(std::atomic<std::uint32_t>& sleepers) {
#if defined(AXO_TSAN)
  return sleepers.fetch_add(0, std::memory_order_acq_rel);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return sleepers.load(std::memory_order_relaxed);
#endif
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

void check_interrupt() {
  if (const auto check = g_interrupt_check.load()) check();
}

Process::Process(int page, int heap) : mapping_(map_segment(page, kPageBytes)) {
  page_ = reinterpret_cast<ProcessPage*>(mapping_->base());
  if (page_->magic != ProcessPage::kMagic) throw Error("shared memory: the page of a peer is not one of Axo's");
  try {
    heap_ = map_segment(heap, page_->heap_bytes);  // which also checks that it is of this size
  } catch (const Error&) {
    heap_ = nullptr;  // buffers in it will be staged
  }
}

bool Process::dead() const { return (page_->life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0; }

bool Process::sleeping() const { return sleepers_after_publish(page_->sleepers) != 0; }

void Process::ring() const {
  if (sleepers_after_publish(page_->sleepers) == 0) return;
  page_->bell.fetch_add(1);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&page_->bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string Process::blocked(int* on) const {
  char text[ProcessPage::kBlockedWords * 8];
  *on = 0;
  const std::uint32_t version = page_->blocked_version.load();
  if (version % 2 != 0) return "";
  const int peer = page_->blocked_on.load();
  for (std::size_t i = 0; i < ProcessPage::kBlockedWords; ++i) {
    const std::uint64_t word = page_->blocked_text[i].load();
    std::memcpy(text + 8 * i, &word, 8);
  }
  if (page_->blocked_version.load() != version) return "";
  *on = peer;
  return std::string(text, ::strnlen(text, sizeof(text)));
}

// Says in the process page where a thread is blocked, or, with null, that it is not any more. One wait at a time.
void Engine::tell_blocked(Client* client) {
  int on = 0;
  const std::string text = client ? clipped(client->blocked_in(&on), 8 * ProcessPage::kBlockedWords) : std::string();
  ProcessPage& page = *self_->page();
  page.blocked_version.fetch_add(1);
  page.blocked_on.store(on);
  for (std::size_t i = 0; i < ProcessPage::kBlockedWords; ++i) {
    char part[8] = {};
    if (8 * i < text.size()) std::memcpy(part, text.data() + 8 * i, std::min<std::size_t>(8, text.size() - 8 * i));
    std::uint64_t word;
    std::memcpy(&word, part, 8);
    page.blocked_text[i].store(word);
  }
  page.blocked_version.fetch_add(1);
}

Engine& Engine::get() {
  static std::mutex mutex;
  Engine* engine = g_engine.load(std::memory_order_acquire);
  if (engine != nullptr) return *engine;
  std::lock_guard<std::mutex> lock(mutex);
  engine = g_engine.load(std::memory_order_acquire);
  if (engine == nullptr) {
    static const int registered = ::pthread_atfork(nullptr, nullptr, &Engine::after_fork_in_child);
    (void)registered;
    engine = new Engine;  // never destroyed: its thread lives as long as the process
    g_engine.store(engine, std::memory_order_release);
  }
  return *engine;
}

void Engine::after_fork_in_child() {
  Engine* engine = g_engine.exchange(nullptr);
  if (engine != nullptr) engine->forked_.store(true);
}

Engine::Engine() : page_fd_(create_segment("axo-process", kPageBytes)), clients_(std::make_shared<Clients>()) {
  {
    auto mapping = map_segment(page_fd_.get(), kPageBytes);
    auto* page = new (mapping->base()) ProcessPage{};
    page->pid = ::getpid();
    page->heap_bytes = heap_.bytes();
    page->magic = ProcessPage::kMagic;
    self_ = std::make_shared<Process>(page_fd_.get(), heap_.fd());
    seats_ = std::make_unique<Seats>(&self_->page()->seats);
  }
  // The thread blocks all signals: they belong to the program's own threads.
  sigset_t all, old;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    std::thread(&Engine::run, this).detach();
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  std::unique_lock<std::mutex> lock(duty_mutex_);
  duty_.wait(lock, [this] { return running_; });
}

void Engine::run() {
  ::prctl(PR_SET_NAME, "axo-progress", 0, 0, 0);
  take_short_turns();
  // The life word: an entry of this thread's robust list. When the thread dies, however it dies, the kernel sets
  // FUTEX_OWNER_DIED in it before the process's memory is freed. The list is ours, not the C library's: this thread
  // uses no robust mutex. Only the word lies in shared memory; the entry, with its pointers, stays private.
  static thread_local robust_list_head head;
  static thread_local robust_list entry;
  auto& life = self_->page()->life;
  head.futex_offset = reinterpret_cast<char*>(&life) - reinterpret_cast<char*>(&entry);
  head.list_op_pending = nullptr;
  head.list.next = &entry;
  entry.next = &head.list;
  const bool held = ::syscall(SYS_set_robust_list, &head, sizeof(head)) == 0;
  if (held) life.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)), std::memory_order_release);

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
    flight_.poll();
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
        flight_.poll();
        last_check = now;
      }
    }
    lock.lock();
  }
}

void Engine::meet(const std::vector<std::shared_ptr<Process>>& ranks) {
  const int count = static_cast<int>(ranks.size());
  int known = ranks_.load();
  while (count > known && !ranks_.compare_exchange_weak(known, count)) {
  }
  Seats::Rows rows;
  for (const auto& process : ranks) rows.push_back(process->seats());
  seats_->meet(std::move(rows));
}

void Engine::watch() {
  if (waiters_.load() > 0 || pending_.load() == 0 || on_duty_.load()) return;
  caller_cpu_.store(::sched_getcpu(), std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(duty_mutex_);
  duty_.notify_one();
}

std::shared_ptr<const Engine::Clients> Engine::clients() {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  return clients_;
}

void Engine::add(const std::shared_ptr<Client>& client) {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  auto next = std::make_shared<Clients>(*clients_);
  next->push_back(client);
  clients_ = next;
}

void Engine::remove(const Client* client) {
  std::lock_guard<std::mutex> lock(clients_mutex_);
  auto next = std::make_shared<Clients>(*clients_);
  next->erase(std::remove_if(next->begin(), next->end(), [&](const auto& c) { return c.get() == client; }),
              next->end());
  clients_ = next;
}

bool Engine::drive(const Client* except, bool check) {
  const auto all = clients();
  bool moved = false;
  for (const auto& client : *all) {
    if (client.get() == except || client->pending.load(std::memory_order_acquire) == 0) continue;
    moved |= client->progress(check);
  }
  return moved;
}

bool Engine::wait(Client& own, const std::function<bool()>& done, Clock::time_point deadline) {
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
      if (++idle == kLook) gives_way = seats_->make_room() == Room::crowded;
      gives_way ? static_cast<void>(::sched_yield()) : pause_cpu();
      continue;
    }
    // The peer that is waited for may be next on this core. To sleep and be rung awake costs both of them more.
    if (shares_core && !yielded) {
      yielded = true;
      static thread_local unsigned turns = 0;
      if (++turns % kTurns == 0) seats_->make_room();
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
      Client* nobody = nullptr;
      if (told_.compare_exchange_strong(nobody, &own)) told = true;
      if (told) tell_blocked(&own);
    }
  }
  end();
  return finished;
}

void Engine::bury(std::shared_ptr<void> object) {
  if (!object || forked()) return;  // a forked child has no thread but its own
  std::lock_guard<std::mutex> lock(graveyard_mutex_);
  graveyard_.push_back(std::move(object));
  graves_.store(true);
}

void Engine::drain_graveyard() {
  if (!graves_.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<void>> objects;
  {
    std::lock_guard<std::mutex> lock(graveyard_mutex_);
    objects.swap(graveyard_);
    graves_.store(false);
  }
}

}  // namespace axo::host

namespace axo {

void set_interrupt_check(void (*check)()) { host::g_interrupt_check.store(check); }

}  // namespace axo

// The life of a work, and the list of what works kept alive; see base/work_state.h.
#include "base/work_state.h"

#include <unistd.h>

#include <cstdio>

namespace axo {
namespace {

std::atomic<void (*)()> g_interrupt_check{nullptr};

struct Released {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> objects;
  std::atomic<bool> any{false};
  int pid = ::getpid();
};

// A forked child begins an empty list: its copy of the parent's may be locked, and holds what is the parent's.
std::atomic<Released*> g_released{new Released};  // never destroyed: threads may outlive statics

Released& released() {
  Released* list = g_released.load(std::memory_order_acquire);
  if (list->pid != ::getpid()) g_released.store(list = new Released, std::memory_order_release);
  return *list;
}

}  // namespace

void release_later(std::shared_ptr<void> object) {
  if (!object) return;
  Released& list = released();
  std::lock_guard<std::mutex> lock(list.mutex);
  list.objects.push_back(std::move(object));
  list.any.store(true);
}

void release_now() {
  if (!g_released.load(std::memory_order_acquire)->any.load(std::memory_order_relaxed)) return;
  Released& list = released();
  std::vector<std::shared_ptr<void>> objects;
  std::lock_guard<std::mutex> lock(list.mutex);
  objects.swap(list.objects);
  list.any.store(false);
}

void check_interrupt() {
  if (const auto check = g_interrupt_check.load()) check();
}

void set_interrupt_check(void (*check)()) { g_interrupt_check.store(check); }

WorkState::WorkState(Request r, const CallOptions& options, Milliseconds timeout, bool on_device)
    : request(std::move(r)),
      timeout_(options.timeout < Milliseconds::zero() ? timeout : options.timeout),
      on_device_(on_device),
      keep_alive_(options.keep_alive) {}

WorkState::~WorkState() {
  if (!on_device_) release_later(std::move(keep_alive_));
}

std::string WorkState::title() const { return words(operation()) + " #" + std::to_string(sequence_); }

std::string WorkState::timed_out() const {
  return "timed out after " + seconds_since(issue_time_) + " (its timeout is " + seconds_text(deadline_ - issue_time_) +
         ")";
}

std::string WorkState::describe() const { return title() + " on " + member().words(); }

void WorkState::issued(std::uint64_t sequence, FlightRecorder* flight) {
  sequence_ = sequence;
  issue_time_ = Clock::now();
  deadline_ = deadline_after(timeout_, issue_time_);
  if (flight != nullptr) flight_ = flight->issued(request, sequence, issue_time_);
  issued_.store(true, std::memory_order_release);
}

bool WorkState::settle(std::exception_ptr error, Clock::time_point time) noexcept {
  std::shared_ptr<void> keep_alive;
  std::lock_guard<std::mutex> lock(mutex_);
  if (done_.load(std::memory_order_relaxed)) return false;
  error_ = std::move(error);
  end_time_ = time;
  if (!error_ && waited_) keep_alive = std::move(keep_alive_);
  done_.store(true, std::memory_order_release);
  return true;
}

void WorkState::call_back() noexcept {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    callbacks.swap(callbacks_);
  }
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (const std::exception& e) {
      // There is nobody to throw to: this may be a thread of the core's.
      std::fprintf(stderr, "axo: a completion callback of %s threw: %s\n", describe().c_str(), e.what());
    }
  }
}

bool WorkState::complete(std::exception_ptr error, Clock::time_point time) noexcept {
  const bool first = settle(std::move(error), time);
  if (first) call_back();
  return first;
}

void WorkState::refuse(std::exception_ptr error) {
  issued(0, nullptr);
  complete(std::move(error));
}

void WorkState::check_issued() const {
  if (!issued_.load(std::memory_order_acquire)) throw_recorded();
}

void WorkState::throw_recorded() const {
  throw Error("wait: " + words(request) + " is recorded in a group that has not ended; call group_end first");
}

void WorkState::finish_wait() {
  std::shared_ptr<void> keep_alive;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = error_;
    if (!error || !on_device_) keep_alive.swap(keep_alive_);
  }
  keep_alive.reset();
  release_now();
  if (error) std::rethrow_exception(error);
}

void WorkState::waited_on_stream(bool now) {
  std::shared_ptr<void> keep_alive;
  std::lock_guard<std::mutex> lock(mutex_);
  waited_ = true;
  if (now) keep_alive.swap(keep_alive_);
}

void WorkState::wait() {
  if (!is_completed()) {
    check_issued();
    wait_until(Clock::time_point::max());
  }
  finish_wait();
}

void WorkState::synchronize(Milliseconds timeout) {
  if (!is_completed()) {
    check_issued();
    wait_until(timeout < Milliseconds::zero() ? Clock::time_point::max() : deadline_after(timeout));
    if (!is_completed()) {
      throw Timeout(describe() + ": still pending after " + std::to_string(timeout.count()) + " ms");
    }
  }
  finish_wait();
}

std::exception_ptr WorkState::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void WorkState::on_completion(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool WorkState::has_callbacks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !callbacks_.empty();
}

double WorkState::seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_.load(std::memory_order_relaxed) ? std::chrono::duration<double>(end_time_ - issue_time_).count() : -1.0;
}

}  // namespace axo

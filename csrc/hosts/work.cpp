// Waiting for an operation of a communicator that spans hosts; see base/work.h.
#include <algorithm>
#include <cstdio>

#include "base/deadline.h"
#include "hosts/core.h"

namespace axo::span {

SpanWork::SpanWork(std::shared_ptr<SpanCore> core, Request r, const CallOptions& options, Milliseconds timeout)
    : request(std::move(r)), core_(std::move(core)), timeout_(timeout), keep_alive_(options.keep_alive) {}

SpanWork::~SpanWork() {
  // The last reference may be the communicator's thread: what the operation kept alive must not die there.
  if (keep_alive_) core_->engine().bury(std::move(keep_alive_));
}

void SpanWork::issued(std::uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  sequence = number;
  issue_time_ = Clock::now();
  deadline_ = deadline_after(timeout_, issue_time_);
  issued_ = true;
}

void SpanWork::complete(std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    end_time_ = Clock::now();
    callbacks.swap(callbacks_);
    done_ = true;
  }
  changed_.notify_all();
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (const std::exception& e) {
      // There is nobody to throw to: this is a thread of the communicator.
      std::fprintf(stderr, "axo: a completion callback of %s threw: %s\n", core_->describe(*this).c_str(), e.what());
    }
  }
}

bool SpanWork::wait_until(Clock::time_point deadline) {
  constexpr auto kAskPeriod = std::chrono::milliseconds(250);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!issued_) throw Error("wait: the operation is recorded in a group that has not ended; call group_end first");
      if (done_) return true;
      core_->check_not_forked("wait");
      const auto until = std::min(deadline, Clock::now() + kAskPeriod);
      if (changed_.wait_until(lock, until, [this] { return done_; })) return true;
    }
    if (Clock::now() >= deadline) return false;
    host::check_interrupt();
  }
}

void SpanWork::settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

void SpanWork::finish_wait() {
  std::shared_ptr<void> keep_alive;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    keep_alive.swap(keep_alive_);
    error = error_;
  }
  keep_alive.reset();
  core_->engine().drain_graveyard();
  if (error) std::rethrow_exception(error);
}

void SpanWork::wait() {
  wait_until(Clock::time_point::max());
  finish_wait();
}

void SpanWork::synchronize(Milliseconds timeout) {
  if (timeout < Milliseconds::zero()) return wait();
  if (!wait_until(deadline_after(timeout))) {
    throw Timeout(core_->describe(*this) + ": still pending after " + std::to_string(timeout.count()) + " ms");
  }
  finish_wait();
}

bool SpanWork::is_completed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

std::exception_ptr SpanWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void SpanWork::on_completion(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

double SpanWork::seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!done_) return -1.0;
  return std::chrono::duration<double>(end_time_ - issue_time_).count();
}

}  // namespace axo::span

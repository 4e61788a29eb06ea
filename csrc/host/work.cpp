// Waiting for an operation of a host communicator, and groups of operations; see base/work.h and base/communicator.h.
#include "host/work.h"

#include <cstdio>

#include "base/deadline.h"
#include "host/core.h"

namespace axo {
namespace host {
namespace {

// The operations that this thread has recorded since its outermost group_start.
struct Group {
  int depth = 0;
  std::vector<std::pair<std::shared_ptr<HostCore>, HostWorkPtr>> recorded;
  std::vector<GroupEnd> others;
};

Group& group() {
  static thread_local Group current;
  return current;
}

}  // namespace

HostWork::HostWork(std::shared_ptr<HostCore> core, Request r, const CallOptions& options, Milliseconds timeout)
    : request(std::move(r)), core_(std::move(core)), timeout_(timeout), keep_alive_(options.keep_alive) {}

HostWork::~HostWork() {
  // The last reference may be the engine's: what the operation kept alive must not die on its thread.
  if (keep_alive_) core_->engine().bury(std::move(keep_alive_));
}

void HostWork::issued(std::uint64_t number) {
  sequence = number;
  issue_time_ = Clock::now();
  deadline_ = deadline_after(timeout_, issue_time_);
  issued_.store(true, std::memory_order_release);
}

void HostWork::complete(std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    end_time_ = Clock::now();
    callbacks.swap(callbacks_);
    done_.store(true, std::memory_order_release);
  }
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (const std::exception& e) {
      // There is nobody to throw to: this may be the progress thread.
      std::fprintf(stderr, "axo: a completion callback of %s threw: %s\n", core_->describe(*this).c_str(), e.what());
    }
  }
}

void HostWork::wait_until(Clock::time_point deadline) {
  if (is_completed()) return;
  core_->check_not_forked("wait");
  if (!issued_.load(std::memory_order_acquire)) {
    throw Error("wait: the operation is recorded in a group that has not ended; call group_end first");
  }
  core_->engine().wait(*core_, [this] { return is_completed(); }, deadline);
}

void HostWork::finish_wait() {
  std::shared_ptr<void> keep_alive;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    keep_alive = std::move(keep_alive_);
    keep_alive_.reset();
    error = error_;
  }
  keep_alive.reset();
  core_->engine().drain_graveyard();
  if (error) std::rethrow_exception(error);
}

void HostWork::wait() {
  wait_until(Clock::time_point::max());
  finish_wait();
}

void HostWork::synchronize(Milliseconds timeout) {
  if (timeout < Milliseconds::zero()) return wait();
  wait_until(deadline_after(timeout));
  if (!is_completed()) {
    throw Timeout(core_->describe(*this) + ": still pending after " + std::to_string(timeout.count()) + " ms");
  }
  finish_wait();
}

std::exception_ptr HostWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void HostWork::on_completion(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

double HostWork::seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!done_.load(std::memory_order_relaxed)) return -1.0;
  return std::chrono::duration<double>(end_time_ - issue_time_).count();
}

bool inside_group() { return group().depth > 0; }

void at_group_end(GroupEnd launch) {
  auto& others = group().others;
  for (auto known : others) {
    if (known == launch) return;
  }
  others.push_back(launch);
}

bool record_in_group(const std::shared_ptr<HostCore>& core, const HostWorkPtr& work) {
  if (!inside_group()) return false;
  group().recorded.emplace_back(core, work);
  return true;
}

}  // namespace host

void group_start() { ++host::group().depth; }

void group_end() {
  auto& group = host::group();
  if (group.depth == 0) throw Error("group_end: there is no group_start before it on this thread");
  if (--group.depth > 0) return;
  const auto recorded = std::move(group.recorded);
  group.recorded.clear();
  for (auto launch : std::exchange(group.others, {})) launch();
  // One launch for each communicator, in the order of its operations. An operation that cannot be issued any more ends
  // with that error; the others go ahead.
  std::vector<std::shared_ptr<host::HostCore>> cores;
  for (const auto& [core, work] : recorded) {
    bool known = false;
    for (const auto& c : cores) known |= c == core;
    if (!known) cores.push_back(core);
  }
  for (const auto& core : cores) {
    std::vector<host::HostWorkPtr> works;
    for (const auto& [c, work] : recorded) {
      if (c == core) works.push_back(work);
    }
    try {
      core->check_usable("group_end");
    } catch (...) {
      for (const auto& work : works) {
        work->issued(0);
        work->complete(std::current_exception());
      }
      continue;
    }
    core->submit(works);
    core->engine().watch();
  }
}

}  // namespace axo

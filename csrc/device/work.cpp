#include "device/work.h"

#include <cstdio>
#include <thread>

#include "base/deadline.h"
#include "device/core.h"

namespace axo {

std::string Operation::text() const {
  std::string text = std::string(kind) + " of " + std::to_string(count) + " " + name_of(dtype);
  if (reduce) text += std::string(", ") + reduce;
  if (scale != 1) text += " of " + std::to_string(scale) + " times";
  if (root >= 0) text += ", root " + std::to_string(root);
  if (peer >= 0) text += std::string(kind == std::string("send") ? ", to" : ", from") + " rank " + std::to_string(peer);
  return text;
}

DeviceWork::DeviceWork(std::shared_ptr<DeviceCore> core, Operation op, Launch how, const CallOptions& options)
    : operation(std::move(op)),
      launch(std::move(how)),
      after_caller(options.after_caller),
      core_(std::move(core)),
      caller_(options.stream),
      stream_(options.blocking ? options.stream : core_->stream()),
      timeout_(options.timeout < Milliseconds::zero() ? core_->timeout() : options.timeout),
      keep_alive_(options.keep_alive) {}

DeviceWork::~DeviceWork() = default;

int DeviceWork::source() const { return operation.kind == std::string("recv") ? operation.peer : -1; }

void DeviceWork::start_turn(std::uint64_t sequence) {
  sequence_ = sequence;
  issue_time_ = Clock::now();
  deadline_ = deadline_after(timeout_, issue_time_);
  host::FlightEntry entry;
  entry.op = operation.kind;
  entry.sequence = sequence;
  entry.dtype = operation.dtype;
  entry.count = operation.count;
  entry.reduce = operation.reduce;
  entry.root = operation.point_to_point() ? operation.peer : operation.root;
  entry.tag = operation.tag;
  entry.issued = issue_time_;
  flight_ = core_->flight().issued(entry);
}

void DeviceWork::launched(EventPtr start, EventPtr done, const Capture& capture) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stage_ == Stage::complete) return;
  stage_ = Stage::launched;
  start_ = std::move(start);
  done_ = std::move(done);
  captured_ = capture.active();
  core_->flight().started(flight_);
  if (captured_) core_->flight().ended(flight_, false);  // its replays are the graph's
}

void DeviceWork::finish(std::exception_ptr error) const noexcept {
  std::vector<std::function<void()>> callbacks;
  std::shared_ptr<void> released;
  bool failed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stage_ == Stage::complete) return;
    stage_ = Stage::complete;
    error_ = std::move(error);
    failed = error_ != nullptr;
    callbacks.swap(callbacks_);
    // After an error the device may still be writing: the tensors stay until the last reference goes.
    if (!error_ && waited_) released = std::move(keep_alive_);
  }
  if (sequence_ > 0) core_->flight().ended(flight_, failed);
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (const std::exception& e) {
      // There is nobody to throw to: this may be the watchdog's thread.
      std::fprintf(stderr, "axo: a completion callback of %s threw: %s\n", core_->describe(*this).c_str(), e.what());
    }
  }
}

DeviceWork::Now DeviceWork::now() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (stage_ == Stage::recorded) {
    throw Error("wait: " + core_->describe(*this) + " is recorded in a group that has not ended; call group_end first");
  }
  return {stage_, done_, captured_};
}

void DeviceWork::wait_on(void* stream) {
  const Now state = now();
  if (state.done && stream != stream_ && (state.captured || state.stage == Stage::launched)) {
    DeviceGuard guard(core_->gpu(), core_->context().device());
    core_->gpu().wait(stream, state.done->handle());
  }
  std::shared_ptr<void> released;
  std::lock_guard<std::mutex> lock(mutex_);
  waited_ = true;
  // What is enqueued on the caller's stream from now on comes after the operation, and so does whatever reuses the
  // memory.
  if (stream == caller_ || stage_ == Stage::complete) released = std::move(keep_alive_);
}

bool DeviceWork::is_completed() const {
  EventPtr done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stage_ == Stage::complete) return true;
    if (stage_ == Stage::recorded) return false;
    if (captured_) return true;  // the graph owns it; an event in a graph cannot be asked
    done = done_;
  }
  try {
    if (!core_->gpu().is_complete(done->handle())) return false;
  } catch (...) {
    core_->fail(std::current_exception());
    return true;
  }
  finish(nullptr);
  return true;
}

void DeviceWork::synchronize(Milliseconds timeout) {
  if (now().captured) {
    throw Error("synchronize: " + core_->describe(*this) + " is part of a graph and runs when the graph is replayed");
  }
  const auto start = Clock::now(), end = deadline_after(timeout, start);
  const auto spin_until = start + std::chrono::microseconds(50);
  while (!is_completed()) {
    const auto time = Clock::now();
    if (timeout >= Milliseconds::zero() && time >= end) {
      throw Timeout(core_->describe(*this) + ": still pending after " + std::to_string(timeout.count()) + " ms");
    }
    if (time < spin_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(time - start < std::chrono::milliseconds(20) ? 20 : 500));
    }
  }
  now();  // throws the error
  std::shared_ptr<void> released;
  std::lock_guard<std::mutex> lock(mutex_);
  waited_ = true;
  released = std::move(keep_alive_);
}

std::exception_ptr DeviceWork::exception() const {
  is_completed();
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

bool DeviceWork::has_callbacks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !callbacks_.empty();
}

void DeviceWork::on_completion(std::function<void()> callback) {
  if (!is_completed()) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stage_ != Stage::complete) {
      callbacks_.push_back(std::move(callback));
      core_->context().watchdog().hurry();
      return;
    }
  }
  callback();
}

double DeviceWork::seconds() const {
  if (!is_completed()) return -1.0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ || !start_ || captured_) return -1.0;
  return core_->gpu().seconds_between(start_->handle(), done_->handle());
}

}  // namespace axo

#include "device/work.h"

#include <thread>

#include "device/core.h"

namespace axo {

DeviceWork::DeviceWork(std::shared_ptr<DeviceCore> core, Request r, const CallOptions& options)
    : WorkState(std::move(r), options, core->timeout(), /*on_device=*/true),
      caller(options.stream),
      stream(options.blocking ? options.stream : core->stream()),
      after_caller(options.after_caller),
      library_calls(*core, request, options.after_caller),
      core_(std::move(core)) {}

const Member& DeviceWork::member() const { return core_->member(); }

void DeviceWork::launched(EventPtr start, EventPtr done, bool captured) {
  if (WorkState::is_completed()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  launched_ = {std::move(start), std::move(done), captured};
  core_->flight().started(flight());
  if (captured) core_->flight().ended(flight(), false);  // its replays are the graph's
}

void DeviceWork::finish(std::exception_ptr error) const noexcept {
  const bool failed = error != nullptr;
  if (const_cast<DeviceWork*>(this)->complete(std::move(error))) core_->flight().ended(flight(), failed);
}

DeviceWork::Launched DeviceWork::launched() const {
  if (const auto error = WorkState::exception()) std::rethrow_exception(error);
  std::lock_guard<std::mutex> lock(mutex_);
  return launched_;
}

void DeviceWork::wait_on(void* waiting) {
  const Launched state = launched();
  const bool complete = WorkState::is_completed();
  if (!complete && !state.done) throw_recorded();
  if (state.done && waiting != stream && (state.captured || !complete)) {
    DeviceGuard guard(core_->gpu(), core_->context().device());
    core_->gpu().wait(waiting, state.done->handle());
  }
  // What is enqueued on the caller's stream from now on comes after the operation, and so does whatever reuses the
  // memory.
  waited_on_stream(waiting == caller || WorkState::is_completed());
}

void DeviceWork::keep_until(void* stream_now, std::shared_ptr<void> object) {
  if (stream_now == caller || !object) return;  // whoever reuses the memory comes after, on the caller's stream
  const GpuRuntime& gpu = core_->gpu();
  DeviceGuard guard(gpu, core_->context().device());
  const EventPtr event = core_->context().events().take(false);
  const bool captured = gpu.capture_info(stream_now).active();
  if (captured) event->set_captured();
  gpu.record(event->handle(), stream_now);
  if (captured) {
    gpu.wait(caller, event->handle());  // nobody can ask an event of a graph: the caller's stream comes after
  } else {
    core_->context().watchdog().keep(event, std::move(object));
  }
}

bool DeviceWork::is_completed() const {
  if (WorkState::is_completed()) return true;
  EventPtr done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!launched_.done) return false;
    if (launched_.captured) return true;  // the graph owns it; an event in a graph cannot be asked
    done = launched_.done;
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
  if (launched().captured) {
    throw Error("synchronize: " + describe() + " is part of a graph and runs when the graph is replayed");
  }
  WorkState::synchronize(timeout);
}

void DeviceWork::wait_until(Clock::time_point deadline) {
  const auto start = Clock::now();
  const auto spin_until = start + std::chrono::microseconds(50);
  while (!is_completed()) {
    const auto time = Clock::now();
    if (time >= deadline) return;
    if (time < spin_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(time - start < std::chrono::milliseconds(20) ? 20 : 500));
    }
  }
}

std::exception_ptr DeviceWork::exception() const {
  is_completed();
  return WorkState::exception();
}

void DeviceWork::on_completion(std::function<void()> callback) {
  const bool complete = is_completed();
  WorkState::on_completion(std::move(callback));
  if (!complete) core_->context().watchdog().hurry();
}

double DeviceWork::seconds() const {
  if (!is_completed() || WorkState::exception()) return -1.0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!launched_.start || launched_.captured) return -1.0;
  return core_->gpu().seconds_between(launched_.start->handle(), launched_.done->handle());
}

}  // namespace axo

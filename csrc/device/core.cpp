#include "device/core.h"

#include <thread>

#include "base/deadline.h"

namespace axo {

void DeviceCore::check_usable() const {
  if (!failed() && !closed_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) throw Aborted("communicator '" + member_.name + "' has been shut down");
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& e) {
    throw Aborted("communicator '" + member_.name + "' is aborted: " + e.what());
  }
}

std::exception_ptr DeviceCore::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

std::exception_ptr DeviceCore::error_from(int result, const char* function) const {
  const std::string text = "communicator '" + member_.name + "': " + nccl().error_text(function, result, comm_);
  switch (result) {
    case kNcclRemoteError:
      return std::make_exception_ptr(PeerLost(text, -1));
    case kNcclTimeout:
      return std::make_exception_ptr(Timeout(text));
    default:
      return std::make_exception_ptr(Error(text));
  }
}

std::exception_ptr DeviceCore::peer_lost(const std::string& where, int peer) const {
  return std::make_exception_ptr(PeerLost(where + ": " + peers_->title(peer) + " died", peer));
}

void DeviceCore::settle(int result, const char* function, Clock::time_point deadline) {
  // A call that is in progress is connecting to peers, which may never come: it must stay interruptible.
  for (int polls = 0; result == kNcclInProgress; ++polls) {
    if (failed()) check_usable();
    if (!started_ && options_.cancelled && options_.cancelled->load()) {
      throw Aborted("communicator '" + member_.name + "' was aborted while its ranks met");
    }
    // Not in the first tenth of a second, and then eight times a second.
    const int peer = peers_ && polls > 1000 && polls % 128 == 0 ? peers_->lost() : -1;
    if (peer >= 0) std::rethrow_exception(peer_lost(std::string(function) + " on '" + member_.name + "'", peer));
    if (Clock::now() >= deadline) {
      throw Timeout("communicator " + member_.words() + ": " + function +
                    " could not be launched in time: a peer has not come");
    }
    if (polls < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(polls < 1000 ? 20 : 1000));
    }
    const int query = nccl()->CommGetAsyncError(comm_, &result);
    if (query != kNcclSuccess) result = query;
  }
  if (result != kNcclSuccess) std::rethrow_exception(error_from(result, function));
}

void DeviceCore::order(GpuStream stream, GpuStream caller, bool after_caller, const Capture& capture) {
  const Capture own = stream == caller ? capture : gpu().capture_info(stream);
  if (own.active() && own != capture) {
    throw Error("communicator '" + member_.name +
                "' is part of a graph that is being captured; use it on the capturing stream only, "
                "until the capture ends");
  }
  // In a capture the communicator's stream must join, or the operation would run now instead of in the graph.
  const bool join = stream != caller && (after_caller || (capture.active() && !own.active()));
  if (join) {
    const EventPtr event = context_->events().take(false);
    if (capture.active()) event->set_captured();
    gpu().record(event->handle(), caller);
    gpu().wait(stream, event->handle());
  }
  // An event from outside a graph has no meaning inside it, and the other way round.
  if (last_event_ && last_stream_ != stream && last_capture_ == capture) gpu().wait(stream, last_event_->handle());
}

void DeviceCore::launched(const DeviceWorkPtr& work, EventPtr start, EventPtr done, const Capture& capture) {
  last_stream_ = work->stream;
  last_event_ = done;
  last_capture_ = capture;
  work->launched(std::move(start), std::move(done), capture.active());
  if (capture.active()) return;
  std::exception_ptr error;
  bool many = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = error_;
    pending_.push_back(work);
    many = pending_.size() % 256 == 0;
  }
  if (many) context_->watchdog().wake();  // events and tensors come back sooner
  if (error) work->finish(error);
}

void DeviceCore::fail(std::exception_ptr error) {
  std::deque<DeviceWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ || closed_) return;
    error_ = error;
    failed_.store(true, std::memory_order_release);
    works = pending_;  // kept until the library has aborted: the device may still use their tensors
  }
  for (const auto& work : works) work->finish(error);
  context_->watchdog().wake();
}

void DeviceCore::drop_finished() {
  while (true) {
    DeviceWorkPtr first;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (pending_.empty()) return;
      first = pending_.front();
    }
    if (!first->is_completed() || failed()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_.empty() && pending_.front() == first) pending_.pop_front();
  }
}

void DeviceCore::shutdown() {
  std::deque<DeviceWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    works = pending_;
  }
  for (const auto& work : works) {
    try {
      const auto left = std::chrono::duration_cast<Milliseconds>(work->deadline() - Clock::now());
      work->synchronize(std::max(left, Milliseconds(0)));
    } catch (...) {  // the work keeps its error for whoever waits for it
      fail(std::current_exception());
    }
  }
  const auto turn = context_->queue().turn();
  DeviceGuard guard(gpu(), context_->device());
  if (!failed()) {
    peers_->leave();
    try {
      drop_registrations();
      settle(nccl()->CommFinalize(comm_), "ncclCommFinalize", deadline_after(options_.timeout));
      nccl().check(nccl()->CommDestroy(comm_), "ncclCommDestroy");
      comm_ = nullptr;
    } catch (...) {
      fail(std::current_exception());
    }
  }
  abort_library();
  close();
}

void DeviceCore::close() {
  std::deque<DeviceWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    works.swap(pending_);
  }
  if (started_) context_->reserve_ctas(-options_.max_ctas);
  last_event_.reset();
  gpu().release(scratch_);
  if (owns_stream_) gpu().destroy_stream(stream_);
}

// Within a turn, or when nobody else has the communicator any more.
void DeviceCore::abort_library() {
  const NcclComm comm = comm_.exchange(nullptr);
  if (!comm) return;
  {
    // The library frees what was registered with the communicator.
    std::lock_guard<std::mutex> lock(mutex_);
    registrations_.clear();
    windows_.clear();
  }
  nccl()->CommAbort(comm);
}

DeviceCore::~DeviceCore() {
  // Nobody can wait for peers here: a communicator that is dropped without shutdown is aborted, on this rank only.
  try {
    DeviceGuard guard(gpu(), context_->device());
    abort_library();
    close();
  } catch (...) {  // the runtime is going away with the process
  }
}

}  // namespace axo

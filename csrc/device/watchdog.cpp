#include "device/watchdog.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>

#include "base/flight_recorder.h"
#include "device/core.h"

namespace axo {
namespace {

thread_local bool watches = false;

// Threads that are made within its life block all signals: they belong to the program's own threads.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

 private:
  sigset_t old_;
};

}  // namespace

Watchdog::Watchdog(std::shared_ptr<const GpuRuntime> gpu, int device) : state_(std::make_shared<State>()) {
  state_->gpu = std::move(gpu);
  state_->device = device;
}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Watchdog::watch(const std::shared_ptr<DeviceCore>& core) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->cores.push_back(core);
  if (thread_.joinable()) return;
  const NoSignals quiet;
  thread_ = std::thread(run, state_);
}

void Watchdog::elsewhere(const std::function<void()>& task) {
  if (try_elsewhere(task)) return;
  try {  // no thread to be had: better late than never
    task();
  } catch (...) {  // the runtime is going away with the process
  }
}

bool Watchdog::try_elsewhere(const std::function<void()>& task) {
  const auto start = [](void* given) -> void* {
    const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(given));
    try {
      (*own)();
    } catch (...) {  // the runtime is going away with the process
    }
    return nullptr;
  };
  auto own = std::make_unique<std::function<void()>>(task);
  pthread_attr_t detached;  // from its beginning: ThreadSanitizer takes one that is let go at its end for a race
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread = {};
  const NoSignals quiet;
  const bool made = pthread_create(&thread, &detached, start, own.get()) == 0;
  pthread_attr_destroy(&detached);
  if (made) (void)own.release();  // it is the thread's
  return made;
}

std::vector<std::shared_ptr<DeviceCore>> Watchdog::living(State& state) {
  std::lock_guard<std::mutex> lock(state.mutex);
  std::vector<std::shared_ptr<DeviceCore>> alive;
  for (auto& weak : state.cores) {
    if (auto core = weak.lock()) alive.push_back(std::move(core));
  }
  state.cores.erase(std::remove_if(state.cores.begin(), state.cores.end(), [](auto& weak) { return weak.expired(); }),
                    state.cores.end());
  return alive;
}

bool Watchdog::is_this_thread() { return watches; }

std::vector<std::shared_ptr<DeviceCore>> Watchdog::cores() const { return living(*state_); }

void Watchdog::wake() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->look_now = true;
  }
  state_->changed.notify_all();
}

void Watchdog::hurry() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->look_often) return;
    state_->look_often = true;
  }
  state_->changed.notify_all();
}

void Watchdog::keep(EventPtr event, std::shared_ptr<void> object) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->kept.emplace_back(std::move(event), std::move(object));
}

void Watchdog::drop_kept(State& state) {
  decltype(state.kept) kept, done;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    kept.swap(state.kept);
  }
  for (auto it = kept.begin(); it != kept.end();) {
    bool complete = true;
    try {
      complete = state.gpu->is_complete(it->first->handle());
    } catch (const Error&) {  // a device that is broken: nothing reads there any more
    }
    if (complete) done.push_back(std::move(*it));
    it = complete ? kept.erase(it) : it + 1;
  }
  std::lock_guard<std::mutex> lock(state.mutex);
  state.kept.insert(state.kept.end(), kept.begin(), kept.end());
}

void Watchdog::run(const std::shared_ptr<State>& state) {
  watches = true;
  // Without this, asking an event would break a capture that another thread has begun.
  try {
    state->gpu->set_device(state->device);
    state->gpu->relax_capture_rules();
  } catch (const Error&) {  // a runtime that is shutting down; nothing below depends on it
  }
  while (true) {
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->look_often = false;
    }
    bool often = false;
    for (const auto& core : living(*state)) {
      try {
        often |= core->look();
      } catch (...) {
        core->fail(std::current_exception());
      }
    }
    drop_kept(*state);
    FlightLog::poll();  // a signal asked for a file: a process of GPUs alone has no progress thread to see that
    std::unique_lock<std::mutex> lock(state->mutex);
    const auto nap = std::chrono::milliseconds(often ? 1 : 100);
    state->changed.wait_for(lock, nap, [&] { return state->stop || state->look_now || state->look_often; });
    state->look_now = false;
    if (state->stop) return;
  }
}

}  // namespace axo

#include "torch/future_thread.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace axo {
namespace {

std::atomic<FutureThread*> current{nullptr};  // never destroyed: the thread may outlive static destruction
thread_local bool is_here = false;

}  // namespace

FutureThread& FutureThread::get() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)registered;
  static std::mutex making;
  std::lock_guard<std::mutex> lock(making);
  if (current.load() == nullptr) current.store(new FutureThread);
  return *current.load();
}

FutureThread::FutureThread() {
  std::thread([this] { run(); }).detach();
}

bool FutureThread::here() { return is_here; }

void FutureThread::post(std::function<void()> job) {
  FutureThread& self = get();
  {
    std::lock_guard<std::mutex> lock(self.mutex_);
    self.jobs_.push_back(std::move(job));
  }
  self.changed_.notify_all();
}

void FutureThread::stop() {
  FutureThread* self = current.load();
  if (self == nullptr) return;
  std::unique_lock<std::mutex> lock(self->mutex_);
  self->stopping_ = true;
  self->changed_.notify_all();
  self->changed_.wait_for(lock, std::chrono::seconds(5), [self] { return self->stopped_; });
}

void FutureThread::run() {
  is_here = true;
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) break;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace axo

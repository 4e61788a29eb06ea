#include "device/event_pool.h"

namespace axo {

EventPool::~EventPool() {
  for (GpuEvent event : plain_) gpu_->destroy_event(event);
  for (GpuEvent event : timing_) gpu_->destroy_event(event);
}

EventPool::Event::~Event() {
  if (captured_) {
    pool_->gpu_->destroy_event(handle_);
    return;
  }
  std::lock_guard<std::mutex> lock(pool_->mutex_);
  (timing_ ? pool_->timing_ : pool_->plain_).push_back(handle_);
}

EventPtr EventPool::take(bool timing) {
  GpuEvent handle = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = timing ? timing_ : plain_;
    if (!idle.empty()) {
      handle = idle.back();
      idle.pop_back();
    }
  }
  if (!handle) handle = gpu_->create_event(timing);
  return std::make_shared<Event>(shared_from_this(), handle, timing);
}

std::size_t EventPool::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plain_.size() + timing_.size();
}

}  // namespace axo

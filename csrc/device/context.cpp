#include "device/context.h"

#include <cstdint>
#include <iterator>
#include <map>

#include "base/error.h"
#include "device/core.h"
#include "device/work.h"

namespace axo {

std::shared_ptr<DeviceContext> DeviceContext::of(int device) {
  // Part of the process's table of opened libraries: a device has one launch order, whoever makes communicators for it.
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<DeviceContext>> contexts;
  static std::shared_ptr<const GpuRuntime> gpu;
  static std::shared_ptr<const NcclApi> nccl;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto context = contexts[device].lock()) return context;
  if (!gpu) gpu = GpuRuntime::open();
  if (!nccl) nccl = NcclApi::open(gpu->vendor());
  auto context = create(gpu, nccl, device);
  contexts[device] = context;
  return context;
}

std::shared_ptr<DeviceContext> DeviceContext::create(std::shared_ptr<const GpuRuntime> gpu,
                                                     std::shared_ptr<const NcclApi> nccl, int device) {
  const int count = gpu->device_count();
  AXO_CHECK(device >= 0 && device < count, "device", device,
            "below " + std::to_string(count) + ", the GPUs of this process");
  return std::shared_ptr<DeviceContext>(new DeviceContext(std::move(gpu), std::move(nccl), device));
}

DeviceContext::DeviceContext(std::shared_ptr<const GpuRuntime> gpu, std::shared_ptr<const NcclApi> nccl, int device)
    : gpu_(std::move(gpu)),
      nccl_(std::move(nccl)),
      device_(device),
      events_(std::make_shared<EventPool>(gpu_)),
      watchdog_(std::make_unique<Watchdog>(gpu_, device)) {}

DeviceContext::~DeviceContext() {
  watchdog_.reset();
  try {  // what was dropped during a capture; the memory stays where one is still under way
    if (!dropped_.empty()) {
      DeviceGuard guard(*gpu_, device_);
      if (gpu_->synchronize_device()) {
        for (const auto& release : dropped_) release();
      }
    }
  } catch (...) {  // the runtime is going away with the process
  }
  last_shared_launch_ = {};
  gpu_->destroy_stream(shared_stream_);
  gpu_->release(zero_word_);
}

void DeviceContext::launch(const std::vector<WorkStatePtr>& works) {
  std::vector<DeviceWorkPtr> own;
  for (const auto& work : works) own.push_back(std::static_pointer_cast<DeviceWork>(work));
  try {
    queue_.issue(own);
  } catch (...) {  // every work has ended with it
  }
}

GpuStream DeviceContext::shared_stream(bool high_priority) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!shared_stream_) {
    DeviceGuard guard(*gpu_, device_);
    shared_stream_ = gpu_->create_stream(high_priority);
  }
  return shared_stream_;
}

void DeviceContext::release_when_idle(const std::shared_ptr<DeviceContext>& context, std::function<void()> release) {
  try {
    {
      std::lock_guard<std::mutex> lock(context->mutex_);
      context->dropped_.push_back(std::move(release));
    }
    if (Watchdog::is_this_thread() || context->queue_.is_my_turn()) {
      Watchdog::try_elsewhere([context] {  // without a thread it goes with the next: nobody can wait here
        context->gpu_->set_device(context->device_);
        context->release_dropped();
      });
    } else {
      context->release_dropped();
    }
  } catch (...) {  // the runtime is going away with the process
  }
}

void DeviceContext::release_dropped() {
  std::lock_guard<std::mutex> one(releasing_);
  std::vector<std::function<void()>> dropped;
  {
    const auto cores = watchdog_->cores();  // perhaps the last references, which must not go within the turn
    const auto turn = queue_.turn();
    for (const auto& core : cores) {
      if (core->captures()) return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(dropped_);
  }
  if (dropped.empty()) return;
  DeviceGuard guard(*gpu_, device_);
  if (!gpu_->synchronize_device()) {  // a capture that no communicator is part of
    std::lock_guard<std::mutex> lock(mutex_);
    dropped_.insert(dropped_.begin(), std::make_move_iterator(dropped.begin()), std::make_move_iterator(dropped.end()));
    return;
  }
  for (const auto& release : dropped) release();
}

void* DeviceContext::zero_word(GpuStream stream) {
  if (!zero_word_) {
    zero_word_ = gpu_->allocate(sizeof(std::uint32_t));
    gpu_->set_bytes(zero_word_, 0, sizeof(std::uint32_t), stream);
    gpu_->synchronize(stream);  // other communicators use it on other streams
  }
  return zero_word_;
}

}  // namespace axo

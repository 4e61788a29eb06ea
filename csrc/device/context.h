// What the communicators of one rank on one device share: the opened libraries, events, the launch queue, the watchdog.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/group.h"
#include "device/event_pool.h"
#include "device/launch_queue.h"
#include "device/nccl_api.h"
#include "device/watchdog.h"

namespace axo {

class DeviceCore;

// The end of the last launch, for what must come after it. Touched within a turn only.
struct LastLaunch {
  GpuStream stream = nullptr;
  EventPtr event;
  Capture capture;
};

class DeviceContext : public GroupLauncher {
 public:
  // The context that this process has for `device`; made at the first call, gone with its last communicator.
  static std::shared_ptr<DeviceContext> of(int device);
  // One of its own.
  static std::shared_ptr<DeviceContext> create(std::shared_ptr<const GpuRuntime> gpu,
                                               std::shared_ptr<const NcclApi> nccl, int device);
  ~DeviceContext() override;
  void launch(const std::vector<WorkStatePtr>& works) override;  // of a group

  const GpuRuntime& gpu() const { return *gpu_; }
  const NcclApi& nccl() const { return *nccl_; }
  int device() const { return device_; }
  EventPool& events() { return *events_; }
  LaunchQueue& queue() { return queue_; }
  Watchdog& watchdog() { return *watchdog_; }
  // The one stream of all communicators where they share it.
  GpuStream shared_stream(bool high_priority);
  // A word of zero on the device, for barriers; made on `stream` at the first call, within a turn. Freed with the
  // context alone: the runtime waits for the device there, on which a kernel of another communicator may be stuck.
  void* zero_word(GpuStream stream);
  // Of those communicators, whatever stream each operation was on: one order for all that share.
  LastLaunch& last_shared_launch() { return last_shared_launch_; }
  // Calls `release` when what the device holds now is done: kernels may name the memory that it frees or unmaps. From
  // any thread: one that must not wait leaves it to another. While the device captures, or where no thread can be made,
  // nobody can wait for it: it is called at the next such release then, when a communicator is shut down, or at the
  // context's end. So it must hold neither the context nor a communicator. Not by the clock: a wait for the device
  // spoils whatever captures just then.
  static void release_when_idle(const std::shared_ptr<DeviceContext>& context, std::function<void()> release);
  void release_dropped();
  void reserve_ctas(int ctas) { reserved_ctas_ += ctas; }
  int reserved_ctas() const { return reserved_ctas_; }

 private:
  DeviceContext(std::shared_ptr<const GpuRuntime> gpu, std::shared_ptr<const NcclApi> nccl, int device);

  std::shared_ptr<const GpuRuntime> gpu_;
  std::shared_ptr<const NcclApi> nccl_;
  int device_;
  std::shared_ptr<EventPool> events_;
  LaunchQueue queue_;
  std::unique_ptr<Watchdog> watchdog_;
  std::mutex mutex_;
  GpuStream shared_stream_ = nullptr;
  void* zero_word_ = nullptr;
  std::mutex releasing_;  // one after the other, in order; the launch queue's turn is within
  std::vector<std::function<void()>> dropped_;
  LastLaunch last_shared_launch_;
  std::atomic<int> reserved_ctas_{0};
};

}  // namespace axo

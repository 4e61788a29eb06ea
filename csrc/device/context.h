// What the communicators of one rank on one device share: the opened libraries, events, the launch queue, the watchdog.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/group.h"
#include "device/gpu_runtime.h"
#include "device/launch_queue.h"
#include "device/nccl_api.h"
#include "device/watchdog.h"

namespace axo {

class DeviceCore;

// Events for reuse: creating one costs more than recording it. Safe from any thread.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<const GpuRuntime> gpu) : gpu_(std::move(gpu)) {}
  ~EventPool();

  // An event on loan; it goes back with the last reference. A waiting stream needs no reference: it has taken the
  // state.
  class Event {
   public:
    Event(std::shared_ptr<EventPool> pool, GpuEvent handle, bool timing)
        : pool_(std::move(pool)), handle_(handle), timing_(timing) {}
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    GpuEvent handle() const { return handle_; }
    // Recorded into a graph: it is destroyed instead of reused.
    void set_captured() { captured_ = true; }

   private:
    std::shared_ptr<EventPool> pool_;
    GpuEvent handle_;
    bool timing_;
    bool captured_ = false;
  };
  std::shared_ptr<Event> take(bool timing);
  std::size_t idle() const;

 private:
  std::shared_ptr<const GpuRuntime> gpu_;
  mutable std::mutex mutex_;
  std::vector<GpuEvent> plain_, timing_;
};
using EventPtr = std::shared_ptr<EventPool::Event>;

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
  std::atomic<int> reserved_ctas_{0};
};

}  // namespace axo

// Events for reuse. Creating one costs more than recording it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/gpu_runtime.h"

namespace axo {

// Safe from any thread.
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

}  // namespace axo

// The thread that looks after the communicators of a device: it sees operations complete, libraries report errors,
// timeouts pass and aborts arrive from other ranks. One a context, started with its first communicator.
//
// It wakes ten times a second, and a thousand times while somebody waits for a callback. It holds communicators weakly.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/event_pool.h"

namespace axo {

class DeviceCore;

class Watchdog {
 public:
  Watchdog(std::shared_ptr<const GpuRuntime> gpu, int device);
  ~Watchdog();  // ends the thread

  void watch(const std::shared_ptr<DeviceCore>& core);
  // The communicators alive now.
  std::vector<std::shared_ptr<DeviceCore>> cores() const;
  // Whether this is the thread of one: it must not wait for a device.
  static bool is_this_thread();
  // Runs `task` on a thread of its own, which nobody joins, or here where none can be made; what it throws is lost.
  static void elsewhere(const std::function<void()>& task);
  // The same, but where no thread can be made `task` is not run, and the answer is false.
  static bool try_elsewhere(const std::function<void()>& task);
  // Look at once: something failed.
  void wake();
  // Look often until no callback is open.
  void hurry();
  // Holds `object` until the event has come.
  void keep(EventPtr event, std::shared_ptr<void> object);

 private:
  // Outlives the watchdog when its own thread is the one that drops the last communicator.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::weak_ptr<DeviceCore>> cores;
    std::vector<std::pair<EventPtr, std::shared_ptr<void>>> kept;
    bool stop = false;
    bool look_now = false;
    bool look_often = false;
    std::shared_ptr<const GpuRuntime> gpu;
    int device = 0;
  };
  static void run(const std::shared_ptr<State>& state);
  static std::vector<std::shared_ptr<DeviceCore>> living(State& state);
  static void drop_kept(State& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace axo

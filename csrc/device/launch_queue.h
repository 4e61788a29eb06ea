// The one ordered queue from which all communicators of a rank on a device launch.
//
// NCCL needs one consistent launch order of overlapping communicators on all ranks, or all kernels resident together,
// and does not allow two threads to launch on one device at a time. So every launch takes its turn here: the order of
// the turns is the launch order, and a group is one turn. A turn first compares every operation with the peers', if
// AXO_CHECK=1 asks for it (device/order_check.h). Then it lets the operation's stream wait for the caller's stream and
// for the communicator's last operation, calls the library (in one group when there are several calls), and records the
// event that the works wait for.
// It does not reorder, and it does not wait for operations to complete. The library's calls may wait: for peers to
// connect at the first operation of a kind, and for space on a device that is far behind. The watchdog looks after
// such waits.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace axo {

class DeviceWork;
using DeviceWorkPtr = std::shared_ptr<DeviceWork>;

class LaunchQueue {
 public:
  // Launches `works` (communicators of one context) as one. Works of a communicator that has failed before end with
  // that error and the others go ahead. Throws when nothing was launched, after every work has ended with the error.
  void issue(const std::vector<DeviceWorkPtr>& works);

  class Mutex {  // that knows who has it
   public:
    void lock() {
      mutex_.lock();
      owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    bool try_lock() {
      if (!mutex_.try_lock()) return false;
      owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      return true;
    }
    void unlock() {
      owner_.store(std::thread::id(), std::memory_order_relaxed);
      mutex_.unlock();
    }
    bool is_mine() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

   private:
    std::mutex mutex_;
    std::atomic<std::thread::id> owner_{};
  };
  // A turn for anything else that calls the library: init, split, registration, flags, abort.
  std::unique_lock<Mutex> turn() { return std::unique_lock<Mutex>(mutex_); }
  std::unique_lock<Mutex> try_turn() { return std::unique_lock<Mutex>(mutex_, std::try_to_lock); }
  bool is_my_turn() const { return mutex_.is_mine(); }

 private:
  Mutex mutex_;
};

}  // namespace axo

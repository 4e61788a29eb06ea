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

#include <memory>
#include <mutex>
#include <vector>

namespace axo {

class DeviceWork;
using DeviceWorkPtr = std::shared_ptr<DeviceWork>;

class LaunchQueue {
 public:
  // Launches `works` (communicators of one context) as one. Works of a communicator that has failed before end with
  // that error and the others go ahead. Throws when nothing was launched, after every work has ended with the error.
  void issue(const std::vector<DeviceWorkPtr>& works);

  // A turn for anything else that calls the library: init, split, registration, flags, abort.
  std::unique_lock<std::mutex> turn() { return std::unique_lock<std::mutex>(mutex_); }
  std::unique_lock<std::mutex> try_turn() { return std::unique_lock<std::mutex>(mutex_, std::try_to_lock); }

 private:
  std::mutex mutex_;
};

}  // namespace axo

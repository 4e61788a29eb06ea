// The one ordered queue from which all communicators of a rank on a device launch.
//
// NCCL needs one consistent launch order of overlapping communicators on all ranks, or all kernels resident together,
// and does not allow two threads to launch on one device at a time. So every launch takes its turn here: the order of
// the turns is the launch order, and a group is one turn. Within a turn:
//   1. AXO_CHECK=1: compare every operation with the peers' (device/order_check.h);
//   2. event edges: the operation's stream after the caller's stream, and after the communicator's last operation;
//   3. the library's calls, in one group when there are several;
//   4. record the event that the works wait for.
// It does not reorder, and it does not wait for operations to complete. The library may wait, in 3: to connect to peers
// at the first operation of a kind, and for room on a device that is far behind. The watchdog looks after that.
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

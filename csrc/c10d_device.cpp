// C10dBackend's communicators: of the host, of the GPU, and of pairs of ranks. See c10d_backend.h.
#include "c10d_launch.h"

namespace axo {

std::shared_ptr<DeviceCommunicator> C10dBackend::connect(const std::string& key, int rank, int size,
                                                         at::Device device) {
  TORCH_CHECK(store_, "axo: this group has no store, over which the ranks of ", device, " could meet");
  DeviceOptions options;
  options.name = key.substr(4);  // without "axo/"
  options.timeout = options_->timeout;
  options.device = device.index();
  // A connection of its own: the watchdog asks while the program may be waiting for a key.
  return create_device_communicator(std::make_shared<C10dStore>(store_->clone()), key + "/device", rank, size, options);
}

Communicator& C10dBackend::communicator_of(at::Device device) {
  if (device.is_cpu()) return *communicator_;
  std::lock_guard<std::mutex> lock(device_mutex_);
  if (!device_communicator_) {
    device_communicator_ = connect(key_, getRank(), getSize(), device);
    device_ = device;
  }
  TORCH_CHECK_VALUE(device == device_, "axo: a tensor on ", device, " in a group of ", device_,
                    "; a process uses one GPU in a group");
  return *device_communicator_;
}

Communicator& C10dBackend::communicator_with(at::Device device, int& peer) {
  // Several transfers at once may go round in a ring, where pairs would wait for each other: all ranks meet then.
  if (device.is_cpu() || device_communicator_ || coalesced_) return communicator_of(device);
  TORCH_CHECK_VALUE(peer >= 0 && peer < getSize() && peer != getRank(), "axo: rank ", peer,
                    " is not another rank of this group of ", getSize());
  std::lock_guard<std::mutex> lock(device_mutex_);
  const int low = std::min(peer, getRank()), high = std::max(peer, getRank());
  auto& pair = pairs_[peer];
  if (!pair) {
    const std::string key = key_ + "/pair" + std::to_string(low) + "-" + std::to_string(high);
    pair = connect(key, getRank() == low ? 0 : 1, 2, device);
  }
  peer = peer == low ? 0 : 1;
  return *pair;
}

void C10dBackend::abort() {
  const std::string reason = "aborted through torch.distributed";
  communicator_->abort(reason);
  if (device_communicator_) device_communicator_->abort(reason);
  for (const auto& [peer, pair] : pairs_) pair->abort(reason);
}

void C10dBackend::shutdown() {
  for (const auto& [peer, pair] : pairs_) pair->shutdown();
  if (device_communicator_) device_communicator_->shutdown();
  communicator_->shutdown();
}

}  // namespace axo

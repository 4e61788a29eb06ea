// How the ranks of a device communicator come together: each introduces itself in the store, rank 0 compares libraries
// and GPUs and answers. Every rank learns the library's unique id, or the same error.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "device/communicator.h"
#include "device/context.h"
#include "device/peers.h"

namespace axo {

// Of a new communicator. Waits for a turn.
NcclUniqueId new_id(DeviceContext& context);

// This host as the library tells hosts apart.
std::string host_of_library();

struct Rendezvous {
  Store& store;
  const std::string& key;
  const DeviceOptions& options;
  int rank, size;
  DevicePeers& peers;

  // Throws Error, Timeout, PeerLost or Aborted.
  NcclUniqueId meet(DeviceContext& context) const;

 private:
  std::string await(const std::string& part, Clock::time_point deadline) const;
  std::vector<std::string> introductions() const;
  std::string answer(DeviceContext& context) const;
  static std::string told(const std::function<std::string()>& wait);
};

}  // namespace axo

// Which ranks of a device communicator are no more, as far as this host can see.
//
// The vendors' libraries say that a peer is lost late or never, and not which. So every rank leaves its process in the
// store, and once an operation has waited for a moment the watchdog looks at the processes of its own host. A rank of
// another host, or of another namespace of process ids, can only be missed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host_meeting.h"
#include "store.h"

namespace axo {

class DevicePeers {
 public:
  // Writes this process into the store, where there is one.
  DevicePeers(std::shared_ptr<Store> store, std::string key, int rank, int size);
  // A rank whose process has gone without shutdown(), or -1. Never waits; a store that is gone tells nothing. From any
  // thread.
  int lost();
  // "rank 2 (process 4711)"
  std::string title(int rank);
  // This rank leaves in peace.
  void leave();

 private:
  struct Peer {
    bool known = false, left = false;
    int pid = 0;
    host::Caller process;
  };
  std::string place(int rank) const;
  void learn(int rank);

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int rank_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
};

}  // namespace axo

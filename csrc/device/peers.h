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

#include "base/store.h"
#include "progress/process_life.h"

namespace axo {

class DevicePeers {
 public:
  // Writes this process into the store, where there is one.
  DevicePeers(std::shared_ptr<Store> store, std::string key, int rank, int size);
  ~DevicePeers();
  DevicePeers(const DevicePeers&) = delete;
  DevicePeers& operator=(const DevicePeers&) = delete;
  // A rank whose process has gone without leave(), or -1. Asks the store for ranks that it does not know yet, each for
  // a moment; a store that is gone tells nothing. From any thread.
  int lost();
  // "rank 2 (process 4711)"
  std::string title(int rank);
  // This rank leaves in peace.
  void leave();
  // So does this process, with all that is alive here: at the end of a program that shuts nothing down.
  static void leave_all();

 private:
  struct Peer {
    bool known = false, here = false, left = false;
    int pid = 0;
    RankThread process;
  };
  std::string place(int rank) const;
  bool learn(int rank);
  int lost_towards(int step);

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int rank_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
};

}  // namespace axo

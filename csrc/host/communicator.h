// The communicator of the ranks of one host, over anonymous shared memory (memfd, sealed, passed over abstract unix
// sockets with a credential check). Ranks are processes, or threads of one process.
//
// It does not cross hosts: create() throws Error when the ranks' hostname, boot id or network namespace differ.
#pragma once

#include <memory>
#include <string>

#include "base/communicator.h"
#include "base/store.h"

namespace axo {

struct HostOptions {
  std::string name = "world";
  Milliseconds timeout{600000};  // of operations; also of the rendezvous
};

// Collective over `size` ranks that share `store`. `key` must be equal on all ranks and unused in this store before.
std::shared_ptr<Communicator> create_host_communicator(Store& store, const std::string& key, int rank, int size,
                                                       const HostOptions& options);

}  // namespace axo

// The communicator of the ranks of one host, over anonymous shared memory (memfd, sealed, passed over abstract unix
// sockets with a credential check). Ranks are processes, or threads of one process.
//
// It does not cross hosts: whoever makes it has compared the ranks' (base/identity.h).
#pragma once

#include <memory>
#include <string>

#include "base/communicator.h"
#include "host/rendezvous.h"

namespace axo {

struct HostOptions {
  std::string name = "world";
  Milliseconds timeout{600000};  // of operations; also of the rendezvous
};

// Collective over `size` ranks of one host, which have told each other where they listen. `own`: this rank's leader;
// `address`: that of rank 0's. A single rank needs neither. `watch` is called now and then while this rank waits, and
// throws Failure when it knows of a rank that will not come.
std::shared_ptr<Communicator> create_host_communicator(const std::shared_ptr<host::Leader>& own,
                                                       const std::string& address, int rank, int size,
                                                       const HostOptions& options, const host::Watch& watch = {});

}  // namespace axo

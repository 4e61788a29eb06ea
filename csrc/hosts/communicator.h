// The communicator of CPU ranks on several hosts: shared memory inside each host, a wire between them.
//
// The contract is that of base/communicator.h. Ranks are on one host when their hostname, boot id, network namespace
// and user are equal (base/identity.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/communicator.h"
#include "hosts/wire.h"

namespace axo {

// Collective over the ranks of `wire`. `hosts`: the identity of each rank's host. `key`: equal on all ranks, and of no
// other communicator of theirs. `own`, `address` and `watch` as for create_host_communicator, of the ranks of this
// rank's host.
std::shared_ptr<Communicator> create_hosts_communicator(const std::shared_ptr<host::Leader>& own,
                                                        const std::string& address, std::unique_ptr<Wire> wire,
                                                        const std::string& key, const std::vector<std::string>& hosts,
                                                        const HostOptions& options, const host::Watch& watch = {});

}  // namespace axo

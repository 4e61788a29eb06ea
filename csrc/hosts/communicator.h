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

// Collective over the ranks of `wire`. `hosts`: the identity of each rank's host. `key` as for
// create_host_communicator.
std::shared_ptr<Communicator> create_hosts_communicator(Store& store, const std::string& key,
                                                        std::unique_ptr<Wire> wire,
                                                        const std::vector<std::string>& hosts,
                                                        const HostOptions& options);

}  // namespace axo

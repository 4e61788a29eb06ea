// Which host a process is on.
#pragma once

#include <string>

namespace axo {

// What a host is called: AXO_HOST, or "hostN" by AXO_RANKS_PER_HOST, or its hostname.
std::string host_name();
// That name, boot id, network namespace and user: two ranks that differ in it are not on one host.
std::string host_identity();
std::string process_space();  // the namespace of process ids, never empty

}  // namespace axo

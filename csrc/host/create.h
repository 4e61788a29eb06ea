// Making the core of a host communicator.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "host/communicator.h"
#include "host/core.h"

namespace axo::host {

// As create_host_communicator.
std::shared_ptr<HostCore> create_core(const std::shared_ptr<Leader>& own, const std::string& address, int rank,
                                      int size, const HostOptions& options, const Watch& watch);

// The communicator over a core (host/communicator.cpp).
std::shared_ptr<Communicator> wrap_core(const std::shared_ptr<HostCore>& core);

// All-gathers equally long strings over the parent.
using GatherBytes = std::function<std::string(const std::string&)>;

// Of `members`, ranks of the parent in their new order. Every rank of the parent calls it; null where !takes_part.
std::shared_ptr<HostCore> split_core(HostCore& parent, const GatherBytes& gather, const std::vector<int>& members,
                                     bool takes_part, const std::string& name);

}  // namespace axo::host

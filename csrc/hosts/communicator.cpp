// Making and splitting communicators that span hosts, and issuing their operations; see hosts/communicator.h.
#include "hosts/communicator.h"

#include <algorithm>

#include "host/create.h"
#include "hosts/core.h"

namespace axo::hosts {

HostMap::HostMap(std::vector<int> wire_ranks, const std::vector<std::string>& host_of_rank)
    : wire(std::move(wire_ranks)) {
  for (std::size_t r = 0; r < wire.size(); ++r) {
    const auto known = std::find(names.begin(), names.end(), host_of_rank[r]);
    const auto h = static_cast<std::size_t>(known - names.begin());
    if (known == names.end()) {
      names.push_back(host_of_rank[r]);
      hosts.emplace_back();
    }
    host.push_back(static_cast<int>(h));
    local.push_back(static_cast<int>(hosts[h].size()));
    hosts[h].push_back(static_cast<int>(r));
  }
}

namespace {

// A number that every member computes alike and no other communicator of these ranks has.
std::uint64_t number_of(std::uint64_t parent, std::uint64_t split, int color) {
  std::uint64_t h = parent ^ 0x9e3779b97f4a7c15ull;
  for (std::uint64_t v : {split, static_cast<std::uint64_t>(color) + 1}) {
    h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
    h *= 0xbf58476d1ce4e5b9ull;
    h ^= h >> 31;
  }
  return std::max<std::uint64_t>(h, 1);
}

std::string transport_of(const HostMap& map) {
  const std::string hosts = std::to_string(map.hosts.size()) + " hosts over gloo";
  return map.hosts.size() == map.wire.size() ? hosts : "shared memory x " + hosts;
}

class HostsCommunicator final : public CpuCommunicator {
 public:
  explicit HostsCommunicator(Membership membership) : HostsCommunicator(HostsCore::create(std::move(membership))) {}

  const char* transport() const override { return transport_.c_str(); }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override;

 private:
  explicit HostsCommunicator(const std::shared_ptr<HostsCore>& core)
      : CpuCommunicator(core), transport_(transport_of(core->membership().map)), core_(core) {}

  std::shared_ptr<CpuWork> make_work(Request r, const CallOptions& options) override {
    if (r.kind == Kind::recv && r.root == kAnyPeer) {
      throw Error("recv on '" + name() + "': from any rank is for ranks of one host, and these are on " +
                  std::to_string(core_->membership().map.hosts.size()) + "; name the peer");
    }
    if (r.point_to_point() && r.root == rank() && !core_->membership().inner) {
      throw Error(std::string(name_of(r.kind)) + " on '" + name() + "': got this rank itself, expected another");
    }
    return std::make_shared<HostsWork>(core_, std::move(r), options);
  }

  const std::string transport_;
  const std::shared_ptr<HostsCore> core_;
  std::uint64_t splits_ = 0;
};

std::shared_ptr<Communicator> HostsCommunicator::split(int color, int key, const std::string& name) {
  const std::vector<int> members = split_members(color, key);
  const Membership& parent = core_->membership();
  const std::uint64_t number = number_of(parent.number, ++splits_, color);
  std::vector<int> wire;
  std::vector<std::string> hosts;
  int rank = 0;
  for (int p : members) {
    const auto i = static_cast<std::size_t>(p);
    if (p == core_->rank()) rank = static_cast<int>(wire.size());
    wire.push_back(parent.map.wire[i]);
    hosts.push_back(std::to_string(parent.map.host[i]));
  }
  HostMap map(wire, hosts);
  for (std::string& host : map.names) host = parent.map.names[std::stoul(host)];
  const bool one_host = color < 0 || map.hosts.size() == 1;
  std::shared_ptr<Communicator> inner, made;
  if (parent.inner) {
    const auto here = static_cast<std::size_t>(parent.map.host_of(core_->rank()));
    try {
      inner = parent.inner->split(color, key, one_host ? name : name + "@" + parent.map.names[here]);
    } catch (...) {  // perhaps since another rank has failed meanwhile, in what follows the split there
      core_->fail_split(std::current_exception());
    }
  }
  if (color >= 0 && one_host && inner) {
    made = std::move(inner);
  } else if (color >= 0) {
    if (inner && inner->size() == 1) {
      inner->shutdown();
      inner.reset();
    }
    made = std::make_shared<HostsCommunicator>(Membership{parent.mesh,
                                                          std::move(inner),
                                                          std::move(map),
                                                          {name, rank, static_cast<int>(wire.size())},
                                                          number,
                                                          core_->timeout()});
  }
  gather_bytes("");  // from here on its frames find it, at every rank
  return made;
}

}  // namespace
}  // namespace axo::hosts

namespace axo {

std::shared_ptr<Communicator> create_hosts_communicator(Store& store, const std::string& key,
                                                        std::unique_ptr<Wire> wire,
                                                        const std::vector<std::string>& hosts,
                                                        const std::vector<std::string>& names,
                                                        const HostOptions& options) {
  const int rank = wire->rank(), size = wire->size();
  AXO_CHECK(hosts.size() == static_cast<std::size_t>(size) && names.size() == hosts.size(), "hosts", hosts.size(),
            std::to_string(size) + " entries, one a rank");
  std::vector<int> all;
  for (int p = 0; p < size; ++p) all.push_back(p);
  hosts::HostMap map(all, hosts);
  for (std::size_t h = 0; h < map.hosts.size(); ++h) map.names[h] = names[static_cast<std::size_t>(map.hosts[h][0])];
  const auto host = static_cast<std::size_t>(map.host_of(rank));
  const int locals = static_cast<int>(map.hosts[host].size());
  HostOptions inside = options;
  inside.name = options.name + "@" + map.names[host];
  // The page of the host's first rank keeps the time of its link, so even a rank that is alone there makes a core.
  const auto core = host::create_core(store, key + "/host" + std::to_string(host), map.local_of(rank), locals, inside);
  hosts::LinkLimit limit(hosts::simulated_link(), core->processes()[0]);
  std::shared_ptr<Communicator> inner;
  if (locals > 1)
    inner = host::wrap_core(core);
  else
    core->release();
  return std::make_shared<hosts::HostsCommunicator>(
      hosts::Membership{std::make_shared<hosts::Mesh>(std::move(wire), std::move(limit)),
                        std::move(inner),
                        std::move(map),
                        {options.name, rank, size},
                        hosts::number_of(0, std::hash<std::string>{}(key), 0),
                        options.timeout});
}

}  // namespace axo

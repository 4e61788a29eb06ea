// Making and splitting communicators that span hosts, and issuing their operations; see hosts/communicator.h.
#include "hosts/communicator.h"

#include <algorithm>
#include <map>

#include "host/create.h"
#include "hosts/core.h"

namespace axo::hosts {

HostMap::HostMap(std::vector<Place> places_by_rank) : places(std::move(places_by_rank)) {
  std::map<std::string, std::size_t> numbers;
  for (const Place& place : places) {
    const std::size_t h = numbers.emplace(place.host, hosts.size()).first->second;
    if (h == hosts.size()) hosts.emplace_back();
    host.push_back(static_cast<int>(h));
    local.push_back(static_cast<int>(hosts[h].size()));
    hosts[h].push_back(static_cast<int>(host.size()) - 1);
  }
}

namespace {

std::string transport_of(const HostMap& map) {
  const std::string hosts = std::to_string(map.hosts.size()) + " hosts over tcp";
  return map.hosts.size() == map.places.size() ? hosts : "shared memory x " + hosts;
}

class HostsCommunicator final : public CpuCommunicator {
 public:
  explicit HostsCommunicator(const std::shared_ptr<HostsCore>& core)
      : CpuCommunicator(core), transport_(transport_of(core->membership().map)), core_(core) {}

  const char* transport() const override { return transport_.c_str(); }
  void until_heard(Milliseconds at_most) override { core_->until_heard(at_most); }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override;

 private:
  std::shared_ptr<CpuWork> make_work(Request r, const CallOptions& options) override {
    if (r.kind == Kind::recv && r.root == kAnyPeer) {
      throw Error("recv on '" + name() + "': from any rank is for ranks of one host, and these are on " +
                  std::to_string(core_->membership().map.hosts.size()) + "; name the peer");
    }
    if (r.point_to_point() && r.root == rank() && !core_->membership().inner) {
      throw Error(std::string(name_of(r.kind)) + " on '" + name() + "': got this rank itself, expected another");
    }
    return std::make_shared<CpuWork>(core_, std::move(r), options);
  }

  const std::string transport_;
  const std::shared_ptr<HostsCore> core_;
  std::uint64_t splits_ = 0;
};

std::shared_ptr<Communicator> HostsCommunicator::split(int color, int key, const std::string& name) {
  const std::vector<int> members = split_members(color, key);
  const Membership& parent = core_->membership();
  std::vector<Place> places;
  for (int p : members) places.push_back(parent.map.place(p));
  HostMap map(std::move(places));
  const int rank = static_cast<int>(std::find(members.begin(), members.end(), core_->rank()) - members.begin());
  const std::string path = parent.key + "/" + std::to_string(++splits_) + "/" + std::to_string(color);
  const bool one_host = color < 0 || map.hosts.size() == 1;
  std::shared_ptr<Communicator> made;
  if (parent.inner) {
    parent.inner->set_timeout(core_->timeout());
    try {
      made =
          parent.inner->split(color, key, one_host ? name : name + "@" + parent.map.place(core_->rank()).host_name());
    } catch (...) {  // perhaps since another rank has failed meanwhile, in what follows the split there
      core_->fail_split(std::current_exception());
    }
  }
  if (!one_host || (color >= 0 && !made)) {
    if (made && made->size() == 1) {
      made->shutdown();
      made.reset();
    }
    const Member member{name, rank, static_cast<int>(members.size())};
    made = std::make_shared<HostsCommunicator>(
        HostsCore::create({parent.mesh, std::move(made), std::move(map), member, path, core_->timeout()}));
  }
  gather_bytes("");  // from here on its frames find it, at every rank
  return made;
}

}  // namespace
}  // namespace axo::hosts

namespace axo {

std::shared_ptr<Communicator> create_hosts_communicator(const std::shared_ptr<host::Leader>& own,
                                                        const std::string& address, std::unique_ptr<Wire> wire,
                                                        const std::string& key, const std::vector<std::string>& hosts,
                                                        const HostOptions& options, const host::Watch& watch) {
  const int rank = wire->rank(), size = wire->size();
  AXO_CHECK(hosts.size() == static_cast<std::size_t>(size), "hosts", hosts.size(),
            std::to_string(size) + " entries, one a rank");
  std::vector<hosts::Place> places;
  for (std::size_t p = 0; p < hosts.size(); ++p) places.push_back({static_cast<int>(p), hosts[p]});
  hosts::HostMap map(std::move(places));
  const int host = map.host_of(rank), locals = static_cast<int>(map.ranks_on(host).size());
  const HostOptions inside{options.name + "@" + map.place(rank).host_name(), options.timeout};
  std::shared_ptr<Process> keeper = ProgressEngine::get().self();  // of the host's first rank: it has the link's time
  std::shared_ptr<Communicator> inner;
  if (locals > 1) {
    const auto core = host::create_core(own, address, map.local_of(rank), locals, inside, watch);
    keeper = core->processes()[0];
    inner = host::wrap_core(core);
  }
  const auto mesh = std::make_shared<hosts::Mesh>(std::move(wire), hosts::LinkLimit(std::move(keeper)));
  return std::make_shared<hosts::HostsCommunicator>(hosts::HostsCore::create(
      {mesh, std::move(inner), std::move(map), {options.name, rank, size}, key, options.timeout}));
}

}  // namespace axo

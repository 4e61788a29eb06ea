// Making host communicators: from an address that all have been told, and by splitting; see host/rendezvous.h for the
// sockets.
#include "host/create.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "host/rendezvous.h"

namespace axo::host {
namespace {

// The first operation of every communicator: when it is through, all ranks have mapped the segment. `watch` may throw
// to give up. What it sees may have come after the operation, as a rank that is through may end, and its store with it:
// so the operation gets time to end here, too.
std::shared_ptr<HostCore> start(Membership membership, const Watch& watch) {
  auto core = std::make_shared<HostCore>(std::move(membership));
  core->engine().add(core);
  Request request;
  request.kind = Kind::barrier;
  auto work = std::make_shared<HostWork>(core, request, CallOptions{});
  std::exception_ptr lost;
  try {
    core->submit(work, true);
    while (!work->is_completed()) {
      try {
        work->synchronize(Milliseconds(100));
      } catch (const Timeout&) {
        if (work->is_completed()) break;
        if (lost) std::rethrow_exception(lost);
        try {
          watch();
        } catch (const Failure&) {
          lost = std::current_exception();
        }
      }
    }
    try {
      work->wait();
    } catch (const Error&) {
      if (lost) std::rethrow_exception(lost);  // it says more
      throw;
    }
  } catch (...) {
    if (!work->is_completed()) core->abort({FailureKind::aborted, -1, "given up while its ranks met"});
    core->release();
    throw;
  }
  return core;
}

Membership membership_of(int rank, int size, const std::string& name, Milliseconds timeout) {
  Membership m;
  m.member = {name, rank, size};
  m.timeout = timeout;
  return m;
}

// Runs the leader's part; when it fails, tells the members that have connected before it throws.
template <class Body>
void lead(Leader& leader, const Meeting& meeting, Body&& body) {
  Failure refusal{FailureKind::aborted, -1, ""};
  std::exception_ptr own;
  try {
    return body();
  } catch (const Failure& r) {
    refusal = r;
  } catch (const ResourceError& e) {
    refusal.text = e.what();
    own = std::current_exception();
  } catch (const Error& e) {
    refusal.text = e.what();
  } catch (...) {  // an interrupt, or no memory: this rank's own affair
    refusal.text = meeting.what + ": rank 0 gave up";
    own = std::current_exception();
  }
  leader.refuse(refusal);
  if (own) std::rethrow_exception(own);
  meeting.raise(refusal);
}

// `look`, now and then: it may have to wait for a lock of the program's.
Watch now_and_then(Watch look) {
  return [look = std::move(look), asked = Clock::now()]() mutable {
    if (Clock::now() - asked < std::chrono::milliseconds(100)) return;
    asked = Clock::now();
    look();
  };
}

// How long a rank waits to hear why its leader has gone.
constexpr std::chrono::seconds kReason{1};

// Rank 0 leads, the others join it: gives `m` the segment, and with `pages` the processes.
void meet(Leader* leader, const Address& address, const Meeting& meeting, bool pages, const Watch& watch,
          const std::function<void()>& reason, Membership* m) {
  if (meeting.size == 1) {
    Fd fd;
    m->segment = make_segment(1, &fd);
    if (pages) m->processes = {ProgressEngine::get().self()};
    return;
  }
  if (meeting.rank == 0) {
    lead(*leader, meeting, [&] {
      Fd fd;
      m->segment = make_segment(meeting.size, &fd);
      leader->serve(meeting, fd.get(), pages, watch, pages ? &m->processes : nullptr);
    });
    return;
  }
  try {
    Joined joined;
    try {
      joined = join(address, meeting, pages, watch);
    } catch (const Failure& r) {
      if (r.kind == FailureKind::peer_lost && r.peer == 0) reason();
      throw;
    }
    m->segment = check_segment(joined.segment, meeting.size);
    for (std::size_t p = 0; p < joined.pages.size(); ++p) {
      m->processes.push_back(std::make_shared<Process>(joined.pages[p].get(), joined.heaps[p].get()));
    }
  } catch (const Failure& r) {
    meeting.raise(r);
  }
}

}  // namespace

std::shared_ptr<HostCore> create_core(const std::shared_ptr<Leader>& own, const std::string& address, int rank,
                                      int size, const HostOptions& options, const Watch& watch) {
  AXO_CHECK(size >= 1 && size <= kMaxRanks, "create_host_communicator: size", size,
            "1 to " + std::to_string(kMaxRanks) + " ranks");
  AXO_CHECK(rank >= 0 && rank < size, "create_host_communicator: rank", rank, "0 to " + std::to_string(size - 1));
  Membership m = membership_of(rank, size, options.name, options.timeout);
  AXO_CHECK(own != nullptr || size == 1, "create_host_communicator: leader", "none", "one of this rank's");
  if (rank != 0) own->close();
  const Meeting meeting{"rendezvous of '" + options.name + "'", rank, size, deadline_after(options.timeout)};
  const Watch look = [&] {
    check_interrupt();
    if (watch) watch();
  };
  const auto reason = [&] {
    for (const auto end = Clock::now() + kReason; Clock::now() < end && !meeting.late();) {
      look();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  meet(own.get(), size == 1 ? Address{} : Address::parse(address), meeting, true, now_and_then(look), reason, &m);
  try {
    return start(std::move(m), look);
  } catch (const Failure& r) {
    meeting.raise(r);
  }
}

std::shared_ptr<HostCore> split_core(HostCore& parent, const GatherBytes& gather, const std::vector<int>& members,
                                     bool takes_part, const std::string& name) {
  const auto at = std::find(members.begin(), members.end(), parent.rank());
  const int rank = static_cast<int>(at - members.begin()), size = static_cast<int>(members.size());

  std::unique_ptr<Leader> leader;
  if (takes_part && rank == 0 && size > 1) leader = std::make_unique<Leader>();
  const Address own = leader ? leader->address() : Address{};
  const std::string addresses = gather(std::string(reinterpret_cast<const char*>(&own), sizeof(own)));
  if (!takes_part) return nullptr;

  Membership m = membership_of(rank, size, name, parent.timeout());
  for (int p : members) m.processes.push_back(parent.processes()[static_cast<std::size_t>(p)]);
  const Meeting meeting{"split of '" + parent.member().name + "' into '" + name + "'", rank, size,
                        deadline_after(parent.timeout())};
  // First a rank that died before it left the parent: others may have ended because of that one.
  const auto look_at_peers = [&] {
    int lost = -1;
    for (int p = 0; p < size; ++p) {
      if (!m.processes[static_cast<std::size_t>(p)]->dead()) continue;
      const bool left = parent.left(members[static_cast<std::size_t>(p)]);
      if (lost < 0 || !left) lost = p;
      if (!left) break;
    }
    if (lost < 0) return;
    const auto i = static_cast<std::size_t>(lost);
    throw Failure{FailureKind::peer_lost, lost,
                  "rank " + std::to_string(lost) + " (process " + std::to_string(m.processes[i]->pid()) + ", rank " +
                      std::to_string(members[i]) + " of '" + parent.member().name + "') died"};
  };
  const Watch watch = [&, interrupts = now_and_then(&check_interrupt)] {
    interrupts();
    look_at_peers();
  };
  const auto reason = [&] {
    // The leader may also have left because another rank is lost, before this one had connected.
    look_at_peers();
    if (m.processes[0]->dead()) return;
    throw Failure{FailureKind::aborted, -1, meeting.what + ": its rank 0 gave up"};
  };
  Address address;
  std::memcpy(&address, addresses.data() + static_cast<std::size_t>(members[0]) * sizeof(address), sizeof(address));
  meet(leader.get(), address, meeting, false, watch, reason, &m);
  return start(std::move(m), [] {});
}

}  // namespace axo::host

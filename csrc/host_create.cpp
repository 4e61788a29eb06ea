// Making host communicators: from a store, and by splitting; see host_rendezvous.h for the sockets.
#include "host_create.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "host_rendezvous.h"

namespace axo::host {
namespace {

// The first operation of every communicator: when it is through, all ranks have mapped the segment.
std::shared_ptr<HostCore> start(Membership membership) {
  auto core = std::make_shared<HostCore>(std::move(membership));
  core->engine().add(core);
  Request request;
  request.kind = Kind::barrier;
  auto work = std::make_shared<HostWork>(core, request, CallOptions{}, core->timeout());
  try {
    core->submit({work});
    work->wait();
  } catch (...) {
    core->release();
    throw;
  }
  return core;
}

Membership membership_of(int rank, int size, const std::string& name, Milliseconds timeout) {
  Membership m;
  m.rank = rank;
  m.size = size;
  m.name = name;
  m.timeout = timeout;
  return m;
}

// Why a rendezvous failed, so that every rank can throw the same.
struct Refusal {
  FailureKind kind = FailureKind::aborted;
  int peer = -1;
  std::string text;
};

[[noreturn]] void raise(const Refusal& r) {
  if (r.kind == FailureKind::peer_lost) throw PeerLost(r.text, r.peer);
  if (r.kind == FailureKind::timeout) throw Timeout(r.text);
  throw Error(r.text);
}

// Runs the leader's part; when it fails, tells the members before it throws. `told` comes after the members that have
// connected: for those that have not.
template <class Body>
void lead(Leader& leader, Body&& body, const std::function<void(const Refusal&)>& told) {
  Refusal refusal;
  try {
    return body();
  } catch (const PeerLost& e) {
    refusal = {FailureKind::peer_lost, e.peer(), e.what()};
  } catch (const Timeout& e) {
    refusal = {FailureKind::timeout, -1, e.what()};
  } catch (const std::exception& e) {
    refusal = {FailureKind::aborted, -1, e.what()};
  }
  leader.refuse(refusal.kind, refusal.peer, refusal.text);
  if (told) told(refusal);
  raise(refusal);
}

// What a rank publishes: its process, where it listens (rank 0) and which host it is on.
struct Card {
  int pid = 0;
  std::string pid_space;  // where `pid` means something
  Address address{};
  std::string host;
};

std::string encode(const Card& card) {
  return std::to_string(card.pid) + " " + card.pid_space + " " + (card.address.socket[0] ? card.address.socket : "-") +
         " " + (card.address.token[0] ? card.address.token : "-") + " " + card.host;
}

Card decode(const std::string& text, const std::string& key) {
  std::istringstream in(text);
  Card card;
  std::string socket, token;
  in >> card.pid >> card.pid_space >> socket >> token;
  std::getline(in >> std::ws, card.host);
  if (!in || socket.size() >= sizeof(card.address.socket) || token.size() >= sizeof(card.address.token)) {
    throw Error("rendezvous: the store's entry '" + key + "' is not one of Axo's");
  }
  std::memcpy(card.address.socket, socket.data(), socket.size());
  std::memcpy(card.address.token, token.data(), token.size());
  return card;
}

class Rendezvous {
 public:
  Rendezvous(Store& store, const std::string& key, int rank, int size, const HostOptions& options)
      : store_(store), key_(key), rank_(rank), size_(size), options_(options) {
    const auto limit = std::min<Milliseconds>(options.timeout, std::chrono::hours(24 * 365));
    deadline_ = Clock::now() + (limit < Milliseconds::zero() ? std::chrono::hours(24 * 365) : limit);
    card_.pid = ::getpid();
    card_.pid_space = process_space();
    card_.host = host_identity();
  }

  Membership meet() {
    Membership m = membership_of(rank_, size_, options_.name, options_.timeout);
    if (size_ == 1) {
      Fd fd;
      m.segment = make_segment(1, &fd);
      m.processes = {Engine::get().self()};
      return m;
    }
    if (rank_ == 0) {
      run_leader(&m);
    } else {
      run_member(&m);
    }
    // A store outlives its groups, and a later one may have the name of this one. Nobody is through the first barrier
    // before all have come here, so whoever meets again finds no address of the last time.
    store_.remove(entry(rank_));
    return m;
  }

 private:
  std::string entry(int rank) const { return key_ + "/" + std::to_string(rank); }

  Card read(int rank) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline_ - Clock::now());
    try {
      return decode(store_.get(entry(rank), std::max(left, Milliseconds(1))), entry(rank));
    } catch (const Timeout& e) {
      throw Timeout("rendezvous of '" + options_.name + "' (rank " + std::to_string(rank_) + " of " +
                    std::to_string(size_) + "): timed out; rank " + std::to_string(rank) + " has not come (" +
                    e.what() + ")");
    }
  }

  void check_host(const Card& other, int other_rank) const {
    if (other.host == card_.host) return;
    const int a = std::min(rank_, other_rank), b = std::max(rank_, other_rank);
    const Card& of_a = rank_ == a ? card_ : other;
    const Card& of_b = rank_ == a ? other : card_;
    throw Error("communicator '" + options_.name + "': ranks " + std::to_string(a) + " and " + std::to_string(b) +
                " are not on one host, and shared memory serves one host only: '" + of_a.host + "' and '" + of_b.host +
                "'");
  }

  std::string failed_entry() const { return key_ + "/failed"; }

  // Why the leader no longer listens: what it said last, or else that it is lost.
  Refusal read_refusal(const PeerLost& lost) {
    Refusal r{FailureKind::peer_lost, lost.peer(), lost.what()};
    try {
      std::istringstream in(store_.get(failed_entry(), Milliseconds(200)));
      int kind = 0, peer = -1;
      std::string text;
      if (std::getline(in >> kind >> peer >> std::ws, text)) r = {static_cast<FailureKind>(kind), peer, text};
    } catch (const std::exception&) {
      // The leader had no time to say anything.
    }
    return r;
  }

  void run_leader(Membership* m) {
    Leader leader;
    card_.address = leader.address();
    store_.remove(failed_entry());
    store_.set(entry(0), encode(card_));
    const auto body = [&] {
      std::vector<Fd> alive;  // pidfds of the members: one that dies before it connects
      for (int p = 1; p < size_; ++p) {
        const Card card = read(p);
        check_host(card, p);
        const bool visible = card.pid > 0 && card.pid_space == card_.pid_space;
        alive.emplace_back(visible ? static_cast<int>(::syscall(SYS_pidfd_open, card.pid, 0)) : -1);
      }
      const Watch watch = [&] {
        for (std::size_t i = 0; i < alive.size(); ++i) {
          pollfd p{alive[i].get(), POLLIN, 0};
          if (alive[i] && ::poll(&p, 1, 0) > 0) {
            throw PeerLost("rendezvous of '" + options_.name + "': rank " + std::to_string(i + 1) + " of " +
                               std::to_string(size_) + " died",
                           static_cast<int>(i + 1));
          }
        }
      };
      Fd fd;
      m->segment = make_segment(size_, &fd);
      leader.serve(size_, options_.name, fd.get(), true, deadline_, watch, &m->processes);
    };
    lead(leader, body, [&](const Refusal& r) {
      store_.set(failed_entry(),
                 std::to_string(static_cast<int>(r.kind)) + " " + std::to_string(r.peer) + " " + r.text);
    });
  }

  void run_member(Membership* m) {
    store_.set(entry(rank_), encode(card_));
    const Card leader = read(0);
    check_host(leader, 0);
    Joined joined;
    try {
      joined = join(leader.address, rank_, size_, options_.name, true, deadline_, [] {});
    } catch (const PeerLost& e) {
      if (e.peer() != 0) throw;
      raise(read_refusal(e));
    }
    m->segment = check_segment(joined.segment, size_);
    for (int p = 0; p < size_; ++p) {
      const auto i = static_cast<std::size_t>(p);
      m->processes.push_back(std::make_shared<Process>(joined.pages[i].get(), joined.heaps[i].get()));
    }
  }

  Store& store_;
  const std::string key_;
  const int rank_, size_;
  const HostOptions options_;
  Card card_;
  Clock::time_point deadline_;
};

}  // namespace

std::shared_ptr<HostCore> create_core(Store& store, const std::string& key, int rank, int size,
                                      const HostOptions& options) {
  AXO_CHECK(size >= 1 && size <= kMaxRanks, "create_host_communicator: size", size,
            "1 to " + std::to_string(kMaxRanks) + " ranks");
  AXO_CHECK(rank >= 0 && rank < size, "create_host_communicator: rank", rank, "0 to " + std::to_string(size - 1));
  return start(Rendezvous(store, key, rank, size, options).meet());
}

std::shared_ptr<HostCore> split_core(HostCore& parent, const GatherBytes& gather, int color, int key,
                                     const std::string& name) {
  struct Choice {
    std::int32_t color, key;
  };
  const Choice mine{color, key};
  const std::string choices = gather(std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)));
  std::vector<std::pair<int, int>> members;  // (key, rank in the parent)
  for (int p = 0; p < parent.size(); ++p) {
    Choice c;
    std::memcpy(&c, choices.data() + static_cast<std::size_t>(p) * sizeof(c), sizeof(c));
    if (c.color == color) members.emplace_back(c.key, p);
  }
  std::sort(members.begin(), members.end());
  const auto at = std::find(members.begin(), members.end(), std::make_pair(key, parent.rank()));
  const int rank = static_cast<int>(at - members.begin()), size = static_cast<int>(members.size());
  const bool takes_part = color >= 0;

  std::unique_ptr<Leader> leader;
  if (takes_part && rank == 0 && size > 1) leader = std::make_unique<Leader>();
  const Address own = leader ? leader->address() : Address{};
  const std::string addresses = gather(std::string(reinterpret_cast<const char*>(&own), sizeof(own)));
  if (!takes_part) return nullptr;

  Membership m = membership_of(rank, size, name, parent.timeout());
  for (const auto& [k, p] : members) m.processes.push_back(parent.processes()[static_cast<std::size_t>(p)]);
  const auto deadline =
      Clock::now() +
      std::min<Milliseconds>(parent.timeout() < Milliseconds::zero() ? std::chrono::hours(24 * 365) : parent.timeout(),
                             std::chrono::hours(24 * 365));
  const Watch watch = [&] {
    for (int p = 0; p < size; ++p) {
      if (!m.processes[static_cast<std::size_t>(p)]->dead()) continue;
      throw PeerLost("split of '" + parent.name() + "' into '" + name + "': rank " + std::to_string(p) + " of " +
                         std::to_string(size) + " (rank " +
                         std::to_string(members[static_cast<std::size_t>(p)].second) + " of '" + parent.name() +
                         "') died",
                     p);
    }
  };
  if (size == 1) {
    Fd fd;
    m.segment = make_segment(1, &fd);
  } else if (leader) {
    Fd fd;
    lead(
        *leader,
        [&] {
          m.segment = make_segment(size, &fd);
          leader->serve(size, name, fd.get(), false, deadline, watch, nullptr);
        },
        nullptr);
  } else {
    Address address;
    std::memcpy(&address, addresses.data() + static_cast<std::size_t>(members[0].second) * sizeof(address),
                sizeof(address));
    m.segment = check_segment(join(address, rank, size, name, false, deadline, watch).segment, size);
  }
  return start(std::move(m));
}

}  // namespace axo::host

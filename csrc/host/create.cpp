// Making host communicators: from a store, and by splitting; see host/rendezvous.h for the sockets.
#include "host/create.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/identity.h"
#include "host/rendezvous.h"

namespace axo::host {
namespace {

// The first operation of every communicator: when it is through, all ranks have mapped the segment. `watch` may throw
// to give up.
std::shared_ptr<HostCore> start(Membership membership, const Watch& watch) {
  auto core = std::make_shared<HostCore>(std::move(membership));
  core->engine().add(core);
  Request request;
  request.kind = Kind::barrier;
  auto work = std::make_shared<HostWork>(core, request, CallOptions{});
  try {
    core->submit(work, true);
    while (!work->is_completed()) {
      try {
        work->synchronize(Milliseconds(100));
      } catch (const Timeout&) {
        if (!work->is_completed()) watch();
      }
    }
    work->wait();
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

// Runs the leader's part; when it fails, tells the members before it throws. `told` comes after the members that have
// connected: for those that have not.
template <class Body>
void lead(Leader& leader, const Meeting& meeting, Body&& body, const std::function<void(const Failure&)>& told) {
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
  if (told) told(refusal);
  if (own) std::rethrow_exception(own);
  meeting.raise(refusal);
}

// What a rank publishes: its process, where it listens (rank 0) and which host it is on.
struct Card {
  int pid = 0, tid = 0;
  std::string pid_space;  // where they mean something
  Address address{};
  std::string host;
};

std::string encode(const Card& card) {
  return std::to_string(card.pid) + " " + std::to_string(card.tid) + " " + card.pid_space + " " +
         (card.address.socket[0] ? card.address.socket : "-") + " " +
         (card.address.token[0] ? card.address.token : "-") + " " + card.host;
}

Card decode(const std::string& text, const std::string& key) {
  std::istringstream in(text);
  Card card;
  std::string socket, token;
  in >> card.pid >> card.tid >> card.pid_space >> socket >> token;
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
      : store_(store),
        key_(key),
        options_(options),
        meeting_{"rendezvous of '" + options.name + "'", rank, size, deadline_after(options.timeout)} {
    card_.pid = ::getpid();
    card_.tid = static_cast<int>(::syscall(SYS_gettid));
    card_.pid_space = process_space();
    card_.host = host_identity();
  }

  std::shared_ptr<HostCore> meet() {
    Membership m = membership_of(meeting_.rank, meeting_.size, options_.name, options_.timeout);
    if (meeting_.size == 1) {
      Fd fd;
      m.segment = make_segment(1, &fd);
      m.processes = {ProgressEngine::get().self()};
      return start(std::move(m), [] {});
    }
    if (meeting_.rank == 0) {
      run_leader(&m);
    } else {
      run_member(&m);
    }
    // A store outlives its groups, and a later one may have the name of this one. Nobody is through the first barrier
    // before all have come here, so whoever meets again finds no address of the last time.
    store_.remove(entry(meeting_.rank));
    try {
      return start(std::move(m), [this] { ask(); });
    } catch (const Failure& r) {
      meeting_.raise(r);
    }
  }

 private:
  std::string entry(int rank) const { return key_ + "/" + std::to_string(rank); }
  std::string failed_entry() const { return key_ + "/failed"; }

  void check_host(const Card& other, int other_rank) const {
    if (other.host == card_.host) return;
    const int a = std::min(meeting_.rank, other_rank), b = std::max(meeting_.rank, other_rank);
    const Card& of_a = meeting_.rank == a ? card_ : other;
    const Card& of_b = meeting_.rank == a ? other : card_;
    throw Error("communicator '" + options_.name + "': ranks " + std::to_string(a) + " and " + std::to_string(b) +
                " are not on one host, and shared memory serves one host only: '" + of_a.host + "' and '" + of_b.host +
                "'");
  }

  // Why the leader no longer listens: what it said last, or else that it is lost.
  Failure read_refusal(const Failure& lost) {
    Failure r = lost;
    try {
      std::istringstream in(store_.get(failed_entry(), Milliseconds(200)));
      int kind = 0, peer = -1;
      std::string text;
      const bool whole = static_cast<bool>(std::getline(in >> kind >> peer >> std::ws, text));
      if (whole && kind > 0 && kind <= static_cast<int>(FailureKind::aborted)) {
        r = {static_cast<FailureKind>(kind), peer, text};
      }
    } catch (const std::exception&) {
      // The leader had no time to say anything.
    }
    return r;
  }

  // Whether an interrupt is due, or a rank has given up, now and then: the check may have to wait for a lock of the
  // program's.
  void ask() {
    if (Clock::now() - asked_ < std::chrono::milliseconds(100)) return;
    asked_ = Clock::now();
    check_interrupt();
    const std::string gave_up = key_ + "/gave up";  // written by axo.comm.rendezvous: "2 raised ValueError: no way"
    if (!store_.has(gave_up)) return;
    const std::string told = store_.get(gave_up, Milliseconds(1000));
    throw Failure{FailureKind::peer_lost, std::atoi(told.c_str()), "rank " + told};
  }

  // The members as they come, in any order; the death of one that has come ends the wait for the others.
  std::vector<RankThread> await_members() {
    std::vector<RankThread> callers(static_cast<std::size_t>(meeting_.size));
    std::vector<int> missing;
    for (int p = 1; p < meeting_.size; ++p) missing.push_back(p);
    for (Milliseconds pause(1);; pause = std::min(2 * pause, Milliseconds(20))) {
      for (auto it = missing.begin(); it != missing.end();) {
        if (!store_.has(entry(*it))) {
          ++it;
          continue;
        }
        const Card card = decode(store_.get(entry(*it), Milliseconds(1000)), entry(*it));
        check_host(card, *it);
        callers[static_cast<std::size_t>(*it)] = RankThread(card.pid, card.tid, card.pid_space);
        it = missing.erase(it);
      }
      watch_members(callers);
      if (missing.empty()) return callers;
      if (meeting_.late()) {
        std::string text;
        for (int p : missing) text += (text.empty() ? "" : ", ") + std::to_string(p);
        const std::string who = missing.size() == 1 ? "rank " + text + " has" : "ranks " + text + " have";
        throw Failure{FailureKind::timeout, -1, "rank 0 timed out; " + who + " not come"};
      }
      std::this_thread::sleep_for(pause);
    }
  }

  void watch_members(const std::vector<RankThread>& callers) {
    ask();
    for (std::size_t p = 1; p < callers.size(); ++p) {
      if (!callers[p].gone()) continue;
      throw Failure{FailureKind::peer_lost, static_cast<int>(p),
                    "rank " + std::to_string(p) + " (process " + std::to_string(callers[p].pid()) + ") died"};
    }
  }

  void run_leader(Membership* m) {
    Leader leader;
    card_.address = leader.address();
    store_.remove(failed_entry());
    store_.set(entry(0), encode(card_));
    const auto body = [&] {
      const std::vector<RankThread> callers = await_members();
      Fd fd;
      m->segment = make_segment(meeting_.size, &fd);
      leader.serve(meeting_, fd.get(), true, [&] { watch_members(callers); }, &m->processes);
    };
    lead(leader, meeting_, body, [&](const Failure& r) {
      store_.set(failed_entry(),
                 std::to_string(static_cast<int>(r.kind)) + " " + std::to_string(r.peer) + " " + r.text);
    });
  }

  // In short waits, so that the program's signals are seen.
  Card await_leader() {
    for (;;) {
      try {
        return decode(store_.get(entry(0), Milliseconds(100)), entry(0));
      } catch (const Timeout& e) {
        ask();
        if (meeting_.late()) throw Failure{FailureKind::timeout, -1, "timed out; rank 0 has not come"};
      }
    }
  }

  void run_member(Membership* m) {
    store_.set(entry(meeting_.rank), encode(card_));
    try {
      const Card leader = await_leader();
      check_host(leader, 0);
      const RankThread caller(leader.pid, leader.tid, leader.pid_space);
      const Failure lost{FailureKind::peer_lost, 0, "rank 0 (process " + std::to_string(leader.pid) + ") died"};
      Joined joined;
      try {
        joined = join(leader.address, meeting_, true, [&] {
          ask();
          if (caller.gone()) throw lost;
        });
      } catch (const Failure& r) {
        if (r.kind != FailureKind::peer_lost || r.peer != 0) throw;
        throw read_refusal(lost);
      }
      m->segment = check_segment(joined.segment, meeting_.size);
      for (int p = 0; p < meeting_.size; ++p) {
        const auto i = static_cast<std::size_t>(p);
        m->processes.push_back(std::make_shared<Process>(joined.pages[i].get(), joined.heaps[i].get()));
      }
    } catch (const Failure& r) {
      meeting_.raise(r);
    }
  }

  Store& store_;
  const std::string key_;
  const HostOptions options_;
  const Meeting meeting_;
  Card card_;
  Clock::time_point asked_ = Clock::now();
};

}  // namespace

std::shared_ptr<HostCore> create_core(Store& store, const std::string& key, int rank, int size,
                                      const HostOptions& options) {
  AXO_CHECK(size >= 1 && size <= kMaxRanks, "create_host_communicator: size", size,
            "1 to " + std::to_string(kMaxRanks) + " ranks");
  AXO_CHECK(rank >= 0 && rank < size, "create_host_communicator: rank", rank, "0 to " + std::to_string(size - 1));
  return Rendezvous(store, key, rank, size, options).meet();
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
  auto asked = Clock::now();
  const Watch watch = [&] {
    if (Clock::now() - asked >= std::chrono::milliseconds(100)) {
      asked = Clock::now();
      check_interrupt();
    }
    // First a rank that died before it left the parent: others may have ended because of that one.
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
  Fd fd;
  if (size == 1) {
    m.segment = make_segment(1, &fd);
  } else if (leader) {
    const auto body = [&] {
      m.segment = make_segment(size, &fd);
      leader->serve(meeting, fd.get(), false, watch, nullptr);
    };
    lead(*leader, meeting, body, nullptr);
  } else {
    Address address;
    std::memcpy(&address, addresses.data() + static_cast<std::size_t>(members[0]) * sizeof(address), sizeof(address));
    try {
      try {
        m.segment = check_segment(join(address, meeting, false, watch).segment, size);
      } catch (const Failure& r) {
        if (r.kind != FailureKind::peer_lost || r.peer != 0) throw;
        // The leader may also have left because another rank is lost, before this one had connected.
        watch();
        if (m.processes[0]->dead()) throw;
        throw Failure{FailureKind::aborted, -1, meeting.what + ": its rank 0 gave up"};
      }
    } catch (const Failure& r) {
      meeting.raise(r);
    }
  }
  return start(std::move(m), [] {});
}

}  // namespace axo::host

// The state of one rank of a communicator whose ranks are on several hosts: queue, arrivals of peers, and its end.
//
// Collectives run one after the other on a thread of the communicator, so they advance without the caller, and those of
// different communicators at the same time. Inside a host they use `inner`, a shared-memory communicator (null where a
// host has one rank only); between hosts, frames of the mesh (hosts/mesh.h). A rank says where the bytes of a
// collective shall go, then posts `begin`; its peers send after that, so bytes always have a place. Begins also carry
// the operation, and tell who has arrived when a time limit passes.
// Messages are matched by (peer, tag) in issue order and need no thread: a receive posts what it wants, and a send
// leaves once both are there. The progress engine ends what is late, or waits for a rank that is lost. After a failure
// the communicator's thread ends everything pending, once the peers have been told and nobody touches its memory any
// more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hosts/mesh.h"
#include "progress/cpu_communicator.h"

namespace axo::hosts {

struct Place {
  int wire;          // the rank on the wire
  std::string host;  // what tells its host from others (base/identity.h)
  std::string host_name() const { return host.substr(0, host.find(' ')); }
};

// Where the ranks of a communicator are.
struct HostMap {
  std::vector<Place> places;            // by rank
  std::vector<int> host;                // by rank: its host's number, in the order of their first ranks
  std::vector<int> local;               // by rank: its number among the host's ranks
  std::vector<std::vector<int>> hosts;  // the ranks of each host, in order

  explicit HostMap(std::vector<Place> places_by_rank);
  const Place& place(int rank) const { return places[static_cast<std::size_t>(rank)]; }
  int host_of(int rank) const { return host[static_cast<std::size_t>(rank)]; }
  int local_of(int rank) const { return local[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& ranks_on(int h) const { return hosts[static_cast<std::size_t>(h)]; }
};

// Bytes that go to, or come from, a rank on another host; and the message that they are, if any.
struct Piece {
  char* data;
  std::size_t bytes;
  WorkStatePtr message = {};
  std::size_t moved = 0;
  bool leaving = false;  // the mesh has it, and calls back
  bool done = false;
};
using PiecePtr = std::shared_ptr<Piece>;
using Pieces = std::vector<PiecePtr>;

struct Membership {
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Communicator> inner;
  HostMap map;
  Member member;
  std::string key;  // equal on its ranks, and of no other communicator of the mesh
  Milliseconds timeout{600000};
};

class HostsCore final : public Sink, public CpuCore {
 public:
  static std::shared_ptr<HostsCore> create(Membership membership);

  const Membership& membership() const { return m_; }

  void abort(const Failure& failure) override;
  // A split failed inside the host: every rank hears of it, and this one throws what ended the communicator.
  [[noreturn]] void fail_split(const std::exception_ptr& error);
  // Once this communicator has failed: waits until the peers know, at most so long.
  void until_heard(Milliseconds at_most);
  void shutdown() override;
  void release() override;

  // For the collective that runs, on the communicator's thread. They throw when the communicator has failed.
  // Memory that stays until the collective has ended and nobody touches it.
  char* scratch(std::size_t bytes);
  // What comes next from `rank` goes to `data`. Before begin().
  PiecePtr expect(int rank, char* data, std::size_t bytes);
  // Tells the other ranks that this one has come to the collective.
  void begin();
  // Sends, once `rank` has come to this collective too.
  PiecePtr send(int rank, const char* data, std::size_t bytes);
  void await(const Pieces& pieces);
  // Calls `issue` with options for operations of `inner` and waits for the works that it returns.
  void inside(const std::function<std::vector<WorkPtr>(const CallOptions& options)>& issue);

  char* place(int from, const Head& head) override;
  void arrived(int from, const Head& head) override;
  bool progress(bool check) override;
  std::string blocked_in(int*) override { return ""; }

 private:
  // What one peer has told.
  struct Peer {
    std::deque<Operation> operations;  // of the collectives that it has come to, and this rank has not ended
    bool left = false;
    bool heard = false;  // that this communicator has failed
  };
  using Key = std::pair<int, Stream>;  // peer, stream
  using Queues = std::map<Key, std::deque<PiecePtr>>;
  using Lock = std::unique_lock<std::mutex>;

  explicit HostsCore(Membership membership);
  std::shared_ptr<HostsCore> self() { return std::static_pointer_cast<HostsCore>(shared_from_this()); }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  int wire_of(int rank) const { return m_.map.place(rank).wire; }
  int rank_of(int wire_rank) const;  // -1: it is not in this communicator
  Head head(FrameKind frame, Stream stream = kCollectives) const;
  void tell_all(const Head& head);

  void queue(const WorkStatePtr* works, std::size_t count) override;
  void start() override;
  void run();
  void execute(Lock& lock);
  void end_one(Lock& lock, const WorkStatePtr& work);
  void end_all(Lock& lock);
  void leave(Lock& lock);
  void await(Lock& lock, const std::function<bool()>& done);
  bool agrees(int rank) const;
  void compare(Lock& lock, int rank);
  void match(Lock& lock, const Key& key);
  void moved(Lock& lock, Queues& queues, const Key& key);
  void submit_message(const WorkStatePtr& work);
  void submit_inside(const WorkStatePtr& work);

  void fail(Lock& lock, const Failure& failure);
  Failure failure_inside(const std::exception_ptr& error) const;
  void judge(Lock& lock, const std::exception_ptr& inside);
  bool lost(int rank) const { return peer(rank).left || m_.mesh->gone(wire_of(rank)); }
  std::string loss_of(int rank) const;
  std::string place_of(int rank) const override { return " (host " + m_.map.place(rank).host_name() + ")"; }
  std::string timeout_text(const WorkState& work) const;

  const Membership m_;
  const std::uint64_t number_;  // on the mesh

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // whatever a thread of this core waits for
  std::vector<Peer> peers_;
  std::deque<WorkStatePtr> queue_;  // collectives; the front may be running
  WorkStatePtr running_;
  std::vector<std::unique_ptr<char[]>> scratch_;  // of the collective that runs
  std::set<WorkStatePtr> messages_;               // pending
  std::vector<WorkStatePtr> fresh_;               // those of them that are still to be submitted
  Queues sends_, receives_;
  std::map<Key, std::deque<std::uint64_t>> wanted_;  // receives that peers have posted, in bytes
  bool drained_ = false;                             // what was pending at the failure has ended
  Clock::time_point inside_failed_{};                // when the failure of `inner` was seen
  std::atomic<bool> ended_{false};
};

// Runs a collective (hosts/collectives.cpp).
void run_collective(HostsCore& core, const Request& request);

}  // namespace axo::hosts

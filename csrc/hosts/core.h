// The state of one rank of a communicator whose ranks are on several hosts: queue, arrivals of peers, and its end.
//
// Collectives run one after the other on a thread of the communicator, so they advance without the caller, and those of
// different communicators at the same time. Inside a host they use `inner`, a shared-memory communicator (null where a
// host has one rank only); between hosts, frames of the mesh (hosts/mesh.h). A rank says where the bytes of a
// collective shall go, then posts `begin`; its peers send after that, so bytes always have a place. Begins also carry
// the operation, and tell who has arrived when a time limit passes.
// Messages are matched by (peer, tag) in issue order and need no thread: a receive posts what it wants, and a send
// leaves once both are there. The progress thread of the process ends what is late. After a failure the communicator's
// thread ends everything pending, once the peers have been told and nobody touches its memory any more.
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

// Where the ranks of a communicator are.
struct HostMap {
  std::vector<int> wire;                // by rank: its rank on the wire
  std::vector<int> host;                // by rank: its host's number
  std::vector<int> local;               // by rank: its number among the host's ranks
  std::vector<std::vector<int>> hosts;  // the ranks of each host, in order
  std::vector<std::string> names;       // of the hosts

  // Numbers hosts in the order of their first rank.
  HostMap(std::vector<int> wire_ranks, const std::vector<std::string>& host_of_rank);
  int host_of(int rank) const { return host[static_cast<std::size_t>(rank)]; }
  int local_of(int rank) const { return local[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& ranks_on(int h) const { return hosts[static_cast<std::size_t>(h)]; }
};

class HostsWork final : public CpuWork {
 public:
  using CpuWork::CpuWork;
  int source() const override { return request.kind == Kind::recv && is_completed() ? request.root : -1; }
};

using HostsWorkPtr = std::shared_ptr<HostsWork>;

// Bytes that go to, or come from, a rank on another host; and the message that they are, if any.
struct Piece {
  int rank;
  char* data;
  std::size_t bytes;
  HostsWorkPtr message = {};
  std::size_t moved = 0;
  bool leaving = false, done = false;
};
using PiecePtr = std::shared_ptr<Piece>;
using Pieces = std::vector<PiecePtr>;

// What ends the collective that runs; the reason stands in the core.
struct Failed : std::exception {};

struct Membership {
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Communicator> inner;
  HostMap map;
  Member member;
  std::uint64_t number = 0;  // of the communicator on the mesh; not 0
  Milliseconds timeout{600000};
};

class HostsCore final : public Sink, public CpuCore {
 public:
  static std::shared_ptr<HostsCore> create(Membership membership);

  const Membership& membership() const { return m_; }

  void check_usable(const char* what) const override;
  // Takes the operations of a call, or of a group; one that cannot be taken any more ends with its error.
  void launch(const std::vector<WorkStatePtr>& works) override;
  void submit(const WorkStatePtr& work, bool) override { launch({work}); }
  Milliseconds set_timeout(Milliseconds timeout) override;
  void abort(const Failure& failure) override;
  std::exception_ptr failure() override;
  // A split failed inside the host: every rank hears of it, and this one throws what ended the communicator.
  [[noreturn]] void fail_split(const std::exception_ptr& error);
  void shutdown() override;
  void release() override;

  // For the collective that runs, on the communicator's thread. They throw Failed.
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
  void lost(int from) override;
  bool progress(bool check) override;
  std::string blocked_in(int*) override { return ""; }

 private:
  // What one peer has told.
  struct Peer {
    std::uint64_t begun = 0;           // collectives that it has come to
    std::deque<Operation> operations;  // those that this rank has not ended
    bool left = false, gone = false;
    bool lost() const { return left || gone; }
  };
  using Key = std::pair<int, Stream>;  // peer, stream
  using Queues = std::map<Key, std::deque<PiecePtr>>;
  using Lock = std::unique_lock<std::mutex>;

  explicit HostsCore(Membership membership);
  std::shared_ptr<HostsCore> self() { return std::static_pointer_cast<HostsCore>(shared_from_this()); }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  int wire_of(int rank) const { return m_.map.wire[static_cast<std::size_t>(rank)]; }
  int rank_of(int wire_rank) const;
  bool failed() const { return failure_.kind != FailureKind::none; }
  Head head(FrameKind frame, Stream stream = kCollectives) const;
  void tell_all(const Head& head);

  void run();
  void execute(Lock& lock);
  void end_all(Lock& lock);
  void leave(Lock& lock);
  void await(Lock& lock, int on, const std::function<bool()>& done, const Piece* piece = nullptr);
  bool agrees(int rank) const;
  void compare(Lock& lock, int rank);
  void match(Lock& lock, const Key& key);
  void moved(Lock& lock, Queues& queues, const Key& key);
  void submit_message(const HostsWorkPtr& work);
  void submit_inside(const HostsWorkPtr& work);
  void end(Lock& lock, const HostsWorkPtr& work);

  void fail(Lock& lock, const Failure& failure, bool tell = true);
  void fail_by(const HostsWork* work, const std::exception_ptr& error);
  Failure loss_of(int rank) const;
  std::string rank_text(int rank) const;
  std::string timeout_text(const HostsWork& work) const;
  std::exception_ptr error_at(const std::string& where, const std::string& waited = "") const;

  const Membership m_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // whatever a thread of this core waits for
  std::vector<Peer> peers_;
  std::deque<HostsWorkPtr> queue_;  // collectives; the front may be running
  HostsWorkPtr running_;
  std::vector<std::unique_ptr<char[]>> scratch_;  // of the collective that runs
  std::set<HostsWorkPtr> messages_;               // pending
  Queues sends_, receives_;
  std::map<Key, std::deque<std::uint64_t>> wanted_;  // receives that peers have posted, in bytes
  std::uint64_t next_sequence_ = 0, next_message_ = 0;
  Failure failure_;
  bool told_ = false;            // what was pending at the failure has ended
  mutable bool raised_ = false;  // the caller knows of the failure
  bool closing_ = false;
  std::atomic<bool> ended_{false};
};

// Runs a collective (hosts/collectives.cpp).
void run_collective(HostsCore& core, const Request& request);

}  // namespace axo::hosts

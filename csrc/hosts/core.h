// The state of one rank of a communicator whose ranks are on several hosts: queue, arrivals of peers, and its end.
//
// Collectives run one after the other on a thread of the communicator, so they advance without the caller, and those of
// different communicators at the same time. Inside a host they use `inner`, a shared-memory communicator (null where a
// host has one rank only); between hosts, frames of the mesh (hosts/mesh.h). Before a rank sends data of a collective
// to a peer it waits for the peer's `begin`, so that data always has a place to go; begins also carry the signature,
// and tell who has arrived when a time limit passes.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/flight_recorder.h"
#include "base/group.h"
#include "host/core.h"
#include "hosts/link_limit.h"
#include "hosts/mesh.h"

namespace axo::span {

inline constexpr std::chrono::seconds kPatience{10};  // for what ends by itself unless a peer hangs

// Where the ranks of a communicator are.
struct Place {
  std::vector<int> wire;                // by rank: its rank on the wire
  std::vector<int> host;                // by rank: its host's number
  std::vector<int> local;               // by rank: its number among the host's ranks
  std::vector<std::vector<int>> hosts;  // the ranks of each host, in order
  std::vector<std::string> names;       // of the hosts

  // Numbers hosts in the order of their first rank.
  Place(std::vector<int> wire_ranks, const std::vector<std::string>& host_of_rank);
};

// A run of bytes that goes to, or comes from, a rank on another host.
struct Piece {
  int rank;
  char* data;
  std::size_t bytes;
};

class SpanCore;

class SpanWork final : public WorkState {
 public:
  SpanWork(std::shared_ptr<SpanCore> core, Request r, const CallOptions& options);
  int source() const override { return request.kind == Kind::recv && is_completed() ? request.root : -1; }
  void settle();                       // waits until it has ended, whatever comes
  void end(std::exception_ptr error);  // complete(), and wakes who waits

  std::size_t moved = 0;  // of a message, in bytes

 private:
  const Member& member() const override;
  void wait_until(Clock::time_point deadline) override;

  std::shared_ptr<SpanCore> core_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

using SpanWorkPtr = std::shared_ptr<SpanWork>;

// What ends the collective that runs; the reason stands in the core.
struct Failed {};

struct SpanParts {
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Communicator> inner;
  std::shared_ptr<const LinkLimit> limit;
  Place place;
  int rank = 0;
  std::uint64_t number = 0;  // of the communicator on the mesh
  std::string name;
  Milliseconds timeout{600000};
};

class SpanCore final : public Sink, public GroupLauncher, public std::enable_shared_from_this<SpanCore> {
 public:
  static std::shared_ptr<SpanCore> create(SpanParts parts);

  int rank() const { return p_.rank; }
  int size() const { return static_cast<int>(p_.place.wire.size()); }
  const std::string& name() const { return p_.name; }
  const Member& member() const { return member_; }
  const SpanParts& parts() const { return p_; }
  ProgressEngine& engine() const { return engine_; }

  // Throws when the communicator cannot take operations (aborted, closed, forked child).
  void check_usable(const char* what) const;
  // A forked child has none of the threads that drive this core, and must not wait for them.
  void check_not_forked(const char* what) const;
  // A communicator that is being closed ends them with an error.
  void submit(const std::vector<SpanWorkPtr>& works);
  void launch(const std::vector<WorkStatePtr>& works) override;  // of a group
  void abort(const std::string& reason);
  std::exception_ptr failure() const;
  // A split failed inside the host: every rank hears of it, and this one throws what ended the communicator.
  [[noreturn]] void fail_split(const std::exception_ptr& error);
  void shutdown();
  void release();

  // For the collectives, on the communicator's thread. They throw Failed.
  void exchange(const SpanWork& work, const std::vector<Piece>& out, const std::vector<Piece>& in);
  // Waits for the other ranks to come to this collective.
  void await_all(const SpanWork& work);
  // Calls `issue` with options for operations of `inner` and waits for the works that it returns.
  using InnerCall = std::function<std::vector<WorkPtr>(const CallOptions& options)>;
  void inside(const SpanWork& work, const InnerCall& issue);

  char* place(int from, const Head& head) override;
  void arrived(int from, const Head& head) override;
  void lost(int from, const std::string& why) override;

 private:
  struct Stash {
    std::vector<char> data;
    bool complete;
  };
  // What one peer has told and sent.
  struct Peer {
    std::uint64_t begun = 0;                   // collectives that it has come to
    std::map<std::uint64_t, Operation> ahead;  // of those that this rank has not issued yet
    bool left = false, gone = false;
    char* want = nullptr;  // where its data goes, how much, and how much has come
    std::size_t bytes = 0, got = 0;
    bool reading = false;  // its reader is writing to where an operation of the caller's said
    std::deque<Stash> stash;
  };
  using Key = std::pair<int, int>;  // peer, tag
  using Lock = std::unique_lock<std::mutex>;

  explicit SpanCore(SpanParts parts);
  void run();
  void run_messages();
  void execute(const SpanWorkPtr& work);
  void finish(const SpanWorkPtr& work);
  void fail(const Failure& failure, bool tell);
  void fail_inside(const SpanWork& work, const std::exception_ptr& error);
  void fail_by(const std::exception_ptr& error, const std::function<std::string()>& late);
  void await(Lock& lock, const SpanWork& work, int on, const std::function<bool()>& done);
  void sleep_until(const SpanWork& work, Clock::time_point end);
  void send_pieces(const SpanWork& work, FrameKind frame, const std::vector<Piece>& out);
  void drain(Peer& peer);
  void compare(int peer, std::uint64_t sequence, const Operation& theirs, Failure* failure) const;
  void tell_all(Head head);
  void leave();
  int rank_of(int wire_rank) const;
  std::string rank_text(int rank) const;
  std::string timeout_text(const SpanWork& work) const;
  std::exception_ptr error_for(const SpanWork& work) const;
  std::exception_ptr error_at(const std::string& where, const std::string& waited) const;
  void end_readers(Lock& lock);
  void await_told(Lock& lock);

  // Messages (hosts/messages.cpp).
  void submit_message(const SpanWorkPtr& work);
  void submit_inside(const SpanWorkPtr& work);
  void end_messages(Lock& lock);
  SpanWorkPtr next_send(Failure* failure);

  ProgressEngine& engine_;  // of the process that made this
  const SpanParts p_;
  const Member member_;
  std::shared_ptr<FlightRecorder> flight_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // whatever a thread of this core waits for
  std::condition_variable alarm_;    // it has failed: ends sleeps
  std::vector<Peer> peers_;
  std::deque<SpanWorkPtr> queue_;  // its front may be running
  std::uint64_t next_sequence_ = 0, next_message_ = 0;
  std::map<std::uint64_t, Operation> mine_;  // of collectives that some peer has not come to
  Failure failure_;
  bool told_ = false;            // the peers know of the failure
  mutable bool raised_ = false;  // the caller knows of it
  bool closing_ = false, ended_ = false;

  std::map<Key, std::deque<SpanWorkPtr>> sends_, recvs_;
  std::map<Key, std::deque<std::uint64_t>> wanted_;  // receives that peers have posted, in bytes
  int inside_ = 0;                                   // messages inside the host, and on their way
  bool messages_run_ = false, sending_ = false;
  Failure inside_failure_;
};

// Runs the collective of `work` (hosts/collectives.cpp).
void run_collective(SpanCore& core, const SpanWork& work);

}  // namespace axo::span

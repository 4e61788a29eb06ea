// The state machine of one rank of one host communicator: queues, the running collective, messages, and its end.
//
// Everything that moves operations runs behind the gate: a try-lock that remembers whether another thread was turned
// away. If so, the holder rings this process's own bell when it leaves, so no wake-up is lost.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "host/rounds.h"

namespace axo::host {

// Everything that a rank needs to take part: made by the rendezvous.
struct Membership {
  Member member;
  Milliseconds timeout{600000};
  std::shared_ptr<Mapping> segment;
  std::vector<std::shared_ptr<Process>> processes;  // by rank
};

class HostCore final : public CpuCore {
 public:
  explicit HostCore(Membership membership);

  const std::vector<std::shared_ptr<Process>>& processes() const { return m_.processes; }
  const Process& process(int rank) const { return *m_.processes[static_cast<std::size_t>(rank)]; }

  bool progress(bool check) override;
  std::string blocked_in(int* on) override;
  void abort(const Failure& failure) override;
  std::exception_ptr failure() override;
  void shutdown() override;
  void release() override;

  // For Rounds and Messages, behind the gate.
  char* base() const { return base_; }
  const Layout& layout() const { return layout_; }
  RankState& state(int rank) const { return *layout_.state(base_, rank); }
  bool left(int rank) const { return state(rank).left.load(std::memory_order_acquire) != 0; }
  // Something was published that a sleeping peer may wait for. To ring costs a fence, which waits until the peers have
  // given the line up: a small collective rings once a step, for all that it has published.
  void published();
  void ring(int peer);                // the same for one peer
  void ring_if_published();           // the same for all, where published() left it for later
  void complete(HostWorkPtr work);    // the operation ended well
  void fail(const Failure& failure);  // the communicator has failed: tells the peers, ends everything pending

 private:
  friend class Messages;
  void queue(const WorkStatePtr* works, std::size_t count) override;
  void start() override;
  std::string place_of(int rank) const override;
  bool enter();
  void leave();
  bool leave_and_complete();
  bool step(bool check);
  void take_incoming();
  bool advance();
  void look_at_peers();
  bool waits_for(const HostWork& work, int peer) const;
  bool adopt_abort();
  void report_crossing();
  void end_all();
  std::string timeout_text(const HostWork& work) const;
  std::string peer_position(int peer) const;

  Membership m_;
  Layout layout_;
  char* base_;

  std::vector<HostWorkPtr> incoming_;  // under queue_mutex_
  std::atomic<bool> has_incoming_{false};

  std::atomic<int> gate_{0};
  // Behind the gate.
  std::vector<HostWorkPtr> taken_;  // empty; keeps its memory
  std::deque<HostWorkPtr> queue_;
  bool tell_flight_ = false;  // this rank has failed: write the flight file once out of the gate
  Rounds rounds_;
  Messages messages_;
  Ended ended_;
  bool publish_pending_ = false;
  std::uint64_t reported_ = 0;  // 1 + the last collective whose crossed waiting was reported
  std::atomic<bool> released_{false};
};

}  // namespace axo::host

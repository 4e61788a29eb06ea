// The two small machines inside a communicator: Rounds runs the one collective that is at the head of the queue,
// Messages moves send and recv. Both are driven behind the gate of their HostCore and never block.
//
// A collective runs in rounds of three steps (host/layout.h has the counters):
//   stage    copy what the peers need of my input into my stage
//   combine  where parts have owners (all_reduce, reduce): reduce my part of everybody's stage into my result
//   consume  read the peers' stages or results into my output
// Where all buffers that matter lie in shared heaps (memory/shared_buffers.h), there are no stages: `combine` reads the
// peers' buffers themselves, and `consume` only waits until they have done the same. A rank stages up to kDepth rounds
// ahead of the slowest reader, so the steps of different ranks overlap. The cut into rounds and parts depends on
// (operation, bytes, dtype, ranks) alone, and every element is reduced in rank order, by one rank or, where parts have
// no owners, by each in the same way: the bits are the same everywhere and always.
#pragma once

#include <array>
#include <deque>
#include <list>
#include <map>
#include <vector>

#include "host/work.h"
#include "host/write_mode.h"

namespace axo::host {

class HostCore;

// Where `count` elements are cut into at most n parts, the elements of one: whole cache lines, so that no two ranks
// write to one line.
std::size_t part_of(std::size_t count, std::size_t n, std::size_t item);

class Rounds {
 public:
  explicit Rounds(HostCore& core) : core_(core) {}

  const HostWorkPtr& work() const { return work_; }
  void start(HostWorkPtr work);
  // Moves what can be moved; true when anything moved.
  bool advance();
  // Whether one round is all, or none.
  bool brief() const { return work_ && planned_ && end_ - base_ <= 1; }
  bool complete() const { return headers_ok_ && consumed_ == end_; }
  // This rank is through: forgets the work.
  HostWorkPtr finish();
  HostWorkPtr drop() { return std::move(work_); }
  // Whether the collective cannot complete without something more from `peer`.
  bool needs(int peer) const;
  // A peer that holds the collective up right now, or -1.
  int blocked_by() const;

 private:
  void plan();
  bool can_stage();
  bool check_headers();
  bool check_rows();
  void offer_buffers(CollectiveHeader& header);
  bool all_offered();
  const char* peer_in(int peer) const;
  char* peer_out(int peer) const;
  void plan_shared();
  void combine_shared(std::uint64_t round);
  bool source(int peer) const;
  bool streams() const;
  std::size_t shift(std::uint64_t total) const;
  char* stage_of(int rank, std::uint64_t round) const;
  char* result_of(int rank, std::uint64_t round) const;
  bool have(std::atomic<std::uint64_t> RankState::* counter, std::uint64_t need, std::uint64_t& known, bool sources);
  // Of a large collective whose ranks have a core each; else none.
  WriteMode* write_mode();
  void stage(std::uint64_t round);
  void combine(std::uint64_t round);
  void consume(std::uint64_t round);
  void reduce_stages(std::size_t at, const char* own, char* out, std::size_t count, std::uint64_t round) const;
  void reduce_out(const char* own, char* out, std::size_t count, std::uint64_t round) const;

  HostCore& core_;
  HostWorkPtr work_;
  std::uint64_t next_ = 0;  // the next collective's first round
  std::uint64_t base_ = 0;  // the collective's first round
  std::uint64_t end_ = 0;   // one past its last
  std::uint64_t staged_ = 0, combined_ = 0, consumed_ = 0;
  std::uint64_t placed_ = 0;  // all_gather: from this round on, staging has placed this rank's own piece as well
  std::uint64_t known_posted_ = 0, known_reduced_ = 0, known_done_ = 0;  // minima over peers, as last seen
  std::vector<std::uint64_t> in_offsets_, out_offsets_;                  // of shared buffers, by rank, checked
  std::uint64_t longest_ = 0;  // all_to_all_v: bytes of the longest part of any pair
  std::size_t shift_ = 0;      // bytes into its stage, or part of one, and into its result, where a message begins
  std::size_t per_round_ = 0;  // elements a round: of the whole, or of one part where the operation has parts
  bool headers_ok_ = false;    // all ranks have come and have issued the same operation
  bool planned_ = false;       // what follows is known
  bool stages_ = false;        // this rank copies its input into stages
  bool combines_ = false;      // there is a step `combine`: parts have owners, or all buffers are shared
  bool offered_ = false;       // this rank's buffers are in the heap; the headers tell whether those of all are
  bool shared_ = false;        // the buffers of all ranks are in the heap, so there are no stages
  bool reads_ = false;         // this rank reads from its peers in `consume`
  bool streams_ = false;       // what it writes in `consume` goes past the caches
  bool around_ = false;        // what it writes in `stage` does too, as write_mode() says
  std::array<WriteMode, kKindCount> write_modes_;
};

class Messages {
 public:
  explicit Messages(HostCore& core);
  void add(HostWorkPtr work);
  bool advance();
  // Calls visit(work) for every pending send and recv.
  template <class Visit>
  void for_each(Visit&& visit) const;
  void clear();

 private:
  struct Arrived {
    std::uint64_t id, bytes;
    std::int32_t tag;
    DType dtype;
    bool inlined;
    std::vector<char> payload;
  };
  struct Outgoing {
    std::deque<HostWorkPtr> unposted;
    std::map<std::uint64_t, HostWorkPtr> posted;
    HostWorkPtr streaming;
    std::uint64_t next_id = 0, grants_seen = 0;
  };
  struct Incoming {
    std::list<HostWorkPtr> wanted;
    std::list<Arrived> arrived;
    HostWorkPtr receiving;
  };
  bool advance_out(int peer);
  bool advance_in(int peer);
  bool match(int peer);

  HostCore& core_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::list<HostWorkPtr> any_;  // receives from any rank, until a message has matched
  int pending_ = 0;
};

template <class Visit>
void Messages::for_each(Visit&& visit) const {
  for (const auto& o : out_) {
    for (const auto& w : o.unposted) visit(w);
    for (const auto& [id, w] : o.posted) visit(w);
    if (o.streaming) visit(o.streaming);
  }
  for (const auto& i : in_) {
    for (const auto& w : i.wanted) visit(w);
    if (i.receiving) visit(i.receiving);
  }
  for (const auto& w : any_) visit(w);
}

}  // namespace axo::host

// Progress of one collective; see host/rounds.h. What is copied and reduced stands in host/staged.cpp.
#include "host/rounds.h"

#include <algorithm>
#include <limits>

#include "host/core.h"

namespace axo::host {
namespace {

// Steps before the gate is given back: other communicators and abort() wait for it.
constexpr int kSteps = 64;

}  // namespace

void Rounds::start(HostWorkPtr work) {
  work_ = std::move(work);
  const Request& r = work_->request;
  RankState& me = core_.state(core_.rank());
  base_ = end_ = next_;
  staged_ = combined_ = consumed_ = placed_ = base_;
  known_posted_ = known_reduced_ = known_done_ = 0;
  headers_ok_ = planned_ = stages_ = combines_ = reads_ = offered_ = shared_ = around_ = false;

  CollectiveHeader& h = me.headers[work_->sequence() % kHeaders];
  h = CollectiveHeader{};
  h.sequence = work_->sequence();
  h.operation = r;
  if (r.kind == Kind::all_to_all_v) {
    std::uint64_t* row = core_.layout().row(core_.base(), core_.rank(), work_->sequence());
    std::copy(r.send_bytes.begin(), r.send_bytes.end(), row);
  } else {
    offer_buffers(h);
    if (!offered_) plan();
  }
  // A store to a line that the peers read takes it from them, and all counters lie in one. So of a collective of one
  // round they hear once: it is staged first, and the next one tells that it was done.
  const bool at_once = brief() && can_stage();
  if (at_once) stage(staged_);
  if (me.done.load(std::memory_order_relaxed) != base_) me.done.store(base_, std::memory_order_release);
  me.issued.store(work_->sequence() + 1, std::memory_order_release);
  if (at_once) me.posted.store(++staged_, std::memory_order_release);
  core_.published();
}

// Whether there is a round to stage, and its place is free.
bool Rounds::can_stage() {
  return staged_ < end_ && (staged_ < kDepth || have(&RankState::done, staged_ - kDepth + 1, known_done_, false));
}

// Waits for nobody: false until all have issued this collective. Fails the communicator when they do not agree.
bool Rounds::check_headers() {
  const std::uint64_t s = work_->sequence();
  for (int p = 0; p < core_.size(); ++p) {
    if (core_.state(p).issued.load(std::memory_order_acquire) <= s) return false;
  }
  const CollectiveHeader& mine = core_.state(core_.rank()).headers[s % kHeaders];
  bool equal = true;
  for (int p = 0; p < core_.size(); ++p) {
    const CollectiveHeader& h = core_.state(p).headers[s % kHeaders];
    equal &= h.sequence == mine.sequence && h.operation == mine.operation;
  }
  if (!equal) {
    std::string text;
    for (int p = 0; p < core_.size(); ++p) {
      text +=
          (p ? "; rank " : "rank ") + std::to_string(p) + ": " + words(core_.state(p).headers[s % kHeaders].operation);
    }
    core_.fail({FailureKind::mismatch, -1, "operation #" + std::to_string(s) + " differs between ranks: " + text});
    return false;
  }
  if (mine.operation.kind == Kind::all_to_all_v && !check_rows()) return false;
  if (!planned_ && offered_ && all_offered()) {
    plan_shared();
  } else if (!planned_) {
    plan();
  }
  return true;
}

// all_to_all_v: what a peer sends me must be what I expect, and nobody sends more than a machine can hold.
bool Rounds::check_rows() {
  const Request& r = work_->request;
  constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
  longest_ = 0;
  for (int p = 0; p < core_.size(); ++p) {
    const std::uint64_t* row = core_.layout().row(core_.base(), p, work_->sequence());
    for (int q = 0; q < core_.size(); ++q) longest_ = std::max(longest_, row[q]);
  }
  if (longest_ > kMost) {
    core_.fail(
        {FailureKind::mismatch, -1, "all_to_all_v: a rank sends an impossible " + std::to_string(longest_) + " bytes"});
    return false;
  }
  for (int p = 0; p < core_.size(); ++p) {
    const std::uint64_t sent = core_.layout().row(core_.base(), p, work_->sequence())[core_.rank()];
    const std::uint64_t expected = r.recv_bytes[static_cast<std::size_t>(p)];
    if (sent == expected) continue;
    const std::size_t item = item_size(r.dtype);
    core_.fail({FailureKind::mismatch, -1,
                "operation #" + std::to_string(work_->sequence()) + " differs between ranks: rank " +
                    std::to_string(p) + " sends " + std::to_string(sent / item) + " elements to rank " +
                    std::to_string(core_.rank()) + ", which expects " + std::to_string(expected / item)});
    return false;
  }
  return true;
}

bool Rounds::source(int peer) const {
  const Request& r = work_->request;
  if (peer == core_.rank()) return false;
  if (r.kind == Kind::broadcast || r.kind == Kind::scatter) return peer == r.root;
  if (r.kind == Kind::gather) return core_.rank() == r.root;
  return true;
}

bool Rounds::have(std::atomic<std::uint64_t> RankState::* counter, std::uint64_t need, std::uint64_t& known,
                  bool sources) {
  if (known >= need) return true;
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (int p = 0; p < core_.size(); ++p) {
    if (p == core_.rank() || (sources && !source(p))) continue;
    least = std::min(least, (core_.state(p).*counter).load(std::memory_order_acquire));
    if (least < need) return false;
  }
  known = least;
  return true;
}

bool Rounds::advance() {
  RankState& me = core_.state(core_.rank());
  bool moved = false;
  for (int steps = 0; steps < kSteps; ++steps) {
    if (!headers_ok_ && (headers_ok_ = check_headers())) moved = true;
    if (!planned_ || !work_) return moved;
    if (headers_ok_) {
      if (consumed_ < staged_ && consumed_ < combined_ &&
          (!reads_ || (combines_ ? have(&RankState::reduced, consumed_ + 1, known_reduced_, false)
                                 : have(&RankState::posted, consumed_ + 1, known_posted_, true)))) {
        if (!shared_) consume(consumed_);
        ++consumed_;
        moved = true;
        if (brief()) continue;
        me.done.store(consumed_, std::memory_order_release);
        core_.published();
        continue;
      }
      if (combines_ && combined_ < staged_ &&
          (shared_ || have(&RankState::posted, combined_ + 1, known_posted_, false))) {
        shared_ ? combine_shared(combined_) : combine(combined_);
        me.reduced.store(++combined_, std::memory_order_release);
        core_.published();
        moved = true;
        continue;
      }
    }
    if (can_stage()) {
      WriteMode* const mode = this->write_mode();
      around_ = mode != nullptr && mode->around();
      stage(staged_);
      if (mode != nullptr) mode->staged(Clock::now());
      me.posted.store(++staged_, std::memory_order_release);
      core_.published();
      moved = true;
      continue;
    }
    return moved;
  }
  return moved;
}

HostWorkPtr Rounds::finish() {
  next_ = end_;
  return std::move(work_);
}

bool Rounds::needs(int peer) const {
  if (!work_ || peer == core_.rank()) return false;
  const RankState& p = core_.state(peer);
  if (p.issued.load(std::memory_order_acquire) <= work_->sequence()) return true;
  if (!planned_) return false;
  const bool wants_stage = combines_ || (reads_ && source(peer));
  if (wants_stage && !shared_ && p.posted.load(std::memory_order_acquire) < end_) return true;
  if (combines_ && reads_ && p.reduced.load(std::memory_order_acquire) < end_) return true;
  return stages_ && staged_ < end_ && p.done.load(std::memory_order_acquire) + kDepth < end_;
}

int Rounds::blocked_by() const {
  if (!work_) return -1;
  const int n = core_.size();
  for (int i = 1; i < n; ++i) {
    const int p = (core_.rank() + i) % n;
    if (core_.state(p).issued.load(std::memory_order_acquire) <= work_->sequence()) return p;
  }
  if (!planned_) return -1;
  for (int i = 1; i < n; ++i) {
    const int p = (core_.rank() + i) % n;
    const RankState& s = core_.state(p);
    if (combines_ && !shared_ && combined_ < staged_ && s.posted.load(std::memory_order_acquire) <= combined_) return p;
    if (reads_ && !combines_ && source(p) && s.posted.load(std::memory_order_acquire) <= consumed_) return p;
    if (reads_ && combines_ && consumed_ < combined_ && s.reduced.load(std::memory_order_acquire) <= consumed_)
      return p;
  }
  for (int i = 1; i < n; ++i) {
    const int p = (core_.rank() + i) % n;
    if (staged_ < end_ && core_.state(p).done.load(std::memory_order_acquire) + kDepth <= staged_) return p;
  }
  return -1;
}

}  // namespace axo::host

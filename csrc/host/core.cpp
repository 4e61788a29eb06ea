// The gate, the queues, the failure of one communicator and what it says then; see host/core.h.
#include "host/core.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

namespace axo::host {

// A receive from any rank names the one whose message it has taken.
Operation HostWork::operation() const {
  Operation operation = request;
  if (operation.point_to_point()) operation.root = peer();
  return operation;
}

HostCore::HostCore(Membership membership)
    : CpuCore(membership.member, membership.timeout,
              Layout(membership.member.size).header(membership.segment->base())->id),
      m_(std::move(membership)),
      layout_(size()),
      base_(m_.segment->base()),
      rounds_(*this),
      messages_(*this) {
  engine_.meet(m_.processes);
}

void HostCore::queue(const WorkStatePtr* works, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) incoming_.push_back(std::static_pointer_cast<HostWork>(works[i]));
  has_incoming_.store(true, std::memory_order_release);
}

void HostCore::start() {
  engine_.record_core();
  progress(false);
}

// Gate: 0 free, 1 held, 2 held and somebody was turned away.
bool HostCore::enter() {
  int seen = 0;
  for (;;) {
    if (seen == 0) {
      if (gate_.compare_exchange_weak(seen, 1, std::memory_order_acquire)) return true;
    } else if (seen == 2 || gate_.compare_exchange_weak(seen, 2, std::memory_order_acq_rel)) {
      return false;
    }
  }
}

void HostCore::leave() {
  if (gate_.exchange(0, std::memory_order_acq_rel) == 2) engine_.self()->ring();
}

bool HostCore::progress(bool check) {
  if (pending.load(std::memory_order_acquire) == 0 || !enter()) return false;
  const bool moved = step(check);
  return leave_and_complete() || moved;
}

// Operations that have ended are complete before another thread comes in: it may complete later ones. Whoever waits for
// them is told outside of the gate.
bool HostCore::leave_and_complete() {
  Ended ended;
  ended.swap(ended_);
  const bool tell = std::exchange(tell_flight_, false);
  if (!ended.empty() && !tell) settle(ended);
  leave();
  if (ended.empty() && !tell) return false;
  const auto self = shared_from_this();  // the last work may hold the last reference
  end(ended, tell);
  if (ended.empty()) return false;
  if (released_.load() && pending.load() == 0) release();
  return true;
}

bool HostCore::step(bool check) {
  if (layout_.header(base_)->aborts.load(std::memory_order_acquire) != 0) {
    // What was there before the abort may still complete; what comes after it does not begin.
    if (!failed()) advance();
    take_incoming();
    if (!failed()) adopt_abort();
  }
  take_incoming();
  if (failed()) {
    end_all();
    ring_if_published();
    return true;
  }
  bool moved = advance();
  if (!failed()) {
    if (adopt_abort())
      moved = true;
    else if (check)
      look_at_peers();
  }
  ring_if_published();
  return moved;
}

void HostCore::take_incoming() {
  if (!has_incoming_.load(std::memory_order_acquire)) return;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    taken_.swap(incoming_);
    has_incoming_.store(false, std::memory_order_release);
  }
  for (auto& work : taken_) {
    if (work->request.point_to_point()) {
      flight_->started(work->flight());
      messages_.add(std::move(work));
    } else {
      queue_.push_back(std::move(work));
    }
  }
  taken_.clear();
}

bool HostCore::advance() {
  bool moved = false;
  for (;;) {
    if (!rounds_.work()) {
      if (queue_.empty()) break;
      HostWorkPtr next = std::move(queue_.front());
      queue_.pop_front();
      flight_->started(next->flight());
      rounds_.start(std::move(next));
      moved = true;
    }
    moved |= rounds_.advance();
    if (!rounds_.work() || !rounds_.complete()) break;
    complete(rounds_.finish());
  }
  if (!failed()) moved |= messages_.advance();
  return moved;
}

void HostCore::published() {
  publish_pending_ = true;
  // One ring at the end of the step; where ranks share cores the peer would only take this one away.
  if (!engine_.crowded() && !rounds_.brief()) ring_if_published();
}

void HostCore::ring_if_published() {
  if (!std::exchange(publish_pending_, false)) return;
  for (int p = 0; p < size(); ++p) ring(p);
}

void HostCore::ring(int peer) {
  if (peer != rank()) process(peer).ring();
}

void HostCore::complete(HostWorkPtr work) { ended_.emplace_back(std::move(work), nullptr); }

// Whether `work` cannot end without `peer`, who is dead or has left.
bool HostCore::waits_for(const HostWork& work, int peer) const {
  if (work.request.point_to_point()) {
    if (work.peer() != kAnyPeer) return work.peer() == peer;
    if (!left(peer)) return true;  // it died, perhaps before it sent the message that was to come
    for (int p = 0; p < size(); ++p) {
      if (p != rank() && !left(p)) return false;
    }
    return true;
  }
  return rounds_.work().get() == &work && rounds_.needs(peer);
}

// Dead peers and timeouts. What a peer wrote before its end still counts: look at the life words first, then move what
// can be moved, then judge.
void HostCore::look_at_peers() {
  std::vector<int> gone;
  for (int p = 0; p < size(); ++p) {
    if (p == rank()) continue;
    if (process(p).dead() || left(p)) gone.push_back(p);
  }
  if (!gone.empty()) {
    // Who died without a word comes before who left, and perhaps ended since: that one left because of the other.
    std::stable_partition(gone.begin(), gone.end(), [this](int p) { return !left(p); });
    advance();
    if (failed() || adopt_abort()) return;  // its last word may be why it is gone
    int lost = -1;
    for (int p : gone) {
      const auto judge = [&](const HostWorkPtr& work) {
        if (lost < 0 && waits_for(*work, p)) lost = p;
      };
      if (rounds_.work()) judge(rounds_.work());
      messages_.for_each(judge);
    }
    if (lost >= 0) {
      fail({FailureKind::peer_lost, lost, left(lost) ? "left" : "died"});
      return;
    }
  }
  report_crossing();
  const auto now = Clock::now();
  HostWorkPtr late;
  const auto judge = [&](const HostWorkPtr& work) {
    if (!late && now >= work->deadline()) late = work;
  };
  if (rounds_.work()) judge(rounds_.work());
  for (const auto& work : queue_) judge(work);
  messages_.for_each(judge);
  if (late) fail({FailureKind::timeout, rank(), timeout_text(*late)});
}

// The communicator has failed at this rank: everything pending ends, and the peers are told why.
void HostCore::fail(const Failure& failure) {
  if (!set_failure(failure)) return;
  AbortRecord& record = state(rank()).abort;
  record.kind = failure.kind;
  record.peer = failure.peer;
  const std::string text = clipped(failure.text, kAbortText - 1);
  std::memcpy(record.text, text.c_str(), text.size() + 1);
  auto& tickets = layout_.header(base_)->aborts;
  record.ticket = tickets.load(std::memory_order_relaxed);
  record.state.store(1, std::memory_order_release);
  tickets.fetch_add(1, std::memory_order_acq_rel);
  tell_flight_ = true;
  for (int p = 0; p < size(); ++p) ring(p);
  end_all();
}

// Takes over the failure that a peer has told; false when there is none.
bool HostCore::adopt_abort() {
  if (layout_.header(base_)->aborts.load(std::memory_order_acquire) == 0) return false;
  int first = -1;
  for (int p = 0; p < size(); ++p) {
    const AbortRecord& r = state(p).abort;
    if (r.state.load(std::memory_order_acquire) != 1) continue;
    if (first < 0 || r.ticket < state(first).abort.ticket) first = p;
  }
  if (first < 0) return false;
  const AbortRecord& r = state(first).abort;
  fail(told_by(first, size(), r.kind, r.peer, r.text, kAbortText));
  return true;
}

void HostCore::end_all() {
  const auto end = [&](const HostWorkPtr& work) { ended_.emplace_back(work, error_for(*work)); };
  if (rounds_.work()) end(rounds_.drop());
  for (const auto& work : queue_) end(work);
  queue_.clear();
  messages_.for_each(end);
  messages_.clear();
}

void HostCore::abort(const Failure& failure) {
  // Until this rank has left: a shutdown that waits for pending operations is one of those whom an abort frees.
  if (engine_.forked() || left(rank())) return;
  while (!enter()) std::this_thread::yield();  // a step is short
  if (!failed()) {
    take_incoming();
    fail(failure);
  }
  leave_and_complete();
}

void HostCore::shutdown() {
  if (engine_.forked()) {
    closed_.store(true);
    return;
  }
  if (close()) return;  // what comes after this is refused, what came before is done
  engine_.wait(*this, [this] { return pending.load(std::memory_order_acquire) == 0; }, Clock::time_point::max());
  release();
}

void HostCore::release() {
  if (engine_.forked()) return;
  released_.store(true);
  if (pending.load() > 0) {
    engine_.watch();
    return;
  }
  closed_.store(true);
  if (state(rank()).left.exchange(1, std::memory_order_acq_rel) != 0) return;
  for (int p = 0; p < size(); ++p) ring(p);
  engine_.remove(this);
}

std::string HostCore::place_of(int rank) const { return " (process " + std::to_string(process(rank).pid()) + ")"; }

std::exception_ptr HostCore::failure() {
  const bool told = layout_.header(base_)->aborts.load(std::memory_order_acquire) != 0;
  const bool here = !engine_.forked() && !left(rank());
  if (told && here && !failed() && enter()) {
    step(false);  // what the peer had finished before it failed completes here too
    leave_and_complete();
  }
  return CpuCore::failure();
}

// Where a peer stands, as far as its headers tell.
std::string HostCore::peer_position(int peer) const {
  const RankState& s = state(peer);
  if (process(peer).dead()) return "died";
  if (left(peer)) return "left";
  const std::uint64_t issued = s.issued.load(std::memory_order_acquire);
  if (issued == 0) return "has issued nothing";
  int on = 0;
  const std::string blocked = process(peer).blocked(&on);
  const bool own = process(peer).pid() == engine_.self()->pid();  // ranks that are threads: the page may mean another
  const std::string where = own || blocked.empty() ? "" : ", is blocked in " + blocked;
  return "last issued " + std::string(name_of(s.headers[(issued - 1) % kHeaders].operation.kind)) + " #" +
         std::to_string(issued - 1) + where;
}

std::string HostCore::blocked_in(int* on) {
  *on = 0;
  if (!enter()) return "an operation on '" + member().name + "'";
  std::string text;
  if (rounds_.work()) {
    text = rounds_.work()->describe();
    const int peer = rounds_.blocked_by();
    if (peer >= 0) *on = process(peer).pid();
  } else {
    messages_.for_each([&](const HostWorkPtr& work) {
      if (!text.empty()) return;
      text = work->describe();
      if (work->peer() != kAnyPeer) *on = process(work->peer()).pid();
    });
  }
  leave();
  return text;
}

// Blocking calls in crossed order on two communicators wait for each other for ever. Another thread of the program
// could still resolve it, so this is told on stderr and the timeout decides.
void HostCore::report_crossing() {
  constexpr auto kSuspicious = std::chrono::seconds(2);
  const HostWorkPtr& work = rounds_.work();
  if (!work || reported_ == work->sequence() + 1 || Clock::now() - work->issue_time() < kSuspicious) return;
  const int peer = rounds_.blocked_by();
  if (peer < 0 || state(peer).issued.load(std::memory_order_acquire) > work->sequence()) return;
  int on = 0, mine = 0;
  const std::string there = process(peer).blocked(&on);
  engine_.self()->blocked(&mine);
  const int pid = engine_.self()->pid();
  if (there.empty() || on != pid || mine != process(peer).pid() || mine == pid) return;
  reported_ = work->sequence() + 1;
  std::fprintf(stderr,
               "axo: %s waits for rank %d, which waits for this process in %s: are these calls in crossed order? The "
               "timeout will end them.\n",
               work->describe().c_str(), peer, there.c_str());
}

std::string HostCore::timeout_text(const HostWork& work) const {
  std::string text = work.timed_out() + " in " + work.title();
  if (work.request.point_to_point()) {
    const int peer = work.peer();
    if (peer == kAnyPeer) {
      std::string others;
      for (int p = 0; p < size(); ++p) {
        if (p != rank()) others += (others.empty() ? "" : ", ") + std::to_string(p) + " (" + peer_position(p) + ")";
      }
      return text + "; no rank has sent such a message: " + (others.empty() ? "there is no other" : others);
    }
    return text + "; rank " + std::to_string(peer) + " did not answer (" + peer_position(peer) + ")";
  }
  const auto has_come = [&](int p) { return state(p).issued.load(std::memory_order_acquire) > work.sequence(); };
  return text + arrivals(has_come, [&](int p) { return std::to_string(p) + " (" + peer_position(p) + ")"; });
}

}  // namespace axo::host

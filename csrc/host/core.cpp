// The gate, the queues and the failure of one communicator; see host/core.h. Messages stand in host/errors.cpp.
#include "host/core.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace axo::host {

HostCore::HostCore(Membership membership)
    : engine_(Engine::get()),
      m_(std::move(membership)),
      layout_(m_.size),
      base_(m_.segment->base()),
      flight_(std::make_shared<FlightRecorder>(m_.name, m_.rank, m_.size, layout_.header(base_)->id)),
      rounds_(*this),
      messages_(*this) {
  engine_.meet(m_.processes);
  engine_.flight().add(flight_);
}

void HostCore::record_issue(HostWork& work) {
  const Request& r = work.request;
  const bool reduces = r.kind == Kind::all_reduce || r.kind == Kind::reduce || r.kind == Kind::reduce_scatter;
  const bool rooted = r.point_to_point() || r.kind == Kind::broadcast || r.kind == Kind::reduce ||
                      r.kind == Kind::gather || r.kind == Kind::scatter;
  FlightEntry e;
  e.op = name_of(r.kind);
  e.sequence = work.sequence;
  e.dtype = r.dtype;
  e.count = r.count;
  e.reduce = reduces ? name_of(r.op) : nullptr;
  e.root = rooted ? r.root : -1;
  e.tag = r.tag;
  e.issued = work.issue_time();
  work.flight = flight_->issued(e);
}

void HostCore::submit(const std::vector<HostWorkPtr>& works) {
  engine_.sit();
  {
    std::unique_lock<std::mutex> lock(incoming_mutex_);
    if (closed_.load(std::memory_order_relaxed)) {  // by another thread, since check_usable
      lock.unlock();
      return refuse(works);
    }
    for (const auto& work : works) {
      work->issued(work->request.point_to_point() ? next_message_++ : next_sequence_++);
      record_issue(*work);
      incoming_.push_back(work);
      pending.fetch_add(1);
      engine_.started();
    }
    has_incoming_.store(true, std::memory_order_release);
  }
  progress(false);
}

void HostCore::refuse(const std::vector<HostWorkPtr>& works) const {
  for (const auto& work : works) {
    work->issued(0);
    work->complete(std::make_exception_ptr(
        Error(std::string(name_of(work->request.kind)) + " on '" + m_.name + "': the communicator is closed")));
  }
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

// Leaves the gate, then tells whoever waits for the operations that have ended.
bool HostCore::leave_and_complete() {
  std::vector<std::pair<HostWorkPtr, std::exception_ptr>> ended;
  ended.swap(ended_);
  const bool tell = std::exchange(tell_flight_, false);
  leave();
  for (const auto& [work, error] : ended) flight_->ended(work->flight, error != nullptr);
  if (tell) engine_.flight().write();
  if (ended.empty()) return false;
  const auto self = shared_from_this();  // the last work may hold the last reference
  for (auto& [work, error] : ended) {
    work->complete(error);
    engine_.finished();
    pending.fetch_sub(1);
  }
  engine_.self()->ring();  // threads that wait for these works
  if (released_.load() && pending.load() == 0) release();
  return true;
}

bool HostCore::step(bool check) {
  if (layout_.header(base_)->aborts.load(std::memory_order_acquire) != 0) {
    // What was there before the abort may still complete; what comes after it does not begin.
    if (!failed_.load(std::memory_order_relaxed)) advance();
    take_incoming();
    if (!failed_.load(std::memory_order_relaxed)) adopt_abort();
  }
  take_incoming();
  if (failed_.load(std::memory_order_relaxed)) {
    end_all();
    return true;
  }
  bool moved = advance();
  if (!failed_.load(std::memory_order_relaxed)) {
    if (adopt_abort())
      moved = true;
    else if (check)
      look_at_peers();
  }
  if (publish_pending_) {
    publish_pending_ = false;
    for (int p = 0; p < m_.size; ++p) ring(p);
  }
  return moved;
}

void HostCore::take_incoming() {
  if (!has_incoming_.load(std::memory_order_acquire)) return;
  std::vector<HostWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);
    works.swap(incoming_);
    has_incoming_.store(false, std::memory_order_release);
  }
  for (auto& work : works) {
    if (work->request.point_to_point()) {
      flight_->started(work->flight);
      messages_.add(std::move(work));
    } else {
      queue_.push_back(std::move(work));
    }
  }
}

bool HostCore::advance() {
  bool moved = false;
  for (;;) {
    if (!rounds_.work()) {
      if (queue_.empty()) break;
      HostWorkPtr next = std::move(queue_.front());
      queue_.pop_front();
      flight_->started(next->flight);
      rounds_.start(std::move(next));
      moved = true;
    }
    moved |= rounds_.advance();
    if (!rounds_.work() || !rounds_.complete()) break;
    complete(rounds_.finish());
  }
  if (!failed_.load(std::memory_order_relaxed)) moved |= messages_.advance();
  return moved;
}

void HostCore::published() {
  publish_pending_ = true;
  if (engine_.crowded()) return;  // one ring at the end of the step: the peer would only take this core away
  publish_pending_ = false;
  for (int p = 0; p < m_.size; ++p) ring(p);
}

void HostCore::ring(int peer) {
  if (peer != m_.rank) m_.processes[static_cast<std::size_t>(peer)]->ring();
}

void HostCore::complete(HostWorkPtr work) { ended_.emplace_back(std::move(work), nullptr); }

// Whether `work` cannot end without `peer`, who is dead or has left.
bool HostCore::waits_for(const HostWork& work, int peer) const {
  if (work.request.point_to_point()) {
    if (work.peer() != kAnyPeer) return work.peer() == peer;
    const auto left = [this](int p) { return state(p).left.load(std::memory_order_acquire) != 0; };
    if (!left(peer)) return true;  // it died, perhaps before it sent the message that was to come
    for (int p = 0; p < m_.size; ++p) {
      if (p != m_.rank && !left(p)) return false;
    }
    return true;
  }
  return rounds_.work().get() == &work && rounds_.needs(peer);
}

// Dead peers and timeouts. What a peer wrote before its end still counts: look at the life words first, then move what
// can be moved, then judge.
void HostCore::look_at_peers() {
  std::vector<int> gone;
  for (int p = 0; p < m_.size; ++p) {
    if (p == m_.rank) continue;
    if (m_.processes[static_cast<std::size_t>(p)]->dead() || state(p).left.load(std::memory_order_acquire) != 0) {
      gone.push_back(p);
    }
  }
  if (!gone.empty()) {
    // Who died without a word comes before who left, and perhaps ended since: that one left because of the other.
    const auto left = [this](int p) { return state(p).left.load(std::memory_order_acquire) != 0; };
    std::stable_partition(gone.begin(), gone.end(), [&](int p) { return !left(p); });
    advance();
    if (failed_.load(std::memory_order_relaxed)) return;
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
  if (late) fail({FailureKind::timeout, m_.rank, timeout_text(*late)});
}

// The communicator has failed at this rank: everything pending ends, and the peers are told why.
void HostCore::fail(const Failure& failure) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_.kind != FailureKind::none) return;
    failure_ = failure;
  }
  AbortRecord& record = state(m_.rank).abort;
  record.kind = failure.kind;
  record.peer = failure.peer;
  const std::string text = clipped(failure.text, kAbortText - 1);
  std::memcpy(record.text, text.c_str(), text.size() + 1);
  auto& tickets = layout_.header(base_)->aborts;
  record.ticket = tickets.load(std::memory_order_relaxed);
  record.state.store(1, std::memory_order_release);
  tickets.fetch_add(1, std::memory_order_acq_rel);
  failed_.store(true, std::memory_order_release);
  const bool about_peer = failure.kind == FailureKind::peer_lost || failure.kind == FailureKind::timeout;
  flight_->failure((about_peer ? "rank " + std::to_string(failure.peer) + " " : "") + failure.text);
  tell_flight_ = true;
  for (int p = 0; p < m_.size; ++p) ring(p);
  end_all();
}

// Takes over the failure that a peer has told; false when there is none.
bool HostCore::adopt_abort() {
  if (layout_.header(base_)->aborts.load(std::memory_order_acquire) == 0) return false;
  int first = -1;
  for (int p = 0; p < m_.size; ++p) {
    const AbortRecord& r = state(p).abort;
    if (r.state.load(std::memory_order_acquire) != 1) continue;
    if (first < 0 || r.ticket < state(first).abort.ticket) first = p;
  }
  if (first < 0) return false;
  const AbortRecord& r = state(first).abort;
  Failure failure;
  failure.kind = r.kind;
  failure.peer = r.peer;
  failure.text.assign(r.text, ::strnlen(r.text, kAbortText));
  const auto kind = static_cast<std::uint32_t>(failure.kind);
  if (kind == 0 || kind > static_cast<std::uint32_t>(FailureKind::aborted) || failure.peer < -1 ||
      failure.peer >= m_.size) {
    failure = {FailureKind::aborted, -1, "rank " + std::to_string(first) + " aborted without a valid reason"};
  }
  fail(failure);
  return true;
}

void HostCore::end_all() {
  const auto end = [&](const HostWorkPtr& work) {
    ended_.emplace_back(work, error_for(*work));
    told_.store(true);
  };
  if (rounds_.work()) end(rounds_.drop());
  for (const auto& work : queue_) end(work);
  queue_.clear();
  messages_.for_each(end);
  messages_.clear();
}

void HostCore::abort(const std::string& reason) {
  // Until this rank has left: a shutdown that waits for pending operations is one of those whom an abort frees.
  if (engine_.forked() || state(m_.rank).left.load(std::memory_order_acquire) != 0) return;
  while (!enter()) std::this_thread::yield();  // a step is short
  if (!failed_.load()) {
    take_incoming();
    fail({FailureKind::aborted, -1, reason});
  }
  leave_and_complete();
}

void HostCore::shutdown() {
  if (engine_.forked()) {
    closed_.store(true);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);  // what comes after this is refused, what came before is done
    if (closed_.exchange(true)) return;
  }
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
  if (state(m_.rank).left.exchange(1, std::memory_order_acq_rel) != 0) return;
  for (int p = 0; p < m_.size; ++p) ring(p);
  engine_.remove(this);
}

}  // namespace axo::host

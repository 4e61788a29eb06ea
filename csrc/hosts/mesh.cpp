// Readers, writers and frames; see hosts/mesh.h.
#include "hosts/mesh.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace axo::hosts {
namespace {

constexpr std::chrono::seconds kFlush{5};      // for peers to read why a communicator ends
constexpr std::chrono::seconds kPatience{10};  // for a payload on its way, which ends unless the peer hangs

void check(const Head& head) {
  const std::uint64_t most = head.frame == FrameKind::data ? kMostPayload : std::uint64_t{1} << 40;
  const bool ok = head.magic == Head::kMagic && head.communicator != 0 && head.frame <= FrameKind::abort &&
                  head.bytes <= most && head.failure <= FailureKind::aborted;
  if (!ok) throw Error("a frame that is not one of Axo's");
}

}  // namespace

void Mesh::add(std::uint64_t communicator, const std::shared_ptr<Sink>& sink) {
  Lock lock(mutex_);
  lines_[communicator].sink = sink;
  if (std::exchange(started_, true)) return;
  for (int p = 0; p < wire_->size(); ++p) {
    if (p == wire_->rank()) continue;
    std::thread([self = shared_from_this(), p] { self->run_reader(p); }).detach();
    std::thread([self = shared_from_this(), p] { self->run_writer(p); }).detach();
  }
}

void Mesh::remove(std::uint64_t communicator) {
  Lock lock(mutex_);
  lines_.erase(communicator);
  if (lines_.empty()) close(lock);
}

void Mesh::close(Lock& lock) {
  closed_ = true;
  for (Peer& p : peers_) p.changed.notify_all();
  lock.unlock();
  for (int p = 0; p < wire_->size(); ++p) wire_->close(p);
  lock.lock();
}

void Mesh::read(int from) {
  Head head;
  wire_->receive(from, &head, sizeof(head));
  check(head);
  std::shared_ptr<Sink> sink;
  {
    Lock lock(mutex_);
    const auto line = lines_.find(head.communicator);
    if (line != lines_.end()) sink = line->second.sink.lock();
    peer(from).reading = head.communicator;
  }
  char* const to = sink && head.frame == FrameKind::data ? sink->place(from, head) : nullptr;
  if (head.apart()) {
    std::vector<char> nowhere(to == nullptr ? head.bytes : 0);
    wire_->receive(from, to == nullptr ? nowhere.data() : to, head.bytes);
  } else if (to != nullptr && head.bytes != 0) {
    std::memcpy(to, head.text, head.bytes);
  }
  if (sink) sink->arrived(from, head);
  Lock lock(mutex_);
  peer(from).reading = 0;
  idle_.notify_all();
}

void Mesh::run_reader(int from) {
  ::prctl(PR_SET_NAME, "axo-hosts", 0, 0, 0);
  try {
    for (;;) read(from);
  } catch (const std::exception&) {  // it is gone, or sends nonsense
  }
  wire_->close(from);  // a send that is under way may not have found that
  Lock lock(mutex_);
  peer(from).reading = 0;
  peer(from).gone = true;
  idle_.notify_all();
}

void Mesh::run_writer(int to) {
  ::prctl(PR_SET_NAME, "axo-hosts", 0, 0, 0);
  Peer& p = peer(to);
  Lock lock(mutex_);
  while (!closed_) {
    if (!p.posted.empty()) {
      const Head& head = p.posted.front();
      send_unlocked(lock, [&] { wire_->send(to, {&head, sizeof(head)}, {}); });
      p.posted.pop_front();
      idle_.notify_all();
    } else if (p.transfers.empty()) {
      p.changed.wait(lock);
    } else if (const auto due = leaves(p.transfers.front()); due > Clock::now()) {
      p.changed.wait_until(lock, due);
    } else {
      write_chunk(lock, to);
    }
  }
}

// When the next chunk may leave. Time on the link is reserved from the end of the last one, so that a late wake-up
// costs no bandwidth.
Clock::time_point Mesh::leaves(Transfer& t) const {
  if (t.leaves != Clock::time_point{}) return t.leaves;
  if (Clock::now() < t.since) return t.since;
  return t.leaves = limit_.reserve(std::min(limit_.chunk(), t.bytes - t.at), t.since);
}

void Mesh::write_chunk(Lock& lock, int to) {
  Peer& p = peer(to);
  Transfer t = std::move(p.transfers.front());
  p.transfers.pop_front();
  p.writing = t.head.communicator;
  t.head.bytes = std::min(limit_.chunk(), t.bytes - t.at);
  const bool ok = send_unlocked(lock, [&] {
    if (!t.head.apart() && t.head.bytes != 0) std::memcpy(t.head.text, t.data + t.at, t.head.bytes);
    wire_->send(to, {&t.head, sizeof(t.head)}, t.head.apart() ? Bytes{t.data + t.at, t.head.bytes} : Bytes{});
  });
  t.at += t.head.bytes;
  t.since = std::exchange(t.leaves, Clock::time_point{});
  const auto line = lines_.find(t.head.communicator);
  const bool wanted = line != lines_.end() && !line->second.dropped;
  if (wanted && ok && t.at < t.bytes) {
    p.transfers.push_back(std::move(t));
  } else if (wanted) {
    send_unlocked(lock, [&] { t.sent(ok); });
  }
  p.writing = 0;
  idle_.notify_all();
}

bool Mesh::send_unlocked(Lock& lock, const std::function<void()>& send) {
  bool ok = true;
  lock.unlock();
  try {
    send();
  } catch (const std::exception&) {
    ok = false;  // the peer is gone
  }
  lock.lock();
  return ok;
}

void Mesh::post(int to, const Head& head) {
  Peer& p = peer(to);
  Lock lock(mutex_);
  p.posted.push_back(head);
  p.changed.notify_one();
}

bool Mesh::send(int to, const Head& head, const char* data, std::size_t bytes, std::function<void(bool)> sent) {
  Peer& p = peer(to);
  Lock lock(mutex_);
  const auto line = lines_.find(head.communicator);
  if (p.gone || line == lines_.end() || line->second.dropped) return false;
  p.transfers.push_back({head, data, bytes, std::move(sent), Clock::now() + limit_.latency()});
  p.transfers.back().head.total = bytes;
  p.changed.notify_one();
  return true;
}

void Mesh::drop(std::uint64_t communicator) {
  Lock lock(mutex_);
  const auto mine = [&](const Head& h) { return h.communicator == communicator; };
  const auto told = [&](const Peer& p) { return p.gone || std::none_of(p.posted.begin(), p.posted.end(), mine); };
  idle_.wait_for(lock, kFlush, [&] { return closed_ || std::all_of(peers_.begin(), peers_.end(), told); });
  lines_[communicator].dropped = true;
  for (Peer& p : peers_) {
    const auto waits = [&](const Transfer& t) { return mine(t.head); };
    p.transfers.erase(std::remove_if(p.transfers.begin(), p.transfers.end(), waits), p.transfers.end());
  }
  const auto untouched = [&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [&](const Peer& p) { return p.writing == communicator || p.reading == communicator; });
  };
  if (idle_.wait_for(lock, kPatience, untouched)) return;
  close(lock);  // a peer stopped in the middle of a payload
  idle_.wait(lock, untouched);
}

bool Mesh::gone(int rank) {
  Lock lock(mutex_);
  return peer(rank).gone;
}

}  // namespace axo::hosts

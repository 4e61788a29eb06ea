// The queue, the arrivals and the failure of one communicator over several hosts; see span_core.h.
#include "span_core.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace axo::span {
namespace {

constexpr std::chrono::seconds kPatience{10};  // for what ends by itself unless a peer hangs
constexpr std::chrono::seconds kFlush{5};

Signature signature_of(const Request& r) {
  return {static_cast<std::uint32_t>(r.kind), static_cast<std::uint32_t>(r.dtype), static_cast<std::uint32_t>(r.op),
          r.root, r.count};
}

}  // namespace

SpanCore::SpanCore(SpanParts parts)
    : p_(std::move(parts)),
      flight_(
          std::make_shared<host::FlightRecorder>(p_.name, p_.rank, static_cast<int>(p_.place.wire.size()), p_.number)),
      peers_(p_.place.wire.size()) {}

std::shared_ptr<SpanCore> SpanCore::create(SpanParts parts) {
  std::shared_ptr<SpanCore> core(new SpanCore(std::move(parts)));
  host::Engine::get().flight().add(core->flight_);
  core->p_.mesh->add(core->p_.number, core);
  std::thread([core] { core->run(); }).detach();
  return core;
}

int SpanCore::rank_of(int wire_rank) const {
  const auto at = std::find(p_.place.wire.begin(), p_.place.wire.end(), wire_rank);
  return at == p_.place.wire.end() ? -1 : static_cast<int>(at - p_.place.wire.begin());
}

void SpanCore::submit(const std::vector<SpanWorkPtr>& works) {
  std::vector<SpanWorkPtr> messages;
  Failure failure;
  {
    Lock lock(mutex_);
    for (const auto& work : works) {
      const bool message = work->request.point_to_point();
      work->issued(message ? next_message_++ : next_sequence_++);
      record_issue(*work);
      if (message) {
        messages.push_back(work);
        continue;
      }
      mine_[work->sequence] = signature_of(work->request);
      for (int r = 0; r < size(); ++r) {
        auto& ahead = peers_[static_cast<std::size_t>(r)].ahead;
        const auto found = ahead.find(work->sequence);
        if (found == ahead.end()) continue;
        compare(r, work->sequence, found->second, &failure);
        ahead.erase(found);
      }
      queue_.push_back(work);
    }
  }
  if (failure.kind != FailureKind::none) fail(failure, true);
  changed_.notify_all();
  for (const auto& work : messages) submit_message(work);
}

// The communicator's thread: collectives in issue order.
void SpanCore::run() {
  for (;;) {
    SpanWorkPtr work;
    {
      Lock lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty() || closing_; });
      if (queue_.empty()) break;
      work = queue_.front();
    }
    execute(work);
    finish(work);
  }
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return sends_.empty() && recvs_.empty() && !sending_ && inside_ == 0; });
  }
  leave();
}

void SpanCore::execute(const SpanWorkPtr& work) {
  {
    Lock lock(mutex_);
    if (failure_.kind != FailureKind::none) return;
  }
  flight_->started(work->flight);
  Head head;
  head.frame = FrameKind::begin;
  head.sequence = work->sequence;
  head.signature = signature_of(work->request);
  tell_all(head);
  try {
    run_collective(*this, *work);
  } catch (const Failed&) {
    // The reason stands in failure_.
  } catch (const std::exception& e) {  // such as std::bad_alloc
    fail({FailureKind::aborted, p_.rank, "rank " + std::to_string(p_.rank) + ": " + e.what()}, true);
  }
}

// Ends a collective: well, or with the communicator's failure.
void SpanCore::finish(const SpanWorkPtr& work) {
  std::exception_ptr error;
  {
    Lock lock(mutex_);
    queue_.pop_front();
    if (failure_.kind != FailureKind::none) {
      await_told(lock);
      error = error_for(*work);
    }
    const auto behind = std::min_element(peers_.begin(), peers_.end(), [this](const Peer& a, const Peer& b) {
      return (&a == &peers_[static_cast<std::size_t>(p_.rank)] ? ~0ull : a.begun) <
             (&b == &peers_[static_cast<std::size_t>(p_.rank)] ? ~0ull : b.begun);
    });
    mine_.erase(mine_.begin(), mine_.lower_bound(std::min(behind->begun, work->sequence + 1)));
  }
  flight_->ended(work->flight, error != nullptr);
  if (error) host::Engine::get().flight().write();
  work->complete(error);
  changed_.notify_all();
}

// Of what has failed, collective or messages: nobody writes to its memory from here on.
void SpanCore::end_readers(Lock& lock) {
  const auto idle = [this] {
    return std::none_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.reading; });
  };
  if (!changed_.wait_until(lock, Clock::now() + kPatience, idle)) {
    lock.unlock();
    p_.mesh->close();  // a peer stopped in the middle of a frame that goes there
    lock.lock();
    changed_.wait(lock, idle);
  }
  for (Peer& peer : peers_) peer.want = nullptr;
}

void SpanCore::tell_all(Head head) {
  head.communicator = p_.number;
  for (int r = 0; r < size(); ++r) {
    if (r != p_.rank) p_.mesh->post(p_.place.wire[static_cast<std::size_t>(r)], head);
  }
}

// The first failure counts. `tell`: this rank has found it, and the others shall know.
void SpanCore::fail(const Failure& failure, bool tell) {
  {
    Lock lock(mutex_);
    if (failure_.kind != FailureKind::none) return;
    failure_ = failure;
  }
  flight_->failure(failure.kind == FailureKind::peer_lost ? rank_text(failure.peer) + " " + failure.text
                                                          : failure.text);
  alarm_.notify_all();
  if (tell) {
    Head head;
    head.frame = FrameKind::abort;
    head.failure = failure.kind;
    head.peer = failure.peer;
    std::strncpy(head.text, failure.text.c_str(), kInline - 1);
    tell_all(head);
  }
  if (p_.inner) p_.inner->abort(failure.text);
  host::Engine::get().flight().write();  // again when what is pending has ended
  {
    Lock lock(mutex_);
    told_ = true;
  }
  changed_.notify_all();
}

// What is pending ends only after the peers have been told: the program may exit on its error.
void SpanCore::await_told(Lock& lock) {
  changed_.wait(lock, [this] { return told_; });
  lock.unlock();
  p_.mesh->flush(Clock::now() + kFlush);
  lock.lock();
}

// Waits for `done`, which depends on rank `on` (-1: on nobody in particular).
void SpanCore::await(Lock& lock, const SpanWork& work, int on, const std::function<bool()>& done) {
  for (;;) {
    if (done()) return;
    if (failure_.kind != FailureKind::none) throw Failed{};
    Failure failure;
    if (on >= 0) {
      const Peer& peer = peers_[static_cast<std::size_t>(on)];
      if (peer.left || peer.gone) failure = {FailureKind::peer_lost, on, peer.left ? "left" : "died"};
    }
    if (failure.kind == FailureKind::none) {
      if (changed_.wait_until(lock, work.deadline()) != std::cv_status::timeout || done()) continue;
      failure = {FailureKind::timeout, -1, timeout_text(work)};
    }
    lock.unlock();
    fail(failure, true);
    throw Failed{};
  }
}

void SpanCore::await_all(const SpanWork& work) {
  Lock lock(mutex_);
  for (int r = 0; r < size(); ++r) {
    if (r == p_.rank) continue;
    await(lock, work, r, [&] { return peers_[static_cast<std::size_t>(r)].begun > work.sequence; });
  }
}

void SpanCore::sleep_until(Clock::time_point end) {
  if (Clock::now() >= end) return;
  Lock lock(mutex_);
  if (alarm_.wait_until(lock, end, [this] { return failure_.kind != FailureKind::none; })) throw Failed{};
}

// The pieces take turns, chunk by chunk; time on the link is reserved two chunks ahead, so that a late wake-up costs no
// bandwidth.
void SpanCore::send_pieces(const SpanWork& work, FrameKind frame, const std::vector<Piece>& out) {
  constexpr std::size_t kAhead = 2;
  const LinkLimit& limit = *p_.limit;
  struct Chunk {
    int rank;
    const char* data;
    std::size_t bytes;
  };
  std::vector<Chunk> chunks;
  for (std::size_t at = 0, left = 1; left != 0; at += limit.chunk()) {
    left = 0;
    for (const Piece& piece : out) {
      if (at >= piece.bytes && !(at == 0 && frame == FrameKind::message)) continue;
      chunks.push_back({piece.rank, piece.data + at, std::min(limit.chunk(), piece.bytes - at)});
      left += piece.bytes - at;
    }
  }
  if (chunks.empty()) return;
  sleep_until(Clock::now() + limit.latency());
  std::deque<Clock::time_point> ends;
  std::size_t reserved = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    if (frame == FrameKind::data) {
      Lock lock(mutex_);
      const Peer& peer = peers_[static_cast<std::size_t>(chunk.rank)];
      await(lock, work, chunk.rank, [&] { return peer.begun > work.sequence; });
    }
    if (limit.limited()) {
      for (; reserved < std::min(chunks.size(), i + 1 + kAhead); ++reserved) {
        ends.push_back(limit.reserve(chunks[reserved].bytes));
      }
      sleep_until(ends.front());
      ends.pop_front();
    }
    Head head;
    head.communicator = p_.number;
    head.frame = frame;
    head.sequence = work.sequence;
    head.tag = work.request.tag;
    try {
      p_.mesh->send(p_.place.wire[static_cast<std::size_t>(chunk.rank)], head, chunk.data, chunk.bytes,
                    work.deadline() + kPatience);
    } catch (const std::exception& e) {
      const Peer& peer = peers_[static_cast<std::size_t>(chunk.rank)];
      Lock lock(mutex_);
      changed_.wait_until(lock, Clock::now() + kPatience,
                          [&] { return peer.gone || failure_.kind != FailureKind::none; });
      const char* how = peer.left ? "left" : "died";
      lock.unlock();
      fail({FailureKind::peer_lost, chunk.rank, how}, true);
      throw Failed{};
    }
  }
}

void SpanCore::exchange(const SpanWork& work, const std::vector<Piece>& out, const std::vector<Piece>& in) {
  {
    Lock lock(mutex_);
    for (const Piece& piece : in) {
      if (piece.bytes == 0) continue;
      Peer& peer = peers_[static_cast<std::size_t>(piece.rank)];
      peer.want = piece.data;
      peer.bytes = piece.bytes;
      peer.got = 0;
      drain(peer);
    }
  }
  try {
    send_pieces(work, FrameKind::data, out);
    Lock lock(mutex_);
    for (const Piece& piece : in) {
      if (piece.bytes == 0) continue;
      Peer& peer = peers_[static_cast<std::size_t>(piece.rank)];
      await(lock, work, piece.rank, [&] { return peer.got == peer.bytes; });
      peer.want = nullptr;
    }
  } catch (...) {  // `in` may be memory of the collective, which unwinding frees
    Lock lock(mutex_);
    end_readers(lock);
    throw;
  }
}

void SpanCore::inside(const SpanWork& work, const InnerCall& issue) {
  CallOptions options;
  const auto left = std::chrono::duration_cast<Milliseconds>(work.deadline() - Clock::now());
  options.timeout = std::max(left, Milliseconds(1));
  std::exception_ptr error;
  std::vector<WorkPtr> works;
  try {
    works = issue(options);
    for (const auto& w : works) w->wait();
    return;
  } catch (...) {
    error = std::current_exception();
  }
  fail_inside(work, error);
  for (const auto& w : works) {  // they hold memory of this collective
    try {
      w->wait();
    } catch (const std::exception&) {
      // Told already.
    }
  }
  throw Failed{};
}

// What an operation inside the host ended with, for the ranks of all hosts.
void SpanCore::fail_inside(const SpanWork& work, const std::exception_ptr& error) {
  const auto& neighbours = p_.place.hosts[static_cast<std::size_t>(p_.place.host[static_cast<std::size_t>(p_.rank)])];
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    const bool left = std::strstr(e.what(), " left;") != nullptr;
    const int peer = e.peer() < 0 ? -1 : neighbours[static_cast<std::size_t>(e.peer())];
    fail({FailureKind::peer_lost, peer, left ? "left" : "died"}, true);
  } catch (const Timeout&) {
    std::string text;
    {
      Lock lock(mutex_);
      text = timeout_text(work);
    }
    fail({FailureKind::timeout, -1, text}, true);
  } catch (const Mismatch& e) {
    fail({FailureKind::mismatch, -1, e.what()}, true);
  } catch (const std::exception& e) {
    // Another rank of this host has given up, and its reason is under way.
    {
      Lock lock(mutex_);
      changed_.wait_until(lock, Clock::now() + std::chrono::seconds(2),
                          [this] { return failure_.kind != FailureKind::none; });
    }
    fail({FailureKind::aborted, -1, e.what()}, true);
  }
}

void SpanCore::abort(const std::string& reason) { fail({FailureKind::aborted, -1, reason}, true); }

void SpanCore::shutdown() {
  release();
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_; });
}

void SpanCore::release() {
  {
    Lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
}

void SpanCore::leave() {
  Head head;
  head.frame = FrameKind::leave;
  tell_all(head);
  p_.mesh->flush(Clock::now() + kFlush);
  if (p_.inner) p_.inner->shutdown();
  p_.mesh->remove(p_.number);
  {
    Lock lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

}  // namespace axo::span

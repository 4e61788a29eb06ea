// What the ranks of a collective send each other: pieces that take turns, at the link's rate; see hosts/core.h.
#include <algorithm>

#include "hosts/core.h"

namespace axo::span {

// Sleeps until `end`, but no longer than the operation may take.
void SpanCore::sleep_until(const SpanWork& work, Clock::time_point end) {
  if (Clock::now() >= end) return;
  Failure failure;
  {
    Lock lock(mutex_);
    const auto failed = [this] { return failure_.kind != FailureKind::none; };
    if (alarm_.wait_until(lock, std::min(end, work.deadline()), failed)) throw Failed{};
    if (end <= work.deadline()) return;
    failure = {FailureKind::timeout, -1, timeout_text(work)};
  }
  fail(failure, true);
  throw Failed{};
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
  sleep_until(work, Clock::now() + limit.latency());
  std::deque<Clock::time_point> ends;
  std::size_t reserved = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    if (frame == FrameKind::data) {
      Lock lock(mutex_);
      const Peer& peer = peers_[static_cast<std::size_t>(chunk.rank)];
      await(lock, work, chunk.rank, [&] { return peer.begun > work.sequence(); });
    }
    if (limit.limited()) {
      for (; reserved < std::min(chunks.size(), i + 1 + kAhead); ++reserved) {
        ends.push_back(limit.reserve(chunks[reserved].bytes));
      }
      sleep_until(work, ends.front());
      ends.pop_front();
    }
    Head head;
    head.communicator = p_.number;
    head.frame = frame;
    head.sequence = work.sequence();
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

}  // namespace axo::span

// send and recv: one channel for each ordered pair of ranks.
//
// The sender posts an envelope (tag, bytes, dtype); a payload of up to kInline bytes travels inside it and the send is
// complete. Otherwise the receiver, once a matching recv is there, grants the message by its id, and the sender streams
// it through the channel's ring of chunks. The receiver takes envelopes out of the channel as soon as it waits for
// anything from that peer, so messages with other tags never block the way. A receive from any rank waits for all of
// them; a message goes to the receive that was issued first among those that it fits.
#include <algorithm>
#include <cstring>

#include "host/core.h"

namespace axo::host {

Messages::Messages(HostCore& core)
    : core_(core), out_(static_cast<std::size_t>(core.size())), in_(static_cast<std::size_t>(core.size())) {}

void Messages::add(HostWorkPtr work) {
  ++pending_;
  if (work->request.kind == Kind::recv && work->request.root == kAnyPeer) {
    any_.push_back(std::move(work));
    return;
  }
  const auto peer = static_cast<std::size_t>(work->request.root);
  if (work->request.kind == Kind::send) {
    out_[peer].unposted.push_back(std::move(work));
  } else {
    in_[peer].wanted.push_back(std::move(work));
  }
}

bool Messages::advance() {
  bool moved = false;
  for (int p = 0; p < core_.size() && pending_ > 0; ++p) {
    moved |= advance_out(p);
    if (pending_ > 0) moved |= advance_in(p);
  }
  return moved;
}

void Messages::clear() {
  for (auto& o : out_) {
    o.unposted.clear();
    o.posted.clear();
    o.streaming.reset();
  }
  for (auto& i : in_) {
    i.wanted.clear();
    i.receiving.reset();
  }
  any_.clear();
  pending_ = 0;
}

bool Messages::advance_out(int peer) {
  Outgoing& o = out_[static_cast<std::size_t>(peer)];
  if (o.unposted.empty() && o.posted.empty() && !o.streaming) return false;
  Channel& ch = *core_.layout().channel(core_.base(), core_.rank(), peer);
  bool moved = false;
  while (!o.unposted.empty()) {
    const std::uint64_t posted = ch.posted.load(std::memory_order_relaxed);
    if (posted - ch.taken.load(std::memory_order_acquire) >= kEnvelopes) break;
    HostWorkPtr work = std::move(o.unposted.front());
    o.unposted.pop_front();
    const Request& r = work->request;
    Envelope& e = ch.envelopes[posted % kEnvelopes];
    e.id = work->message = ++o.next_id;
    e.bytes = r.bytes();
    e.tag = r.tag;
    e.dtype = static_cast<std::uint32_t>(r.dtype);
    e.inlined = r.bytes() <= kInline;
    if (e.inlined && e.bytes > 0) std::memcpy(e.payload, r.in, e.bytes);
    const bool inlined = e.inlined != 0;
    ch.posted.store(posted + 1, std::memory_order_release);
    core_.ring(peer);
    moved = true;
    if (inlined) {
      --pending_;
      core_.complete(std::move(work));
    } else {
      o.posted.emplace(work->message, std::move(work));
    }
  }
  if (!o.streaming && ch.grants.load(std::memory_order_acquire) > o.grants_seen) {
    const auto it = o.posted.find(ch.granted_id);
    ++o.grants_seen;
    if (it == o.posted.end()) {
      core_.fail(
          {FailureKind::mismatch, peer, "rank " + std::to_string(peer) + " asked for a message that was not sent"});
      return true;
    }
    o.streaming = it->second;
    o.posted.erase(it);
    moved = true;
  }
  while (o.streaming) {
    const Request& r = o.streaming->request;
    const std::uint64_t filled = ch.filled.load(std::memory_order_relaxed);
    if (filled - ch.emptied.load(std::memory_order_acquire) >= kChunks) break;
    const std::size_t bytes = std::min(kChunkBytes, r.bytes() - o.streaming->moved);
    std::memcpy(ch.chunks[filled % kChunks], static_cast<const char*>(r.in) + o.streaming->moved, bytes);
    o.streaming->moved += bytes;
    ch.filled.store(filled + 1, std::memory_order_release);
    core_.ring(peer);
    moved = true;
    if (o.streaming->moved == r.bytes()) {
      --pending_;
      core_.complete(std::move(o.streaming));
      o.streaming.reset();
    }
  }
  return moved;
}

// Finds the first wanted message that has arrived; grants it, or completes it when its payload is here. False when
// there is none. Fails the communicator when the two sides disagree on it.
bool Messages::match(int peer) {
  Incoming& in = in_[static_cast<std::size_t>(peer)];
  Channel& ch = *core_.layout().channel(core_.base(), peer, core_.rank());
  auto own = in.wanted.begin(), open = any_.begin();
  while (own != in.wanted.end() || open != any_.end()) {
    const bool from_any =
        own == in.wanted.end() || (open != any_.end() && (*open)->sequence() < (*own)->sequence());  // in issue order
    const auto w = from_any ? open++ : own++;
    const Request& r = (*w)->request;
    const auto a = std::find_if(in.arrived.begin(), in.arrived.end(), [&](const Arrived& x) { return x.tag == r.tag; });
    if (a == in.arrived.end()) continue;
    if (a->bytes != r.bytes() || a->dtype != r.dtype) {
      const auto show = [](std::uint64_t bytes, DType dtype) {
        return std::string(name_of(dtype)) + "[" + std::to_string(bytes / item_size(dtype)) + "]";
      };
      core_.fail({FailureKind::mismatch, peer,
                  "send and recv with tag " + std::to_string(r.tag) + " on '" + core_.member().name +
                      "' differ: rank " + std::to_string(peer) + " sends " + show(a->bytes, a->dtype) + ", rank " +
                      std::to_string(core_.rank()) + " expects " + show(r.bytes(), r.dtype)});
      return false;
    }
    HostWorkPtr work = std::move(*w);
    (from_any ? any_ : in.wanted).erase(w);
    work->taken_from.store(peer, std::memory_order_release);
    if (a->inlined) {
      if (!a->payload.empty()) std::memcpy(r.out, a->payload.data(), a->payload.size());
      in.arrived.erase(a);
      --pending_;
      core_.complete(std::move(work));
      return true;
    }
    ch.granted_id = a->id;
    ch.grants.store(ch.grants.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    in.arrived.erase(a);
    in.receiving = std::move(work);
    core_.ring(peer);
    return true;
  }
  return false;
}

bool Messages::advance_in(int peer) {
  Incoming& in = in_[static_cast<std::size_t>(peer)];
  const auto wants = [&] { return !in.wanted.empty() || !any_.empty(); };
  if (!wants() && !in.receiving) return false;
  Channel& ch = *core_.layout().channel(core_.base(), peer, core_.rank());
  bool moved = false;
  std::uint64_t taken = ch.taken.load(std::memory_order_relaxed);
  while (wants()) {
    const std::uint64_t posted = ch.posted.load(std::memory_order_acquire);
    if (posted == taken) break;
    // Copied before it is checked: what a peer writes may change at any time.
    const Envelope& e = ch.envelopes[taken % kEnvelopes];
    const std::uint32_t dtype = e.dtype;
    Arrived a{e.id, e.bytes, e.tag, static_cast<DType>(dtype), e.inlined != 0, {}};
    if (posted - taken > kEnvelopes || dtype >= static_cast<std::uint32_t>(kDTypeCount) ||
        (a.inlined && a.bytes > kInline)) {
      core_.fail({FailureKind::mismatch, peer, "rank " + std::to_string(peer) + " posted an impossible message"});
      return true;
    }
    if (a.inlined) a.payload.assign(e.payload, e.payload + a.bytes);
    in.arrived.push_back(std::move(a));
    ch.taken.store(++taken, std::memory_order_release);
    core_.ring(peer);
    moved = true;
  }
  for (;;) {
    while (in.receiving) {
      const Request& r = in.receiving->request;
      const std::uint64_t emptied = ch.emptied.load(std::memory_order_relaxed);
      if (ch.filled.load(std::memory_order_acquire) == emptied) return moved;
      const std::size_t bytes = std::min(kChunkBytes, r.bytes() - in.receiving->moved);
      std::memcpy(static_cast<char*>(r.out) + in.receiving->moved, ch.chunks[emptied % kChunks], bytes);
      in.receiving->moved += bytes;
      ch.emptied.store(emptied + 1, std::memory_order_release);
      core_.ring(peer);
      moved = true;
      if (in.receiving->moved == r.bytes()) {
        --pending_;
        core_.complete(std::move(in.receiving));
        in.receiving.reset();
      }
    }
    if (!wants() || !match(peer)) return moved;
    moved = true;
  }
}

}  // namespace axo::host

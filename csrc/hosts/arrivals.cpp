// What the readers of the mesh tell a communicator, and what it says when an operation fails; see hosts/core.h.
#include <cstring>

#include "base/deadline.h"
#include "hosts/core.h"

namespace axo::span {
char* SpanCore::place(int from, const Head& head) {
  const int rank = rank_of(from);
  if (rank < 0) throw Error("a frame for communicator '" + p_.name + "', which the sender is not in");
  Lock lock(mutex_);
  if (head.frame == FrameKind::message) {
    const auto found = recvs_.find({rank, head.tag});
    if (found == recvs_.end()) throw Error("a message that nobody has asked for");
    const auto& work = found->second.front();
    if (head.bytes > work->request.bytes() - work->moved) throw Error("a message longer than asked for");
    peers_[static_cast<std::size_t>(rank)].reading = true;
    return static_cast<char*>(work->request.out) + work->moved;
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.want != nullptr && peer.stash.empty() && head.bytes <= peer.bytes - peer.got) {
    peer.reading = true;
    return peer.want + peer.got;
  }
  peer.stash.push_back({std::vector<char>(head.bytes), false});
  return peer.stash.back().data.data();
}

// Takes over what came before its place was known.
void SpanCore::drain(Peer& peer) {
  while (peer.want != nullptr && !peer.stash.empty() && peer.stash.front().complete) {
    const auto& data = peer.stash.front().data;
    if (data.size() > peer.bytes - peer.got) return;  // of a later part
    if (!data.empty()) std::memcpy(peer.want + peer.got, data.data(), data.size());
    peer.got += data.size();
    peer.stash.pop_front();
  }
}

void SpanCore::arrived(int from, const Head& head) {
  const int rank = rank_of(from);
  if (rank < 0) throw Error("a frame for communicator '" + p_.name + "', which the sender is not in");
  Failure failure;
  bool tell = true;
  SpanWorkPtr received;
  {
    Lock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    switch (head.frame) {
      case FrameKind::begin:
        if (head.sequence != peer.begun) throw Error("a collective out of order");
        ++peer.begun;
        if (head.sequence >= next_sequence_) {
          peer.ahead[head.sequence] = head.operation;
        } else {
          compare(rank, head.sequence, head.operation, &failure);
        }
        break;
      case FrameKind::data:
        if (peer.reading) {
          peer.reading = false;
          peer.got += head.bytes;
        } else {
          peer.stash.back().complete = true;
          drain(peer);
        }
        break;
      case FrameKind::want:
        wanted_[{rank, head.tag}].push_back(head.bytes);
        break;
      case FrameKind::message: {
        peer.reading = false;
        const auto found = recvs_.find({rank, head.tag});
        if (found == recvs_.end()) break;  // it has failed meanwhile
        const auto& work = found->second.front();
        work->moved += head.bytes;
        if (work->moved < work->request.bytes()) break;
        received = work;
        found->second.pop_front();
        if (found->second.empty()) recvs_.erase(found);
        break;
      }
      case FrameKind::leave:
        peer.left = true;
        break;
      case FrameKind::abort:
        tell = false;
        failure = {head.failure, head.peer, std::string(head.text, ::strnlen(head.text, kInline))};
        if (failure.kind == FailureKind::none || failure.peer < -1 || failure.peer >= size()) {
          failure = {FailureKind::aborted, -1, "rank " + std::to_string(rank) + " aborted without a valid reason"};
        }
        break;
    }
  }
  if (received) {
    flight_->ended(received->flight(), false);
    received->end(nullptr);
  }
  if (failure.kind != FailureKind::none) fail(failure, tell);
  changed_.notify_all();
}

void SpanCore::lost(int from, const std::string& /*why*/) {
  const int rank = rank_of(from);
  if (rank < 0) return;
  {
    Lock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    peer.gone = true;
    peer.reading = false;
    if (!peer.stash.empty() && !peer.stash.back().complete) peer.stash.pop_back();
  }
  changed_.notify_all();
}

void SpanCore::compare(int peer, std::uint64_t sequence, const Operation& theirs, Failure* failure) const {
  const auto found = mine_.find(sequence);
  if (found == mine_.end() || found->second == theirs || failure->kind != FailureKind::none) return;
  *failure = {FailureKind::mismatch, peer,
              "#" + std::to_string(sequence) + " differs: rank " + std::to_string(p_.rank) + " issued " +
                  words(found->second) + ", rank " + std::to_string(peer) + " issued " + words(theirs)};
}

std::string SpanCore::rank_text(int rank) const {
  if (rank < 0) return "a rank";
  const auto host = static_cast<std::size_t>(p_.place.host[static_cast<std::size_t>(rank)]);
  return "rank " + std::to_string(rank) + " (host " + p_.place.names[host] + ")";
}

// Under mutex_.
std::string SpanCore::timeout_text(const SpanWork& work) const {
  const std::string text = "rank " + std::to_string(p_.rank) + " " + work.timed_out() + " in " + work.describe();
  if (work.request.point_to_point()) return text + "; " + rank_text(work.request.root) + " did not answer";
  std::string arrived, missing;
  for (int r = 0; r < size(); ++r) {
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (r == p_.rank || peer.begun > work.sequence()) {
      arrived += (arrived.empty() ? "" : ", ") + std::to_string(r);
    } else {
      const char* where = peer.left ? ", left" : peer.gone ? ", died" : "";
      missing += (missing.empty() ? "" : ", ") + rank_text(r) + where;
    }
  }
  return text + "; arrived: " + arrived + "; not arrived: " + (missing.empty() ? "none" : missing);
}

// Under mutex_.
std::exception_ptr SpanCore::error_for(const SpanWork& work) const {
  raised_ = true;
  return error_at(work.describe() + ": ", "; waited " + seconds_since(work.issue_time()));
}

std::exception_ptr SpanCore::failure() const {
  Lock lock(mutex_);
  if (failure_.kind == FailureKind::none) return nullptr;
  return error_at("'" + p_.name + "' (rank " + std::to_string(p_.rank) + " of " + std::to_string(size()) + "): ", "");
}

// Under mutex_.
std::exception_ptr SpanCore::error_at(const std::string& where, const std::string& waited) const {
  switch (failure_.kind) {
    case FailureKind::peer_lost:
      return std::make_exception_ptr(
          PeerLost(where + rank_text(failure_.peer) + " " + failure_.text + waited, failure_.peer));
    case FailureKind::timeout:
      return std::make_exception_ptr(Timeout(where + failure_.text));
    case FailureKind::mismatch:
      return std::make_exception_ptr(Mismatch(where + failure_.text));
    default:
      return std::make_exception_ptr(Aborted(where + "aborted: " + failure_.text));
  }
}

void SpanCore::check_not_forked(const char* what) const {
  if (!engine_.forked()) return;
  throw Error(std::string(what) + " on '" + p_.name +
              "': the communicator belongs to the parent process; connect again after fork");
}

void SpanCore::check_usable(const char* what) const {
  check_not_forked(what);
  const std::string where = std::string(what) + " on '" + p_.name + "' (rank " + std::to_string(p_.rank) + " of " +
                            std::to_string(size()) + "): ";
  Lock lock(mutex_);
  // A rank that comes after the failure learns of it as those who waited did; what it calls then is Aborted.
  if (failure_.kind != FailureKind::none && !raised_) {
    raised_ = true;
    std::rethrow_exception(error_at(where, ""));
  }
  if (failure_.kind != FailureKind::none) {
    const std::string who = failure_.kind == FailureKind::peer_lost ? rank_text(failure_.peer) + " " : "";
    throw Aborted(where + "the communicator is aborted: " + who + failure_.text);
  }
  if (closing_) throw Error(where + "the communicator is closed");
}

}  // namespace axo::span

// What a host communicator says when an operation fails: which one, where, who, and for how long it waited.
#include <algorithm>
#include <cstdio>

#include "base/deadline.h"
#include "host/core.h"

namespace axo::host {
// "all_reduce #12"
std::string HostCore::title(const HostWork& work) {
  const Request& r = work.request;
  std::string text = name_of(r.kind);
  if (r.kind == Kind::send) text += " to rank " + std::to_string(r.root) + " with tag " + std::to_string(r.tag);
  if (r.kind == Kind::recv) {
    text += " from " + (work.peer() == kAnyPeer ? "any rank" : "rank " + std::to_string(work.peer())) + " with tag " +
            std::to_string(r.tag);
  }
  return text + " #" + std::to_string(work.sequence);
}

std::string HostCore::describe(const HostWork& work) const {
  return title(work) + " on '" + m_.name + "' (rank " + std::to_string(m_.rank) + " of " + std::to_string(m_.size) +
         ")";
}

std::exception_ptr HostCore::error_for(const HostWork& work) const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  const std::string where = describe(work) + ": ", waited = "; waited " + seconds_since(work.issue_time());
  // The operation that failed is named once: not again where it is this one.
  std::string text = failure_.text;
  const std::string own = failure_.kind == FailureKind::timeout ? " in " + title(work) + ";"
                          : work.request.point_to_point()       ? "none"
                                                                : "operation #" + std::to_string(work.sequence) + " ";
  const auto at = text.find(own);
  if (failure_.kind == FailureKind::timeout && at != std::string::npos) text.erase(at, own.size() - 1);
  if (failure_.kind == FailureKind::mismatch && at == 0) text.erase(0, own.size());
  return error_at(where, std::move(text), waited);
}

std::exception_ptr HostCore::failure() {
  const bool told = layout_.header(base_)->aborts.load(std::memory_order_acquire) != 0;
  const bool member = !engine_.forked() && state(m_.rank).left.load(std::memory_order_acquire) == 0;
  if (told && member && !failed_.load(std::memory_order_acquire) && enter()) {
    step(false);  // what the peer had finished before it failed completes here too
    leave_and_complete();
  }
  if (!failed_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return error_at("'" + m_.name + "' (rank " + std::to_string(m_.rank) + " of " + std::to_string(m_.size) + "): ",
                  failure_.text, "");
}

// Under failure_mutex_.
std::exception_ptr HostCore::error_at(const std::string& where, std::string text, const std::string& waited) const {
  switch (failure_.kind) {
    case FailureKind::peer_lost: {
      const auto peer = static_cast<std::size_t>(failure_.peer < 0 ? 0 : failure_.peer);
      text = "rank " + std::to_string(peer) + " (process " + std::to_string(m_.processes[peer]->pid()) + ") " + text;
      return std::make_exception_ptr(PeerLost(where + text + waited, static_cast<int>(peer)));
    }
    case FailureKind::timeout:
      if (failure_.peer != m_.rank) text = "rank " + std::to_string(failure_.peer) + " " + text + waited;
      return std::make_exception_ptr(Timeout(where + text));
    case FailureKind::mismatch:
      return std::make_exception_ptr(Mismatch(where + text + waited));
    default:
      return std::make_exception_ptr(Aborted(where + "aborted: " + text + waited));
  }
}

// Where a peer stands, as far as its headers tell.
std::string HostCore::peer_position(int peer) const {
  const RankState& s = state(peer);
  if (m_.processes[static_cast<std::size_t>(peer)]->dead()) return "died";
  if (s.left.load(std::memory_order_acquire) != 0) return "left";
  const std::uint64_t issued = s.issued.load(std::memory_order_acquire);
  if (issued == 0) return "has issued nothing";
  int on = 0;
  const auto& process = m_.processes[static_cast<std::size_t>(peer)];
  const std::string blocked = process->blocked(&on);
  const bool own = process->pid() == engine_.self()->pid();  // ranks that are threads: the page may mean another
  const std::string where = own || blocked.empty() ? "" : ", is blocked in " + blocked;
  return "last issued " + std::string(name_of(s.headers[(issued - 1) % kHeaders].kind)) + " #" +
         std::to_string(issued - 1) + where;
}

std::string HostCore::blocked_in(int* on) {
  *on = 0;
  if (!enter()) return "an operation on '" + m_.name + "'";
  std::string text;
  if (rounds_.work()) {
    text = describe(*rounds_.work());
    const int peer = rounds_.blocked_by();
    if (peer >= 0) *on = m_.processes[static_cast<std::size_t>(peer)]->pid();
  } else {
    messages_.for_each([&](const HostWorkPtr& work) {
      if (!text.empty()) return;
      text = describe(*work);
      if (work->peer() != kAnyPeer) *on = m_.processes[static_cast<std::size_t>(work->peer())]->pid();
    });
  }
  leave();
  return text;
}

// Blocking calls in crossed order on two communicators wait for each other for ever. Another thread of the program
// could still resolve it, so this is told on stderr and the timeout decides.
void HostCore::report_crossing() {
  constexpr auto kPatience = std::chrono::seconds(2);
  const HostWorkPtr& work = rounds_.work();
  if (!work || reported_ == work->sequence + 1 || Clock::now() - work->issue_time() < kPatience) return;
  const int peer = rounds_.blocked_by();
  if (peer < 0 || state(peer).issued.load(std::memory_order_acquire) > work->sequence) return;
  int on = 0, mine = 0;
  const std::string there = m_.processes[static_cast<std::size_t>(peer)]->blocked(&on);
  engine_.self()->blocked(&mine);
  const int pid = engine_.self()->pid();
  if (there.empty() || on != pid || mine != m_.processes[static_cast<std::size_t>(peer)]->pid() || mine == pid) return;
  reported_ = work->sequence + 1;
  std::fprintf(stderr,
               "axo: %s waits for rank %d, which waits for this process in %s: are these calls in crossed order? The "
               "timeout will end them.\n",
               describe(*work).c_str(), peer, there.c_str());
}

std::string HostCore::timeout_text(const HostWork& work) const {
  std::string text = "timed out after " + seconds_since(work.issue_time()) + " in " + title(work);
  if (work.request.point_to_point()) {
    const int peer = work.peer();
    if (peer == kAnyPeer) {
      std::string others;
      for (int p = 0; p < m_.size; ++p) {
        if (p != m_.rank) others += (others.empty() ? "" : ", ") + std::to_string(p) + " (" + peer_position(p) + ")";
      }
      return text + "; no rank has sent such a message: " + (others.empty() ? "there is no other" : others);
    }
    return text + "; rank " + std::to_string(peer) + " did not answer (" + peer_position(peer) + ")";
  }
  std::string arrived, missing;
  for (int p = 0; p < m_.size; ++p) {
    if (state(p).issued.load(std::memory_order_acquire) > work.sequence) {
      arrived += (arrived.empty() ? "" : ", ") + std::to_string(p);
    } else {
      missing += (missing.empty() ? "" : ", ") + std::to_string(p) + " (" + peer_position(p) + ")";
    }
  }
  return text + "; arrived: " + (arrived.empty() ? "none" : arrived) +
         "; not arrived: " + (missing.empty() ? "none" : missing);
}

void HostCore::check_not_forked(const char* what) const {
  if (!engine_.forked()) return;
  throw Error(std::string(what) + " on '" + m_.name +
              "': the communicator belongs to the parent process; connect again after fork");
}

void HostCore::check_usable(const char* what) const {
  const std::string where = std::string(what) + " on '" + m_.name + "' (rank " + std::to_string(m_.rank) + " of " +
                            std::to_string(m_.size) + "): ";
  check_not_forked(what);
  if (failed_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    std::string reason = failure_.text;
    // A failure that came while nothing was pending here: this call is the first to tell it.
    const bool first = !told_.exchange(true);
    if (first && failure_.kind == FailureKind::peer_lost) {
      const auto& process = m_.processes[static_cast<std::size_t>(std::max(failure_.peer, 0))];
      throw PeerLost(where + "rank " + std::to_string(failure_.peer) + " (process " + std::to_string(process->pid()) +
                         ") " + reason + " before the call; waited 0 s",
                     failure_.peer);
    }
    if (first && failure_.kind == FailureKind::mismatch) throw Mismatch(where + reason);
    if (failure_.kind == FailureKind::peer_lost || failure_.kind == FailureKind::timeout)
      reason = "rank " + std::to_string(failure_.peer) + " " + reason;
    throw Aborted(where + "the communicator is aborted: " + reason);
  }
  if (closed_.load(std::memory_order_acquire)) throw Error(where + "the communicator is closed");
}

}  // namespace axo::host

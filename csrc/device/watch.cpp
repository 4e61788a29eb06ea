// What the watchdog does with one communicator, ten times a second.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/deadline.h"
#include "device/core.h"

namespace axo {
namespace {

constexpr std::chrono::seconds kSuspicious{1};       // pending for longer: other ranks may have aborted
constexpr std::chrono::milliseconds kSlow{100};      // the same: a peer of this host may have died
constexpr std::chrono::seconds kPatientTurn{2};      // how long an abort waits for its turn
constexpr Milliseconds kGlance{20};                  // for a key that is probably absent
constexpr std::chrono::milliseconds kReports{1500};  // for all peers' reports together

// What a failed rank tells the others begins with one of these, the first with the rank that is lost.
constexpr const char* kLost = "lost:";
constexpr const char* kAborted = "aborted";

}  // namespace

bool DeviceCore::look() {
  drop_finished();
  if (!failed()) check_library();
  if (!failed()) check_deadline();
  if (!failed()) check_peers();
  if (!failed()) hear_abort();
  if (failed()) clean_up_failure();
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(pending_.begin(), pending_.end(), [](const auto& work) { return work->has_callbacks(); });
}

void DeviceCore::check_library() {
  const auto turn = context_->queue().try_turn();  // a launch that is under way asks by itself
  if (!turn || !comm_) return;
  int result = kNcclSuccess;
  const int query = nccl()->CommGetAsyncError(comm_, &result);
  if (query != kNcclSuccess) result = query;
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  const int peer = result == kNcclRemoteError ? peers_->lost() : -1;
  const std::string what = "asynchronous error" + oldest_pending();
  fail(peer < 0 ? error_from(result, what.c_str()) : peer_lost(what, peer));
}

// Deaths that the library does not see: it may wait for ever for memory that nobody writes any more.
void DeviceCore::check_peers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    if (pending_.empty() || now - pending_.front()->issue_time() < kSlow || now < next_roll_) return;
    next_roll_ = now + kSlow;
  }
  const int peer = peers_->lost();
  if (peer < 0) return;
  if (adopt_failure()) return;  // it has told why it ended: another rank's death, perhaps
  drop_finished();              // what was complete before the death counts as done
  const std::string what = oldest_pending();
  if (!what.empty()) fail(peer_lost("communicator '" + member_.name + "'" + what, peer));
}

// What an error of the library, which names no operation, has caught first; "" when nothing is pending.
std::string DeviceCore::oldest_pending() const {
  DeviceWorkPtr first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return "";
    first = pending_.front();
  }
  return " in " + first->describe() + ", after " + seconds_since(first->issue_time());
}

void DeviceCore::check_deadline() {
  DeviceWorkPtr first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    const auto late =
        std::find_if(pending_.begin(), pending_.end(), [&](const auto& w) { return now >= w->deadline(); });
    if (late == pending_.end()) return;
    first = *late;
  }
  const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - first->issue_time());
  fail(std::make_exception_ptr(Timeout(first->describe() + " did not complete in " + std::to_string(waited.count()) +
                                       " ms" + arrivals(first->sequence()))));
}

// Peers' own reports, which those that time out as well write at about the same time.
std::string DeviceCore::arrivals(std::uint64_t sequence) {
  if (!store_) return "";
  std::string here, late, silent;
  const auto note = [](std::string& list, int rank) { list += (list.empty() ? "" : ", ") + std::to_string(rank); };
  try {
    store_->set(key_ + "/issued/" + std::to_string(rank()), std::to_string(issued()));
    const auto until = Clock::now() + kReports;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const auto left = std::chrono::duration_cast<Milliseconds>(until - Clock::now());
      try {
        const std::string text = store_->get(key_ + "/issued/" + std::to_string(peer), std::max(left, kGlance));
        note(std::strtoull(text.c_str(), nullptr, 10) >= sequence ? here : late, peer);
      } catch (const Timeout&) {
        note(silent, peer);
      }
    }
  } catch (const std::exception& e) {
    return std::string("; the other ranks could not be asked: ") + e.what();
  }
  std::string text;
  if (!here.empty()) text += "; also in it: rank " + here;
  if (!late.empty()) text += "; has not arrived: rank " + late;
  if (!silent.empty()) text += "; no report (late, or gone): rank " + silent;
  return text;
}

void DeviceCore::hear_abort() {
  if (!store_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    if (pending_.empty() || now - pending_.front()->issue_time() < kSuspicious || now < next_hearing_) return;
    next_hearing_ = now + kSuspicious;
  }
  adopt_failure();
}

// Takes over the failure that another rank has told; false when there is none.
bool DeviceCore::adopt_failure() {
  std::string told;
  try {
    told = store_->get(key_ + "/abort", kGlance);
  } catch (const std::exception&) {  // nobody has aborted, or the store is gone; the timeout remains
    return false;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_ = true;
  }
  const auto space = std::min(told.find(' '), told.size());
  const std::string text = told.substr(std::min(space + 1, told.size()));
  const int peer = told.rfind(kLost, 0) == 0 ? std::atoi(told.c_str() + std::strlen(kLost)) : -1;
  if (peer >= 0 && peer < size() && peer != rank()) {
    fail(std::make_exception_ptr(PeerLost("communicator '" + member_.name + "': " + text, peer)));
  } else {
    fail(std::make_exception_ptr(Aborted("communicator '" + member_.name + "' was aborted by another rank: " + text)));
  }
  return true;
}

void DeviceCore::clean_up_failure() {
  std::string reason, kind = kAborted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_cleaned_) return;
    failure_cleaned_ = true;
    try {
      std::rethrow_exception(error_);
    } catch (const PeerLost& e) {
      reason = e.what();
      if (e.peer() >= 0) kind = kLost + std::to_string(e.peer());
    } catch (const std::exception& e) {
      reason = e.what();
    } catch (...) {
      reason = "unknown";
    }
  }
  flight_->failure(reason);
  write_flight_file();
  if (store_ && !heard_) {
    try {
      store_->set(key_ + "/abort", kind + " rank " + std::to_string(rank()) + ": " + reason);
    } catch (const std::exception&) {  // peers will see their own timeout
    }
  }
  // A launch that is under way sees failed() and gives its turn up. If it hangs inside the library, abort without a
  // turn: the library allows that, and it is what frees the launch.
  auto turn = context_->queue().try_turn();
  for (const auto until = Clock::now() + kPatientTurn; !turn && Clock::now() < until;
       turn = context_->queue().try_turn()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  DeviceGuard guard(gpu(), context_->device());
  abort_library();
  std::deque<DeviceWorkPtr> works;
  std::lock_guard<std::mutex> lock(mutex_);
  works.swap(pending_);  // the device has let go of their tensors
}

}  // namespace axo

// Reserving time on a host's link; see hosts/link_limit.h.
#include "hosts/link_limit.h"

#include <algorithm>
#include <mutex>

#include "base/error.h"

namespace axo::hosts {
namespace {

std::mutex g_mutex;
Link g_link;

}  // namespace

void simulate_link(Link link) {
  AXO_CHECK(link.rate == 0 || (link.rate >= 1 && link.rate <= 1e15), "link rate", link.rate,
            "1 to 1e15 bytes a second, or 0 for no limit");
  AXO_CHECK(link.latency >= 0 && link.latency < 60, "link latency", link.latency, "0 to 60 s");
  std::lock_guard<std::mutex> lock(g_mutex);
  g_link = link;
}

LinkLimit::LinkLimit(std::shared_ptr<Process> keeper) : keeper_(std::move(keeper)) {
  std::lock_guard<std::mutex> lock(g_mutex);
  rate_ = g_link.rate;
  latency_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(g_link.latency));
  constexpr double kTurn = 4e-3;  // seconds of the link that one chunk takes
  if (rate_ > 0) chunk_ = static_cast<std::size_t>(std::clamp(rate_ * kTurn, 4096.0, 1.0 * kMostPayload)) / 64 * 64;
}

Clock::time_point LinkLimit::reserve(std::size_t bytes, Clock::time_point since) const {
  using std::chrono::nanoseconds;
  if (rate_ <= 0) return since;
  const auto at = std::chrono::duration_cast<nanoseconds>(since.time_since_epoch()).count();
  const auto takes = static_cast<std::uint64_t>(static_cast<double>(bytes) * 1e9 / rate_);
  std::atomic<std::uint64_t>& free = keeper_->page()->link_free;
  std::uint64_t seen = free.load(std::memory_order_relaxed), end = 0;
  do {
    end = std::max(seen, static_cast<std::uint64_t>(at)) + takes;
  } while (!free.compare_exchange_weak(seen, end, std::memory_order_relaxed));
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(nanoseconds(end)));
}

}  // namespace axo::hosts

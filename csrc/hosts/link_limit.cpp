// Reserving time on a host's link; see hosts/link_limit.h.
#include "hosts/link_limit.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "base/error.h"
#include "hosts/mesh.h"

namespace axo::span {
namespace {

struct Unit {
  const char* name;
  double factor;
};

// A positive decimal number with one of the units, or NaN.
template <std::size_t n>
double parse(const std::string& text, const Unit (&units)[n]) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool decimal = text.find_first_of("xX") == std::string::npos;
  if (end == text.c_str() || !decimal || !std::isfinite(value) || value <= 0) return NAN;
  for (const Unit& unit : units) {
    if (std::string(end) == unit.name) return value * unit.factor;
  }
  return NAN;
}

std::shared_ptr<Process> first_keeper(const std::shared_ptr<Process>& keeper) {
  static std::mutex mutex;
  static auto* const first = new std::shared_ptr<Process>;  // never destroyed: threads may outlive statics
  static int pid = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (pid != ::getpid()) {  // a forked child has not inherited its parent's page
    *first = keeper;
    pid = ::getpid();
  }
  return *first;
}

}  // namespace

double parse_rate(const std::string& text) {
  const double rate = parse(text, {{"", 1.0}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}});
  AXO_CHECK(rate >= 1 && rate <= 1e15, "AXO_LINK_LIMIT", "'" + text + "'", "bytes a second, such as 200M or 1.5G");
  return rate;
}

double parse_seconds(const std::string& text) {
  const double seconds = parse(text, {{"s", 1.0}, {"ms", 1e-3}, {"us", 1e-6}});
  AXO_CHECK(seconds > 0 && seconds < 60, "AXO_LINK_LATENCY", "'" + text + "'",
            "a time below 60 s, such as 50us or 2ms");
  return seconds;
}

LinkSettings LinkSettings::from_environment() {
  LinkSettings settings;
  const char* rate = std::getenv("AXO_LINK_LIMIT");
  const char* latency = std::getenv("AXO_LINK_LATENCY");
  if (rate != nullptr && *rate != '\0') settings.rate = parse_rate(rate);
  if (latency != nullptr && *latency != '\0') {
    const std::chrono::duration<double> seconds(parse_seconds(latency));
    settings.latency = std::chrono::duration_cast<Clock::duration>(seconds);
  }
  return settings;
}

std::shared_ptr<const LinkLimit> LinkLimit::from_environment(const std::shared_ptr<Process>& keeper) {
  constexpr double kTurn = 4e-3;  // seconds of the link that one chunk takes
  auto limit = std::make_shared<LinkLimit>();
  limit->settings_ = LinkSettings::from_environment();
  limit->chunk_ = kMostPayload;
  if (limit->limited()) {
    const double turn = std::clamp(limit->settings_.rate * kTurn, 4096.0, static_cast<double>(limit->chunk_));
    limit->chunk_ = static_cast<std::size_t>(turn) / 64 * 64;
  }
  limit->keeper_ = first_keeper(keeper);
  return limit;
}

Clock::time_point LinkLimit::reserve(std::size_t bytes) const {
  using std::chrono::nanoseconds;
  const auto now = Clock::now();
  if (settings_.rate <= 0) return now;
  const auto at = std::chrono::duration_cast<nanoseconds>(now.time_since_epoch()).count();
  const auto takes = static_cast<std::uint64_t>(static_cast<double>(bytes) * 1e9 / settings_.rate);
  std::atomic<std::uint64_t>& free = keeper_->page()->link_free;
  std::uint64_t seen = free.load(std::memory_order_relaxed), end = 0;
  do {
    end = std::max(seen, static_cast<std::uint64_t>(at)) + takes;
  } while (!free.compare_exchange_weak(seen, end, std::memory_order_relaxed));
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(nanoseconds(end)));
}

}  // namespace axo::span

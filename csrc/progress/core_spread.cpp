// The rows of cores and the move; see progress/core_spread.h.
#include "progress/core_spread.h"

#include <time.h>

#include <algorithm>
#include <thread>

namespace axo {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kBetweenMoves{200};

// The same for all processes of the host, and read in a few nanoseconds.
std::uint64_t coarse_milliseconds() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000 + static_cast<std::uint64_t>(t.tv_nsec) / 1000000;
}

std::uint64_t word_of(std::uint64_t now, int core) { return now << 16 | static_cast<std::uint64_t>(core + 1); }

// A thread's own. After fork the child's first call takes another, in the child's row.
struct Entry {
  CoreRow* row = nullptr;
  int number = 0;
  Clock::time_point moved{};
};

Entry& own_entry() {
  static thread_local Entry mine;
  return mine;
}

// An empty entry, or the one that was not used for the longest time: its thread may have ended.
int take_entry(CoreRow& row, std::uint64_t word) {
  int oldest = 0;
  for (int i = 0; i < kEntries; ++i) {
    std::uint64_t seen = 0;
    if (row.entries[i].compare_exchange_strong(seen, word, std::memory_order_relaxed)) return i;
    if (seen >> 16 < row.entries[oldest].load(std::memory_order_relaxed) >> 16) oldest = i;
  }
  return oldest;
}

}  // namespace

int count_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

bool come_to(int core) {
  if (core < 0 || core >= CPU_SETSIZE) return false;
  if (::sched_getcpu() == core) return true;
  cpu_set_t all, one;
  if (::sched_getaffinity(0, sizeof(all), &all) != 0 || !CPU_ISSET(core, &all)) return false;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (::sched_setaffinity(0, sizeof(one), &one) != 0) return false;
  ::sched_setaffinity(0, sizeof(all), &all);
  return true;
}

int freer_core(int core, const Crowd& crowd, const cpu_set_t& allowed) {
  int best = -1, fewest = crowd[static_cast<std::size_t>(core)] - 1;
  // From the next one on, so that threads of different cores do not all choose the first.
  for (int i = 1; i < CPU_SETSIZE; ++i) {
    const int other = (core + i) % CPU_SETSIZE;
    const int there = crowd[static_cast<std::size_t>(other)];
    if (there < fewest && CPU_ISSET(other, &allowed)) {
      best = other;
      fewest = there;
    }
  }
  return best;
}

CoreSpread::CoreSpread(CoreRow* own) : own_(own), rows_(std::make_shared<Rows>()) {}

void CoreSpread::meet(Rows rows) {
  std::sort(rows.begin(), rows.end());  // ranks that are threads share the row of their process
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::lock_guard<std::mutex> lock(mutex_);
  if (rows.size() >= rows_->size()) rows_ = std::make_shared<const Rows>(std::move(rows));
}

int CoreSpread::record_core() {
  const int core = ::sched_getcpu();
  if (core < 0 || core >= CPU_SETSIZE) return -1;
  const std::uint64_t word = word_of(coarse_milliseconds(), core);
  Entry& mine = own_entry();
  if (mine.row != own_) {
    mine.row = own_;
    mine.number = take_entry(*own_, word);
  }
  auto& known = own_->entries[mine.number];
  if (known.load(std::memory_order_relaxed) != word) known.store(word, std::memory_order_relaxed);
  return core;
}

Crowding CoreSpread::spread() {
  const int core = record_core();
  if (core < 0) return Crowding::fair;
  std::shared_ptr<const Rows> rows;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rows = rows_;
  }
  const std::uint64_t oldest = coarse_milliseconds() - static_cast<std::uint64_t>(kFresh.count());
  Crowd crowd{};
  int threads = 0;
  for (const auto& row : *rows) {
    for (const auto& known : row->entries) {
      const std::uint64_t word = known.load(std::memory_order_relaxed);
      const auto place = static_cast<int>(word & 0xffff) - 1;
      if (place < 0 || place >= CPU_SETSIZE || word >> 16 < oldest) continue;
      ++crowd[static_cast<std::size_t>(place)];
      ++threads;
    }
  }
  if (crowd[static_cast<std::size_t>(core)] <= (threads + cores_ - 1) / cores_) return Crowding::fair;
  Entry& mine = own_entry();
  const auto now = Clock::now();
  if (now - mine.moved < kBetweenMoves) return Crowding::crowded;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return Crowding::crowded;
  const int freer = freer_core(core, crowd, allowed);
  if (freer < 0) return Crowding::crowded;
  mine.moved = now;
  if (!come_to(freer)) return Crowding::crowded;
  record_core();
  return Crowding::moved;
}

}  // namespace axo

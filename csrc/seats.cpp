// The rows of cores and the move; see seats.h.
#include "seats.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace axo::host {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kBetweenMoves{200};

std::atomic<SeatRow*> g_row{nullptr};

struct Seat {
  ~Seat() {
    if (taken()) row->cores[slot].store(0, std::memory_order_relaxed);
  }
  bool taken() const { return slot >= 0 && row == g_row.load(std::memory_order_relaxed); }

  SeatRow* row = nullptr;
  int slot = -1;
  Clock::time_point moved{};
};

Seat& seat() {
  static thread_local Seat mine;
  return mine;
}

void take_seat(Seat& mine, SeatRow* row, std::int32_t core) {
  mine.row = row;
  mine.slot = -1;
  for (int i = 0; i < kSeats && mine.slot < 0; ++i) {
    std::int32_t empty = 0;
    if (row->cores[i].compare_exchange_strong(empty, core + 1, std::memory_order_relaxed)) mine.slot = i;
  }
}

}  // namespace

int count_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

void come_to(int core) {
  if (::sched_getcpu() == core) return;
  cpu_set_t all, one;
  if (core < 0 || core >= CPU_SETSIZE || ::sched_getaffinity(0, sizeof(all), &all) != 0 || !CPU_ISSET(core, &all)) {
    return;
  }
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (::sched_setaffinity(0, sizeof(one), &one) == 0) ::sched_setaffinity(0, sizeof(all), &all);
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

Seats::Seats(SeatRow* own) : rows_(std::make_shared<Rows>()) { g_row.store(own); }

void Seats::forget() { g_row.store(nullptr); }

void Seats::meet(Rows rows) {
  std::sort(rows.begin(), rows.end());  // ranks that are threads share the row of their process
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::lock_guard<std::mutex> lock(mutex_);
  if (rows.size() >= rows_->size()) rows_ = std::make_shared<const Rows>(std::move(rows));
}

void Seats::sit() {
  SeatRow* const row = g_row.load(std::memory_order_relaxed);
  const std::int32_t core = ::sched_getcpu();
  Seat& mine = seat();
  if (row == nullptr || core < 0 || core >= CPU_SETSIZE) return;
  if (mine.row != row) take_seat(mine, row, core);
  if (mine.slot < 0) return;
  auto& known = row->cores[mine.slot];
  if (known.load(std::memory_order_relaxed) != core + 1) known.store(core + 1, std::memory_order_relaxed);
}

Room Seats::make_room() {
  Seat& mine = seat();
  if (!mine.taken()) return Room::fair;
  std::shared_ptr<const Rows> rows;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rows = rows_;
  }
  sit();
  Crowd crowd{};
  int threads = 0;
  for (const auto& row : *rows) {
    for (const auto& known : row->cores) {
      const std::int32_t core = known.load(std::memory_order_relaxed) - 1;
      if (core < 0 || core >= CPU_SETSIZE) continue;
      ++crowd[static_cast<std::size_t>(core)];
      ++threads;
    }
  }
  const int core = mine.row->cores[mine.slot].load(std::memory_order_relaxed) - 1;
  if (crowd[static_cast<std::size_t>(core)] <= (threads + cores_ - 1) / cores_) return Room::fair;
  const auto now = Clock::now();
  if (now - mine.moved < kBetweenMoves) return Room::crowded;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return Room::crowded;
  const int freer = freer_core(core, crowd, allowed);
  if (freer < 0) return Room::crowded;
  mine.moved = now;
  come_to(freer);
  sit();
  return Room::moved;
}

}  // namespace axo::host

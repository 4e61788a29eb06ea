// How stages are written: WriteMode finds the faster way by a clock of the test's own, keeps it, and notices a change;
// and collectives long enough to be written in both ways move the right bytes.
#include <chrono>

#include "host/write_mode.h"
#include "tests/ranks.h"

using namespace axo;
using host::WriteMode;

namespace {

// Drives a mode through `windows` windows whose rounds take `through` or `past` microseconds; how many went past.
int drive(WriteMode& mode, WriteMode::Time& now, int windows, int through, int past) {
  int around = 0;
  for (int w = 0; w < windows; ++w) {
    around += mode.around();
    for (int r = 0; r < WriteMode::kWindow; ++r) {
      now += std::chrono::microseconds(mode.around() ? past : through);
      mode.staged(now);
    }
  }
  return around;
}

}  // namespace

TEST(pace_keeps_the_faster_way_and_tries_the_other_seldom) {
  WriteMode near, far;
  WriteMode::Time now{};
  CHECK(drive(near, now, 1000, 10, 14) <= 20);
  CHECK(drive(far, now, 1000, 14, 10) >= 980);
}

TEST(pace_follows_when_the_cores_move) {
  WriteMode mode;
  WriteMode::Time now{};
  drive(mode, now, 1000, 10, 14);
  drive(mode, now, WriteMode::kSeldom + 1, 14, 10);  // at most one trial away
  CHECK(drive(mode, now, 100, 14, 10) >= 80);
  drive(mode, now, WriteMode::kSeldom + 1, 10, 14);
  CHECK(drive(mode, now, 100, 10, 14) <= 20);
}

TEST(pace_is_not_moved_by_noise_or_by_one_slow_window) {
  WriteMode mode;
  WriteMode::Time now{};
  for (int i = 0; i < 200; ++i) {
    drive(mode, now, 1, 100, 95);  // five of a hundred better: less than what noise does
    if (i % 10 == 0) drive(mode, now, 1, 1000, 1000);
  }
  CHECK(!mode.around());
}

TEST(pace_counts_no_time_between_collectives) {
  WriteMode mode;
  WriteMode::Time now{};
  for (int i = 0; i < 300; ++i) {
    mode.begin();
    drive(mode, now, 2, 10, 14);
    for (int r = 0; r < WriteMode::kSettle; ++r) mode.staged(now += std::chrono::microseconds(10));
    now += std::chrono::seconds(i % 3);
  }
  CHECK(!mode.around());
}

namespace {

// Of two ranks both reduce the whole, of three each its part.
void large_collectives_are_right(int n) {
  constexpr std::size_t kCount = (12 << 20) / 4 + 77;  // over kSoon windows in all, and no whole number of rounds
  ranks::with_threads(n, [n](const ranks::Comm& c) {
    const int me = c->rank();
    const auto options = ranks::blocking();
    const auto value = [](int rank, std::size_t i) {
      return static_cast<std::int32_t>(i * 3 + i / 4099 + rank * 1000);
    };
    const auto ranks = static_cast<std::size_t>(n);
    std::vector<std::int32_t> mine(ranks * kCount), out(ranks * kCount);
    for (int repeat = 0; repeat < 4; ++repeat) {
      const auto check = [&](const char* op, std::size_t at, std::size_t count, auto&& want) {
        for (std::size_t i = 0; i < count; ++i) {
          if (out[at + i] != want(i)) throw check::Failed(std::string(op) + ": element " + std::to_string(i));
        }
        ++check::checks();
      };
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = value(me, i);
      const auto sum = [&](std::size_t i) {
        std::int32_t total = 0;
        for (int p = 0; p < n; ++p) total += value(p, i);
        return total;
      };
      c->all_reduce(mine.data(), out.data(), kCount, DType::int32, ReduceOp::sum, options);
      check("all_reduce", 0, kCount, sum);
      out = mine;
      c->all_reduce(out.data(), out.data(), kCount, DType::int32, ReduceOp::sum, options);
      check("all_reduce in place", 0, kCount, sum);
      out = mine;
      c->broadcast(out.data(), kCount, DType::int32, 1, options);
      check("broadcast", 0, kCount, [&](std::size_t i) { return value(1, i); });
      c->all_gather(mine.data(), out.data(), kCount, DType::int32, options);
      for (int p = 0; p < n; ++p) {
        check("all_gather", static_cast<std::size_t>(p) * kCount, kCount, [&](std::size_t i) { return value(p, i); });
      }
      const auto first = static_cast<std::size_t>(me) * kCount;
      c->reduce_scatter(mine.data(), out.data(), kCount, DType::int32, ReduceOp::sum, options);
      check("reduce_scatter", 0, kCount, [&](std::size_t i) { return sum(first + i); });
      c->all_to_all(mine.data(), out.data(), kCount, DType::int32, options);
      for (int p = 0; p < n; ++p) {
        check("all_to_all", static_cast<std::size_t>(p) * kCount, kCount,
              [&](std::size_t i) { return value(p, first + i); });
      }
      c->reduce(mine.data(), me == 0 ? out.data() : nullptr, kCount, DType::int32, ReduceOp::sum, 0, options);
      if (me == 0) check("reduce", 0, kCount, sum);
    }
  });
}

}  // namespace

TEST(pace_both_ways_move_the_right_bytes) { large_collectives_are_right(2); }

TEST(pace_large_results_of_three_ranks) { large_collectives_are_right(3); }

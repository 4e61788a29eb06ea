// Threads that wait on one core move apart: which core they choose, that they go there, and that they stay where moving
// helps nobody.
#include "progress/core_spread.h"

#include "tests/ranks.h"

using namespace axo;

namespace {

cpu_set_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CHECK(::sched_getaffinity(0, sizeof(set), &set) == 0);
  return set;
}

cpu_set_t set_of(std::initializer_list<int> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores) CPU_SET(core, &set);
  return set;
}

int core_of(const std::atomic<std::uint64_t>& entry) { return static_cast<int>(entry.load() & 0xffff) - 1; }

// What a thread on `core` writes that has called just now, and will have for an hour.
std::uint64_t fresh(int core) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch() + std::chrono::hours(1);
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) << 16 |
         static_cast<std::uint64_t>(core + 1);
}

// In a child, whose engine has not begun and which may use two cores: its CoreSpread, its row, and that of a peer.
void on_two_cores(const std::function<void(CoreSpread&, CoreRow&, CoreRow&, const cpu_set_t&)>& look) {
  const cpu_set_t all = allowed_cores();
  if (CPU_COUNT(&all) < 2) return;
  ranks::all_well(ranks::processes(1, [&](int) {
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int core = 0; CPU_COUNT(&two) < 2; ++core) {
      if (CPU_ISSET(core, &all)) CPU_SET(core, &two);
    }
    CHECK(::sched_setaffinity(0, sizeof(two), &two) == 0);
    static CoreRow mine, peers;
    CoreSpread spread(&mine);
    CoreSpread::Rows rows;
    for (CoreRow* row : {&mine, &peers}) rows.emplace_back(row, [](const CoreRow*) {});
    spread.meet(rows);
    look(spread, mine, peers, two);
  }));
}

// Whether a thread that sits down where its peer sits is moved from there. The scheduler may be first.
bool moves_away(CoreSpread& spread, CoreRow& mine, CoreRow& peers, const std::function<std::uint64_t(int)>& word) {
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the time between two moves
    const int core = ::sched_getcpu();
    peers.entries[0].store(word(core));
    if (spread.record_core() == core && spread.spread() == Crowding::moved && core_of(mine.entries[0]) != core)
      return true;
  }
  return false;
}

}  // namespace

TEST(core_spread_chooses_the_allowed_core_with_the_fewest) {
  Crowd crowd{};
  crowd[3] = 2;
  CHECK(freer_core(3, crowd, set_of({3, 4})) == 4);
  CHECK(freer_core(3, crowd, set_of({1, 3})) == 1);
  CHECK(freer_core(3, crowd, set_of({3})) == -1);
  crowd[4] = 1;
  CHECK(freer_core(3, crowd, set_of({3, 4})) == -1);  // it would be two there
  CHECK(freer_core(3, crowd, set_of({3, 4, 5})) == 5);
  crowd[3] = 3;
  CHECK(freer_core(3, crowd, set_of({3, 4})) == 4);
  CHECK(freer_core(CPU_SETSIZE - 1, crowd, set_of({0, CPU_SETSIZE - 1})) == -1);
}

PROCESS_TEST(core_spread_moves_a_thread_off_the_core_of_its_peer) {
  on_two_cores([](CoreSpread& spread, CoreRow& mine, CoreRow& peers, const cpu_set_t& two) {
    CHECK(moves_away(spread, mine, peers, fresh));
    const cpu_set_t after = allowed_cores();
    CHECK(CPU_EQUAL(&two, &after));  // and is as free as before
  });
}

PROCESS_TEST(core_spread_forgets_what_is_old) {
  on_two_cores([](CoreSpread& spread, CoreRow& mine, CoreRow& peers, const cpu_set_t&) {
    const auto long_ago = [](int core) { return fresh(core) - ((std::uint64_t{3600} * 1000 + 1000) << 16); };
    CHECK(!moves_away(spread, mine, peers, long_ago));
  });
}

PROCESS_TEST(core_spread_moves_nobody_where_it_helps_nobody) {
  on_two_cores([](CoreSpread& spread, CoreRow&, CoreRow& peers, const cpu_set_t& two) {
    int number = 0;  // a peer on each core, so that one of them must be shared
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &two)) peers.entries[number++].store(fresh(core));
    }
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(spread.spread() == Crowding::fair);
    }
  });
}

PROCESS_TEST(core_spread_reuses_entries_of_ended_threads) {
  on_two_cores([](CoreSpread& spread, CoreRow& mine, CoreRow&, const cpu_set_t&) {
    for (int i = 0; i < 5 * kEntries; ++i) {
      int core = -1;
      std::thread([&] {
        core = spread.record_core();
        spread.spread();
      }).join();
      CHECK(core >= 0);
      int found = 0;
      for (const auto& entry : mine.entries) found += core_of(entry) >= 0;
      CHECK(found == std::min(i + 1, kEntries));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

// Threads that wait on one core move apart: which core they choose, that they go there, and that they stay where moving
// helps nobody.
#include "../seats.h"

#include "ranks.h"

using namespace axo;
using host::Crowd;
using host::SeatRow;
using host::Seats;

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

// In a child, whose engine has not begun: Seats of its own, its row and that of a peer.
void beside_a_peer(const std::function<void(Seats&, SeatRow&, SeatRow&)>& look) {
  ranks::all_well(ranks::processes(1, [&](int) {
    static SeatRow mine, peers;
    Seats seats(&mine);
    Seats::Rows rows;
    for (SeatRow* row : {&mine, &peers}) rows.emplace_back(row, [](const SeatRow*) {});
    seats.meet(rows);
    look(seats, mine, peers);
  }));
}

}  // namespace

TEST(seats_the_core_with_the_fewest_that_is_allowed) {
  Crowd crowd{};
  crowd[3] = 2;
  CHECK(host::freer_core(3, crowd, set_of({3, 4})) == 4);
  CHECK(host::freer_core(3, crowd, set_of({1, 3})) == 1);
  CHECK(host::freer_core(3, crowd, set_of({3})) == -1);
  crowd[4] = 1;
  CHECK(host::freer_core(3, crowd, set_of({3, 4})) == -1);  // it would be two there
  CHECK(host::freer_core(3, crowd, set_of({3, 4, 5})) == 5);
  crowd[3] = 3;
  CHECK(host::freer_core(3, crowd, set_of({3, 4})) == 4);
  CHECK(host::freer_core(CPU_SETSIZE - 1, crowd, set_of({0, CPU_SETSIZE - 1})) == -1);
}

PROCESS_TEST(seats_a_thread_leaves_the_core_of_its_peer) {
  const cpu_set_t all = allowed_cores();
  if (CPU_COUNT(&all) < 2) return;
  beside_a_peer([&](Seats& seats, SeatRow& mine, SeatRow& peers) {
    bool moved = false;
    for (int i = 0; i < 100 && !moved; ++i) {  // the scheduler may move it first
      peers.cores[0].store(::sched_getcpu() + 1);
      seats.sit();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the time between two moves
      moved = seats.make_room() == host::Room::moved;
    }
    CHECK(moved && mine.cores[0].load() > 0);
    const cpu_set_t after = allowed_cores();
    CHECK(CPU_EQUAL(&all, &after));  // and is as free as before
  });
}

PROCESS_TEST(seats_a_thread_stays_where_moving_helps_nobody) {
  beside_a_peer([&](Seats& seats, SeatRow& mine, SeatRow& peers) {
    const cpu_set_t all = allowed_cores();
    // Every core has one peer, so that one of them must be shared.
    int seat = 0;
    for (int core = 0; core < CPU_SETSIZE && seat < host::kSeats; ++core) {
      if (CPU_ISSET(core, &all)) peers.cores[seat++].store(core + 1);
    }
    if (seat != CPU_COUNT(&all)) return;  // more cores than seats
    for (int i = 0; i < 20; ++i) {
      seats.sit();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      CHECK(seats.make_room() == host::Room::fair);
    }
    CHECK(mine.cores[0].load() > 0);
  });
}

PROCESS_TEST(seats_are_given_back_when_a_thread_ends) {
  beside_a_peer([&](Seats& seats, SeatRow& mine, SeatRow&) {
    for (int i = 0; i < 3 * host::kSeats; ++i) {
      std::thread([&] { seats.sit(); }).join();
      for (const auto& seat : mine.cores) CHECK(seat.load() == 0);
    }
    std::vector<std::thread> many;
    std::atomic<int> sitting{0};
    std::atomic<bool> go{false};
    for (int i = 0; i < 2 * host::kSeats; ++i) {
      many.emplace_back([&] {
        seats.sit();
        seats.make_room();
        ++sitting;
        while (!go) std::this_thread::yield();
      });
    }
    while (sitting < 2 * host::kSeats) std::this_thread::yield();
    for (const auto& seat : mine.cores) CHECK(seat.load() > 0);
    go = true;
    for (auto& thread : many) thread.join();
    for (const auto& seat : mine.cores) CHECK(seat.load() == 0);
  });
}

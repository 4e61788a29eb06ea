// SIGKILL at any moment: inside a collective, during init, during split, during abort; also of ranks that hold much
// memory. Every survivor must raise PeerLost that names the dead rank, soon, and nothing may be left behind.
//
// Oracle: the contract in base/communicator.h. The parent kills the victim and notes when; each survivor notes when it
// raised. A shared word, which the dead victim cannot change any more, tells whether it was inside the call.
// AXO_SOAK=1 or more runs 25 kills a kind, two of them (none in abort) of ranks that hold 4 GiB, and wants every
// survivor to raise within 1 s; AXO_RESULTS=FILE appends a JSON line a kind. Without it a short sample runs, with a
// generous limit.
#include <dirent.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/ranks.h"

using namespace axo;
using ranks::Comm;

namespace {

constexpr int kRanks = 4;
enum Kind { in_collective, in_init, in_split, in_abort };
constexpr const char* kNames[] = {"collective", "init", "split", "abort"};

long now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What the processes of one trial share.
struct Board {
  std::atomic<int> inside{0};        // the victim: 1 while it is in the call
  std::atomic<int> came{0};          // 1 once the call has begun for the first time
  std::atomic<long> raised[kRanks];  // when a survivor was through, in microseconds
  static Board* make() {
    void* p = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return new (p) Board{};
  }
};

// Marks the moment when the rank has told that it exists: before it, nobody can miss it.
struct Announcing final : Store {
  Announcing(Store& s, Board* b) : inner(s), board(b) {}
  void set(const std::string& k, const std::string& v) override {
    inner.set(k, v);
    if (board) board->inside = board->came = 1;
  }
  bool has(const std::string& k) override { return inner.has(k); }
  std::string get(const std::string& k, Milliseconds t) override { return inner.get(k, t); }
  Store& inner;
  Board* board;
};

struct Inside {
  explicit Inside(Board* b) : board(b) {
    if (board) board->inside = board->came = 1;
  }
  ~Inside() {
    if (board) board->inside = 0;
  }
  Board* board;
};

std::vector<std::string> names_in(const char* folder) {
  std::vector<std::string> names;
  DIR* dir = ::opendir(folder);
  if (dir == nullptr) return names;
  while (const dirent* e = ::readdir(dir)) names.emplace_back(e->d_name);
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

int sockets_and_segments() {
  int found = 0;
  for (const auto& name : names_in("/proc/self/fd")) {
    char target[256] = {};
    if (::readlink(("/proc/self/fd/" + name).c_str(), target, sizeof(target) - 1) <= 0) continue;
    found += std::strncmp(target, "socket:", 7) == 0 || std::strstr(target, "axo-communicator") != nullptr;
    CHECK(std::strstr(target, "/dev/shm") == nullptr);  // never: so nothing can stay there
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    found += line.find("memfd:axo-communicator") != std::string::npos;
    CHECK(line.find("/dev/shm") == std::string::npos);
  }
  return found;
}

void expect_lost(const std::exception_ptr& error, int victim) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    // A split turns the order of ranks round: the new communicator's words name the victim's rank in it.
    const std::string text = e.what();
    const int named = text.find("'part") == std::string::npos ? victim : kRanks - 1 - victim;
    const std::string name = "rank " + std::to_string(named);
    if (e.peer() != named) throw check::Failed("expected " + name + ": " + text);
    if (text.find(name + " ") == std::string::npos || text.find("; waited ") == std::string::npos) {
      throw check::Failed("a PeerLost without " + name + " or its waiting: " + text);
    }
  }
}

// The life of one rank: it ends with PeerLost, or by the signal.
void rank_main(Kind kind, int rank, int victim, Store& store, Board* board, std::size_t hold, int late_us) {
  Board* mine = rank == victim ? board : nullptr;
  std::vector<char> held;
  if (mine && hold > 0) held.assign(hold, 1);
  if (rank != victim && rank == (victim + 1) % kRanks) std::this_thread::sleep_for(std::chrono::microseconds(late_us));
  const int before = sockets_and_segments();
  std::exception_ptr lost;
  try {
    Announcing announcing(store, kind == in_init ? mine : nullptr);
    Comm world = ranks::connect(announcing, rank, kRanks);
    if (mine && kind == in_init) board->inside = 0;
    std::vector<Comm> parts;
    std::vector<WorkPtr> works;
    if (kind == in_abort) {
      for (int i = 0; i < 16; ++i) parts.push_back(world->split(0, rank, "part" + std::to_string(i)));
    }
    world->barrier(ranks::blocking());
    CHECK(sockets_and_segments() > before);  // the count counts
    if (kind == in_abort && !mine) {
      for (auto& part : parts) works.push_back(part->barrier({}));
    }
    if (kind == in_abort && mine) {
      Inside inside(board);
      for (;;) {  // the first pass takes microseconds; those after it have nothing to end, but take the same way
        for (auto& part : parts) part->abort("rank " + std::to_string(rank) + " ends it");
      }
    }
    std::vector<float> data(3 << 20, 1.0f);
    try {
      while (kind == in_collective) {
        Inside inside(mine);
        world->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::max, ranks::blocking());
      }
      for (int i = 0; kind == in_split; ++i) {
        Inside inside(mine);
        CHECK_EQ(world->split(0, -rank, "part" + std::to_string(i))->rank(), kRanks - 1 - rank);
      }
      if (mine) ::sleep(30);  // the signal comes
      world->barrier(ranks::blocking());
    } catch (...) {
      lost = std::current_exception();
    }
    for (auto& work : works) {
      try {
        work->wait();
        throw check::Failed("a barrier without the victim ended well");
      } catch (const Aborted& e) {
        CHECK(std::strstr(e.what(), "ends it") != nullptr);
      } catch (const PeerLost& e) {
        CHECK_EQ(e.peer(), victim);
      }
    }
  } catch (const PeerLost&) {
    lost = std::current_exception();
  }
  if (!lost) throw check::Failed("nothing was thrown");
  board->raised[rank] = now_us();
  expect_lost(lost, victim);
  // The progress thread may have looked after the last of them, and lets it go a moment later.
  for (const long until = now_us() + 5'000'000; sockets_and_segments() != before && now_us() < until;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(sockets_and_segments(), before);
}

struct Result {
  bool inside = false;
  std::vector<double> seconds;  // of each survivor, from the kill
};

Result kill_once(Kind kind, int victim, int delay_us, std::size_t hold, int late_us) {
  ranks::TableStore store;
  Board* board = Board::make();
  std::fflush(stdout);
  std::vector<pid_t> pids;
  for (int r = 0; r < kRanks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) ranks::be_rank(r, [&](int rank) { rank_main(kind, rank, victim, store, board, hold, late_us); });
    pids.push_back(pid);
    check::children().add(pid);
  }
  while (board->came.load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  if (kind == in_abort) {  // a short call: hit it
    const long until = now_us() + delay_us;
    while (now_us() < until) {
    }
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  }
  const long killed = now_us();
  ::kill(pids[static_cast<std::size_t>(victim)], SIGKILL);
  const auto ends = ranks::reap(pids);
  Result result;
  result.inside = board->inside.load() == 1;
  for (int r = 0; r < kRanks; ++r) {
    const int wanted = r == victim ? 128 + SIGKILL : 0;
    if (ends[static_cast<std::size_t>(r)] != wanted) {
      throw check::Failed(std::string(kNames[kind]) + ", victim " + std::to_string(victim) + ": rank " +
                          std::to_string(r) + " ended with " + std::to_string(ends[static_cast<std::size_t>(r)]));
    }
    if (r != victim) result.seconds.push_back(static_cast<double>(board->raised[r].load() - killed) * 1e-6);
  }
  // The name that the leader listened at is free again.
  try {
    std::istringstream card(store.get("world/0", Milliseconds(1)));
    std::string word;
    while (card >> word) {
      if (word.compare(0, 4, "axo-") != 0) continue;
      std::ifstream sockets("/proc/net/unix");
      for (std::string line; std::getline(sockets, line);) CHECK(line.find(word) == std::string::npos);
    }
  } catch (const Timeout&) {  // the entry is gone too
  }
  ::munmap(board, sizeof(Board));
  return result;
}

void kill_many(Kind kind, unsigned seed) {
  const bool soak = std::getenv("AXO_SOAK") != nullptr;
  const int wanted = soak ? 25 : 2, large = soak && kind != in_abort ? 2 : 0;
  const double limit = soak ? 1.0 : 5.0;
  std::mt19937 random(seed);
  int hits = 0, tries = 0;
  std::vector<double> seconds;
  double worst_large = 0;
  while (hits < wanted && tries < 8 * wanted + 20) {
    const bool holds = hits < large;
    const int longest = kind == in_abort ? 250 : kind == in_init ? 9000 : 60000;
    const Result r = kill_once(kind, static_cast<int>(random() % kRanks),
                               static_cast<int>(random() % static_cast<unsigned>(longest)),
                               holds ? std::size_t{4} << 30 : 0, static_cast<int>(random() % 30000));
    ++tries;
    for (double s : r.seconds) {
      if (s >= limit) throw check::Failed("a survivor of a kill took " + std::to_string(s) + " s");
      ++check::checks();
    }
    if (!r.inside) continue;
    ++hits;
    seconds.insert(seconds.end(), r.seconds.begin(), r.seconds.end());
    if (holds) worst_large = std::max(worst_large, *std::max_element(r.seconds.begin(), r.seconds.end()));
  }
  CHECK_EQ(hits, wanted);
  CHECK_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left
  std::sort(seconds.begin(), seconds.end());
  char line[512];
  std::snprintf(line, sizeof(line),
                "{\"test\": \"kills\", \"inside\": \"%s\", \"kills\": %d, \"kills_with_4_gib\": %d, \"ranks\": %d, "
                "\"survivors\": %zu, \"raised_peer_lost\": %zu, \"median_s\": %.4f, \"worst_s\": %.4f, "
                "\"worst_with_4_gib_s\": %.4f, \"limit_s\": %.1f, \"missed_the_call\": %d}\n",
                kNames[kind], hits, large, kRanks, seconds.size(), seconds.size(), seconds[seconds.size() / 2],
                seconds.back(), worst_large, limit, tries - hits);
  if (!soak) return;
  std::fputs(line, stdout);
  if (const char* path = std::getenv("AXO_RESULTS")) std::ofstream(path, std::ios::app) << line;
}

}  // namespace

PROCESS_TEST(soak_kills_in_collectives) { kill_many(in_collective, 1); }
PROCESS_TEST(soak_kills_in_init) { kill_many(in_init, 2); }
PROCESS_TEST(soak_kills_in_split) { kill_many(in_split, 3); }
PROCESS_TEST(soak_kills_in_abort) { kill_many(in_abort, 4); }

// What happens when a rank dies, at any moment, or forks; and what is left behind.
//
// Oracle: the contract in base/communicator.h; the texts must name rank, communicator, operation and sequence number.
#include <dirent.h>
#include <signal.h>

#include <fstream>
#include <random>

#include "hosts/link_limit.h"
#include "progress/engine.h"
#include "tests/ranks.h"

using namespace axo;
using ranks::Comm;
using SteadyClock = std::chrono::steady_clock;

namespace {

double since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

void all_reduce(const Comm& c, std::vector<float>& data, CallOptions options = ranks::blocking()) {
  c->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum, options);
}

int open_files() {
  int n = 0;
  DIR* dir = ::opendir("/proc/self/fd");
  while (::readdir(dir)) ++n;
  ::closedir(dir);
  return n;
}

int axo_mappings() {
  std::ifstream maps("/proc/self/maps");
  int n = 0;
  for (std::string line; std::getline(maps, line);) n += line.find("memfd:axo-communicator") != std::string::npos;
  return n;
}

// A word that forked processes share.
struct Shared {
  std::atomic<int> value{0};
  std::atomic<long> more{0};
  static Shared* make() {
    void* p = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return new (p) Shared;
  }
};

// Survivors loop over `work` until it throws; the victim is killed, by itself, after a moment.
void kill_one(int n, int victim, int delay_us, const std::function<void(const Comm&, int step)>& work) {
  ranks::TableStore store;
  Shared* killed = Shared::make();
  const auto ends = ranks::processes(n, [&](int r) {
    Comm c = ranks::connect(store, r, n);
    std::thread killer;
    if (r == victim) {
      killer = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        killed->more =
            std::chrono::duration_cast<std::chrono::microseconds>(SteadyClock::now().time_since_epoch()).count();
        ::kill(::getpid(), SIGKILL);
      });
    }
    try {
      for (int step = 0;; ++step) work(c, step);
    } catch (const PeerLost& e) {
      const long now =
          std::chrono::duration_cast<std::chrono::microseconds>(SteadyClock::now().time_since_epoch()).count();
      const std::string text = e.what();
      CHECK_EQ(e.peer(), victim);
      CHECK(text.find("on 'world' (rank " + std::to_string(r) + " of " + std::to_string(n)) != std::string::npos);
      CHECK(text.find("rank " + std::to_string(victim) + " (process ") != std::string::npos);
      // Between two calls another rank may have told it first: then no operation of this rank is named.
      const bool pending = text.find("died; waited") != std::string::npos && text.find('#') != std::string::npos;
      CHECK(pending || text.find("died before the call; waited 0 s") != std::string::npos);
      CHECK(now - killed->more < 3000000);  // the aim is 1 s; a loaded machine may add to it
      CHECK_THROWS(Aborted, "is aborted: rank " + std::to_string(victim) + " died", c->barrier(ranks::blocking()));
      c->shutdown();
    }
  });
  for (int r = 0; r < n; ++r) CHECK_EQ(ends[static_cast<std::size_t>(r)], r == victim ? 128 + SIGKILL : 0);
}

}  // namespace

PROCESS_TEST(kill_in_all_reduce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 6; ++trial) {
    const int n = 2 + trial;
    kill_one(n, static_cast<int>(random() % static_cast<unsigned>(n)), 1000 + static_cast<int>(random() % 60000),
             [](const Comm& c, int step) {
               std::vector<float> data(static_cast<std::size_t>(1 + step * 7919 % 500000), 1.0f);
               all_reduce(c, data);
             });
  }
}

PROCESS_TEST(kill_with_operations_pending) {
  kill_one(4, 1, 30000, [](const Comm& c, int) {
    std::vector<std::vector<float>> data(8, std::vector<float>(10000));
    std::vector<WorkPtr> works;
    for (auto& d : data)
      works.push_back(c->all_reduce(d.data(), d.data(), d.size(), DType::float32, ReduceOp::sum, {}));
    std::exception_ptr first;
    for (auto& w : works) {
      try {
        w->wait();
      } catch (const PeerLost&) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  });
}

PROCESS_TEST(kill_in_messages) {
  kill_one(3, 2, 20000, [](const Comm& c, int) {
    std::vector<char> a(300000), b(300000);
    auto s = c->send(a.data(), a.size(), DType::uint8, (c->rank() + 1) % 3, 0, {});
    auto r = c->recv(b.data(), b.size(), DType::uint8, (c->rank() + 2) % 3, 0, {});
    r->wait();
    s->wait();
  });
}

// Rank 2 is killed. Rank 0 waits for anybody, and after some messages rank 1 sends no more.
PROCESS_TEST(kill_in_a_receive_from_any_rank) {
  kill_one(3, 2, 20000, [](const Comm& c, int step) {
    std::vector<char> a(70000);
    if (c->rank() == 0) {
      c->recv(a.data(), a.size(), DType::uint8, kAnyPeer, 0, ranks::blocking());
    } else if (c->rank() == 2 || step < 10) {
      c->send(a.data(), a.size(), DType::uint8, 0, 0, ranks::blocking());
    } else {
      c->recv(a.data(), a.size(), DType::uint8, 2, 1, ranks::blocking());
    }
  });
}

PROCESS_TEST(kill_while_idle) {
  kill_one(2, 0, 20000, [](const Comm& c, int step) {
    if (step == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    c->barrier(ranks::blocking());
  });
}

PROCESS_TEST(kill_in_create_and_split) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 20; ++trial) {
    constexpr int n = 4;
    const int victim = static_cast<int>(random() % n);
    const int delay = static_cast<int>(random() % 6000);
    ranks::TableStore store;
    Shared* published = Shared::make();
    const auto ends = ranks::processes(n, [&](int r) {
      std::thread killer;
      if (r == victim) {
        killer = std::thread([&] {
          // Before it has published itself nobody can know that it exists: only the launcher, or a timeout, helps.
          while (published->value.load() == 0) std::this_thread::yield();
          std::this_thread::sleep_for(std::chrono::microseconds(delay));
          ::kill(::getpid(), SIGKILL);
        });
      }
      const auto start = SteadyClock::now();
      try {
        struct Announcing final : Store {
          Store& inner;
          Shared* flag;
          bool tell;
          Announcing(Store& s, Shared* f, bool t) : inner(s), flag(f), tell(t) {}
          void set(const std::string& k, const std::string& v) override {
            inner.set(k, v);
            if (tell) flag->value = 1;
          }
          bool has(const std::string& k) override { return inner.has(k); }
          std::string get(const std::string& k, Milliseconds t) override { return inner.get(k, t); }
        } mine(store, published, r == victim);
        Comm c = ranks::connect(mine, r, n);
        for (int step = 0;; ++step) {
          auto part = c->split(r % 2, -r, "half");
          CHECK_EQ(part->size(), 2);
          CHECK_EQ(part->rank(), r < 2 ? 1 : 0);
          part->barrier(ranks::blocking());
        }
      } catch (const PeerLost&) {
      } catch (const Aborted&) {
      }
      CHECK(since(start) < 5);
    });
    for (int r = 0; r < n; ++r) CHECK_EQ(ends[static_cast<std::size_t>(r)], r == victim ? 128 + SIGKILL : 0);
  }
}

PROCESS_TEST(exit_without_shutdown) {
  // A rank that ends after its last operation disturbs nobody: what it has published still counts.
  for (int trial = 0; trial < 5; ++trial) {
    ranks::TableStore store;
    ranks::all_well(ranks::processes(4, [&](int r) {
      Comm c = ranks::connect(store, r, 4);
      std::vector<float> data(200000, 1.0f);
      all_reduce(c, data);
      CHECK_EQ(data.back(), 4.0f);
      if (r == 1) ::_exit(0);
      if (r == 2) c.reset();
      if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    }));
  }
}

// A rank that is stopped is late, not lost: nobody may say otherwise, and once it goes on all is well.
PROCESS_TEST(a_stopped_rank_is_not_dead) {
  for (const bool meeting : {true, false}) {
    ranks::TableStore store;
    std::vector<pid_t> pids;
    for (int r = 0; r < 3; ++r) {
      pids.push_back(::fork());
      if (pids.back() != 0) {
        check::children().add(pids.back());
        continue;
      }
      ranks::be_rank(r, [&](int rank) {
        if (meeting && rank == 2) ::raise(SIGSTOP);
        Comm c = ranks::connect(store, rank, 3);
        std::vector<float> data(500000, 1.0f);
        if (!meeting && rank == 2) ::raise(SIGSTOP);
        all_reduce(c, data);
        CHECK_EQ(data[7], 3.0f);
        if (!meeting && rank != 2) store.set("done", "");
        c->shutdown();
      });
    }
    int status = 0;
    CHECK_EQ(::waitpid(pids[2], &status, WUNTRACED), pids[2]);
    CHECK(WIFSTOPPED(status));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // a dozen looks at the peers
    CHECK(!store.has("done"));
    for (int r = 0; r < 2; ++r) CHECK_EQ(::waitpid(pids[static_cast<std::size_t>(r)], &status, WNOHANG), 0);
    ::kill(pids[2], SIGCONT);
    ranks::all_well(ranks::reap(pids));
  }
}

PROCESS_TEST(fork_marks_the_child) {
  ranks::TableStore store;
  ranks::all_well(ranks::processes(2, [&](int r) {
    Comm c = ranks::connect(store, r, 2);
    auto pending = r == 0 ? c->barrier({}) : nullptr;
    const auto child = ranks::processes(1, [&](int) {
      CHECK_THROWS(Error, "belongs to the parent process", c->barrier(ranks::blocking()));
      if (pending) CHECK_THROWS(Error, "belongs to the parent process", pending->wait());
      // A communicator of its own is fine.
      ranks::TableStore own;
      ranks::with_threads(2, [](Comm k) { k->barrier(ranks::blocking()); });
      pending.reset();
      c.reset();
    });
    ranks::all_well(child);
    if (r == 1)
      c->barrier(ranks::blocking());
    else
      pending->wait();
    std::vector<float> data(100000, 1.0f);
    all_reduce(c, data);
    CHECK_EQ(data[99999], 2.0f);
    c->shutdown();
  }));
}

PROCESS_TEST(a_forked_child_does_not_hide_a_death) {
  ranks::TableStore store;
  const auto ends = ranks::processes(2, [&](int r) {
    Comm c = ranks::connect(store, r, 2);
    c->barrier(ranks::blocking());
    if (r == 1) {
      if (::fork() == 0) {
        ::sleep(2);
        ::_exit(0);
      }
      ::kill(::getpid(), SIGKILL);
    }
    const auto start = SteadyClock::now();
    CHECK_THROWS(PeerLost, "died", c->barrier(ranks::blocking()));
    CHECK(since(start) < 1.5);
  });
  CHECK_EQ(ends[0], 0);
}

PROCESS_TEST(a_forked_child_keeps_its_own_time_of_the_link) {
  const auto reserve = [] {
    const auto self = ProgressEngine::get().self();
    const auto now = Clock::now();
    hosts::simulate_link({1e9, 0});
    CHECK(hosts::LinkLimit(self).reserve(1000, now) > now);
    CHECK(self->page()->link_free > 0);
  };
  const auto ends = ranks::processes(1, [&](int) {
    reserve();
    ranks::all_well(ranks::processes(1, [&](int) {
      // The addresses of the pages that it has not inherited shall not become those of its own.
      for (int i = 0; i < 64; ++i) ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      reserve();
    }));
  });
  ranks::all_well(ends);
}

TEST(nothing_stays_behind) {
  ranks::with_threads(2, [](Comm c) { c->barrier(ranks::blocking()); });  // the engine's own page stays
  const int files = open_files();
  CHECK_EQ(axo_mappings(), 0);
  for (int trial = 0; trial < 5; ++trial) {
    ranks::TableStore store;
    ranks::threads(4, [&](int r) {
      Comm c = ranks::connect(store, r, 4);
      auto half = c->split(c->rank() / 2, 0, "half");
      auto none = c->split(c->rank() == 0 ? -1 : 0, 0, "three");
      CHECK_EQ(none == nullptr, c->rank() == 0);
      half->barrier(ranks::blocking());
      if (none) none->shutdown();
      if (c->rank() == 3)
        c.reset();
      else
        c->shutdown();
    });
  }
  CHECK_EQ(open_files(), files);
  CHECK_EQ(axo_mappings(), 0);
}

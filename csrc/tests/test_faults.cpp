// What happens when a rank dies, leaves, stalls, aborts or asks for something else than the others.
//
// Oracle: the contract in communicator.h; the texts must name rank, communicator, operation and sequence number.
#include <dirent.h>
#include <signal.h>

#include <fstream>
#include <random>

#include "ranks.h"

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
        killed->more = std::chrono::duration_cast<std::chrono::microseconds>(SteadyClock::now().time_since_epoch()).count();
        ::kill(::getpid(), SIGKILL);
      });
    }
    try {
      for (int step = 0;; ++step) work(c, step);
    } catch (const PeerLost& e) {
      const long now = std::chrono::duration_cast<std::chrono::microseconds>(SteadyClock::now().time_since_epoch()).count();
      const std::string text = e.what();
      CHECK_EQ(e.peer(), victim);
      CHECK(text.find("on 'world' (rank " + std::to_string(r) + " of " + std::to_string(n)) != std::string::npos);
      CHECK(text.find("rank " + std::to_string(victim) + " (process ") != std::string::npos);
      CHECK(text.find("died; waited") != std::string::npos);
      CHECK(text.find('#') != std::string::npos);
      CHECK(now - killed->more < 3000000);  // the aim is 1 s; a loaded machine may add to it
      CHECK_THROWS(Aborted, "is aborted: rank " + std::to_string(victim) + " died", c->barrier(ranks::blocking()));
      c->shutdown();
    }
  });
  for (int r = 0; r < n; ++r) CHECK_EQ(ends[static_cast<std::size_t>(r)], r == victim ? 128 + SIGKILL : 0);
}

}  // namespace

TEST(kill_in_all_reduce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 6; ++trial) {
    const int n = 2 + trial;
    kill_one(n, static_cast<int>(random() % static_cast<unsigned>(n)), 1000 + static_cast<int>(random() % 60000), [](const Comm& c, int step) {
      std::vector<float> data(static_cast<std::size_t>(1 + step * 7919 % 500000), 1.0f);
      all_reduce(c, data);
    });
  }
}

TEST(kill_with_operations_pending) {
  kill_one(4, 1, 30000, [](const Comm& c, int) {
    std::vector<std::vector<float>> data(8, std::vector<float>(10000));
    std::vector<WorkPtr> works;
    for (auto& d : data) works.push_back(c->all_reduce(d.data(), d.data(), d.size(), DType::float32, ReduceOp::sum, {}));
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

TEST(kill_in_messages) {
  kill_one(3, 2, 20000, [](const Comm& c, int) {
    std::vector<char> a(300000), b(300000);
    auto s = c->send(a.data(), a.size(), DType::uint8, (c->rank() + 1) % 3, 0, {});
    auto r = c->recv(b.data(), b.size(), DType::uint8, (c->rank() + 2) % 3, 0, {});
    r->wait();
    s->wait();
  });
}

TEST(kill_while_idle) {
  kill_one(2, 0, 20000, [](const Comm& c, int step) {
    if (step == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    c->barrier(ranks::blocking());
  });
}

TEST(kill_in_create_and_split) {
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

TEST(absent_rank_times_out) {
  ranks::TableStore store;
  ranks::threads(3, [&](int r) {
    if (r == 2) return;
    CHECK_THROWS(Timeout, "rank 2 has not come", ranks::connect(store, r, 3, Milliseconds(r == 0 ? 300 : 20000)));
  });
}

TEST(exit_without_shutdown) {
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

TEST(left_peer_is_named) {
  ranks::with_threads(3, [](Comm c) {
    c->barrier(ranks::blocking());
    if (c->rank() == 1) return c->shutdown();
    CHECK_THROWS(PeerLost, "rank 1 (process " + std::to_string(::getpid()) + ") left", c->barrier(ranks::blocking()));
  });
}

TEST(mismatch_is_named_on_every_rank) {
  struct Case {
    const char* text;
    std::function<void(const Comm&, float*)> call;
  };
  const auto b = ranks::blocking();
  const std::vector<Case> cases = {
      {"rank 0: all_reduce(float32[8], sum); rank 1: broadcast(float32[8], root 0)",
       [&](const Comm& c, float* p) {
         if (c->rank() == 1) c->broadcast(p, 8, DType::float32, 0, b);
         else c->all_reduce(p, p, 8, DType::float32, ReduceOp::sum, b);
       }},
      {"rank 0: all_reduce(float32[8], sum); rank 1: all_reduce(float32[9], sum)",
       [&](const Comm& c, float* p) {
         c->all_reduce(p, p, c->rank() == 1 ? 9 : 8, DType::float32, ReduceOp::sum, b);
       }},
      {"rank 0: all_reduce(float32[8], sum); rank 1: all_reduce(int32[8], sum)",
       [&](const Comm& c, float* p) {
         c->all_reduce(p, p, 8, c->rank() == 1 ? DType::int32 : DType::float32, ReduceOp::sum, b);
       }},
      {"rank 0: all_reduce(float32[8], sum); rank 1: all_reduce(float32[8], max)",
       [&](const Comm& c, float* p) {
         c->all_reduce(p, p, 8, DType::float32, c->rank() == 1 ? ReduceOp::max : ReduceOp::sum, b);
       }},
      {"rank 0: broadcast(float32[8], root 0); rank 1: broadcast(float32[8], root 1)",
       [&](const Comm& c, float* p) { c->broadcast(p, 8, DType::float32, c->rank() == 1 ? 1 : 0, b); }},
      {"all_to_all_v: rank 1 sends 3 elements to rank",
       [&](const Comm& c, float* p) {
         const auto N = static_cast<std::size_t>(c->size());
         std::vector<std::size_t> ones(N, 1), threes(N, 3), offsets(N, 0);
         c->all_to_all_v(p, c->rank() == 1 ? threes : ones, offsets, p + 32, ones, offsets, DType::float32, b);
       }},
  };
  for (const auto& one : cases) {
    for (int n : {2, 4}) {
      ranks::with_threads(n, [&](Comm c) {
        std::vector<float> data(64);
        c->barrier(ranks::blocking());
        CHECK_THROWS(Mismatch, one.text, one.call(c, data.data()));
        CHECK_THROWS(Aborted, "is aborted", c->barrier(ranks::blocking()));
      });
    }
  }
}

TEST(message_mismatch_is_named) {
  ranks::with_threads(2, [](Comm c) {
    std::vector<float> data(1000);
    if (c->rank() == 0) {
      CHECK_THROWS(Mismatch, "rank 0 sends float32[1000], rank 1 expects float32[999]",
                   c->send(data.data(), 1000, DType::float32, 1, 3, ranks::blocking()));
    } else {
      CHECK_THROWS(Mismatch, "rank 0 sends float32[1000], rank 1 expects float32[999]",
                   c->recv(data.data(), 999, DType::float32, 0, 3, ranks::blocking()));
    }
  });
}

TEST(timeout_names_who_is_missing) {
  ranks::with_threads(3, [](Comm c) {
    c->barrier(ranks::blocking());
    CallOptions options = ranks::blocking();
    options.timeout = Milliseconds(c->rank() == 0 ? 150 : 30000);
    std::vector<float> data(10);
    if (c->rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      CHECK_THROWS(Timeout, "rank 0 timed out", all_reduce(c, data, options));
      return;
    }
    CHECK_THROWS(Timeout, "arrived: 0, 1; not arrived: 2 (last issued barrier #1)", all_reduce(c, data, options));
  });
}

TEST(synchronize_leaves_the_operation_pending) {
  ranks::with_threads(2, [](Comm c) {
    std::vector<float> data(10, 1.0f);
    if (c->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(120));
    auto w = c->all_reduce(data.data(), data.data(), 10, DType::float32, ReduceOp::sum, {});
    if (c->rank() == 0) {
      CHECK_THROWS(Timeout, "still pending after 30 ms", w->synchronize(Milliseconds(30)));
      CHECK(!w->is_completed());
      CHECK(w->seconds() < 0);
    }
    w->synchronize(Milliseconds(20000));
    CHECK(w->is_completed());
    CHECK(w->seconds() >= 0);
    CHECK(w->exception() == nullptr);
    CHECK_EQ(data[9], 2.0f);
  });
}

TEST(abort_frees_every_waiter) {
  ranks::with_threads(4, [](Comm c) {
    std::vector<float> data(100000, 1.0f);
    all_reduce(c, data);
    if (c->rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      c->abort("the user has had enough");
      c->abort("and again");
      CHECK_THROWS(Aborted, "the user has had enough", all_reduce(c, data));
      return;
    }
    CHECK_THROWS(Aborted, "the user has had enough", all_reduce(c, data));
  });
}

TEST(abort_of_own_pending_operations) {
  ranks::with_threads(2, [](Comm c) {
    std::vector<float> data(1000, 1.0f);
    if (c->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      CHECK_THROWS(Aborted, "stop", all_reduce(c, data));
      return;
    }
    auto work = c->all_reduce(data.data(), data.data(), 1000, DType::float32, ReduceOp::sum, {});
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      c->abort("stop");
    });
    CHECK_THROWS(Aborted, "stop", work->wait());
    other.join();
  });
}

TEST(wrong_arguments) {
  ranks::with_threads(2, [](Comm c) {
    float x = 0;
    CHECK_THROWS(Error, "broadcast: root: got 2, expected a rank from 0 to 1", c->broadcast(&x, 1, DType::float32, 2, {}));
    CHECK_THROWS(Error, "send: peer: got -1", c->send(&x, 1, DType::float32, -1, 0, {}));
    CHECK_THROWS(Error, "bxor is not defined on float32", c->all_reduce(&x, &x, 1, DType::float32, ReduceOp::bit_xor, {}));
    CHECK_THROWS(Error, "sum is not defined on complex64", c->all_reduce(&x, &x, 1, DType::complex64, ReduceOp::sum, {}));
    CHECK_THROWS(Error, "in: got null", c->all_reduce(nullptr, &x, 1, DType::float32, ReduceOp::sum, {}));
    CHECK_THROWS(Error, "expected 2 entries", c->all_to_all_v(&x, {1}, {0}, &x, {1}, {0}, DType::float32, {}));
    c->barrier(ranks::blocking());
    c->shutdown();
    c->shutdown();
    CHECK_THROWS(Error, "is closed", c->barrier({}));
  });
}

TEST(fork_marks_the_child) {
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
    if (r == 1) c->barrier(ranks::blocking());
    else pending->wait();
    std::vector<float> data(100000, 1.0f);
    all_reduce(c, data);
    CHECK_EQ(data[99999], 2.0f);
    c->shutdown();
  }));
}

TEST(a_forked_child_does_not_hide_a_death) {
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
      if (c->rank() == 3) c.reset();
      else c->shutdown();
    });
  }
  CHECK_EQ(open_files(), files);
  CHECK_EQ(axo_mappings(), 0);
}

// What happens when a rank leaves, stalls, aborts or asks for something else than the others.
//
// Oracle: the contract in base/communicator.h; the texts must name rank, communicator, operation and sequence number.
#include <fcntl.h>
#include <sys/resource.h>

#include "tests/ranks.h"

using namespace axo;
using ranks::Comm;

namespace {

void all_reduce(const Comm& c, std::vector<float>& data, CallOptions options = ranks::blocking()) {
  c->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum, options);
}

}  // namespace

TEST(left_peer_is_named) {
  ranks::with_threads(3, [](Comm c) {
    c->barrier(ranks::blocking());
    if (c->rank() == 1) return c->shutdown();
    CHECK_THROWS(PeerLost, "rank 1 (process " + std::to_string(::getpid()) + ") left", c->barrier(ranks::blocking()));
  });
}

// Rank 1 hears that the store has gone while rank 2 is about to begin with the first operation, or to give up.
TEST(a_store_that_leaves_after_the_ranks_have_met_ends_nothing) {
  const auto until = [](const std::function<bool()>& is) {
    while (!is()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  for (bool comes : {true, false}) {
    ranks::TableStore store;
    std::atomic<int> waiting{0}, served{0}, gone{0};
    ranks::threads(3, [&](int rank) {
      ranks::Meeting meeting(store, "world", rank, 3, Milliseconds(60000));
      bool first = true;
      const auto watch = [&] {
        if (rank != 0 && first) waiting.fetch_add(1);  // for rank 0, which does not lead yet
        if (rank == 2 && first) until([&] { return gone.load() > 0; });
        if (rank == 2 && !comes) throw Failure{FailureKind::peer_lost, 2, "rank 2 gave up"};
        if (rank == 0) served.store(1);  // both have greeted it before, so it waits in the first operation
        if (rank == 1 && served.load() > 0) {
          gone.store(1);
          throw Failure{FailureKind::peer_lost, 0, "the store has gone"};
        }
        first = false;
      };
      if (rank == 0) until([&] { return waiting.load() == 2; });
      const auto meet = [&] {
        return create_host_communicator(meeting.leader(), meeting.address(0), rank, 3, HostOptions{}, watch);
      };
      if (comes) {
        meet()->barrier(ranks::blocking());
      } else if (rank == 1) {
        CHECK_THROWS(PeerLost, "the store has gone", meet());
      } else {
        CHECK_THROWS(Error, "", meet());
      }
    });
  }
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
         if (c->rank() == 1)
           c->broadcast(p, 8, DType::float32, 0, b);
         else
           c->all_reduce(p, p, 8, DType::float32, ReduceOp::sum, b);
       }},
      {"rank 0: all_reduce(float32[8], sum); rank 1: all_reduce(float32[9], sum)",
       [&](const Comm& c, float* p) { c->all_reduce(p, p, c->rank() == 1 ? 9 : 8, DType::float32, ReduceOp::sum, b); }},
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
      {"differs between ranks: rank 1 sends 3 elements to rank",
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
    CHECK_THROWS(Aborted, "aborted: rank 0 timed out after", all_reduce(c, data, options));
  });
}

TEST(errors_name_their_operation_once) {
  ranks::with_threads(2, [](Comm c) {
    auto half = c->split(0, 0, "half");
    CallOptions options = ranks::blocking();
    options.timeout = Milliseconds(c->rank() == 0 ? 100 : 30000);
    std::string text;
    try {
      if (c->rank() == 0) half->barrier(options);
      if (c->rank() == 1) c->recv(&text, 1, DType::uint8, 0, 5, options);
    } catch (const Error& e) {
      text = e.what();
    }
    if (c->rank() == 0) {
      CHECK_EQ(text.find("barrier #1 on 'half' (rank 0 of 2): timed out after 0."), 0u);
      CHECK(text.find("; arrived: 0; not arrived: 1 (last issued barrier #0") != std::string::npos);
      CHECK(text.find("barrier #1", 1) == std::string::npos);
      c->abort("enough");
    } else {
      CHECK_EQ(text.find("recv(uint8[1], from rank 0, tag 5) #0 on 'world' (rank 1 of 2): aborted: enough; waited 0."),
               0u);
    }
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

TEST(a_rank_that_gives_up_is_lost_to_its_peers_with_its_error) {
  ranks::with_threads(3, [](Comm c) {
    Comm idle = c->split(0, c->rank(), "idle");
    std::vector<float> data(100000, 1.0f);
    all_reduce(c, data);
    const std::string who = "rank 2 (process " + std::to_string(::getpid()) + ") raised ValueError: bad batch";
    if (c->rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (const Comm& each : {c, idle}) each->give_up("raised ValueError: bad batch");
      CHECK_THROWS(Aborted, "raised ValueError: bad batch", all_reduce(c, data));
      return;
    }
    try {
      all_reduce(c, data);
      CHECK(false);
    } catch (const PeerLost& e) {
      CHECK_EQ(e.peer(), 2);
      CHECK(std::string(e.what()).find(who) != std::string::npos);
    }
    CHECK_THROWS(Aborted, "raised ValueError: bad batch", all_reduce(c, data));
    while (idle->failure() == nullptr) std::this_thread::yield();
    CHECK_THROWS(PeerLost, who, all_reduce(idle, data));  // nothing was pending here
  });
}

TEST(a_time_limit_holds_for_what_begins_after_it) {
  ranks::with_threads(2, [](Comm c) {
    const Milliseconds before = c->set_timeout(Milliseconds(50));
    CHECK_EQ(c->set_timeout(before).count(), 50);
    if (c->rank() == 1) {
      while (c->failure() == nullptr) std::this_thread::yield();
      return;
    }
    c->set_timeout(Milliseconds(50));
    CHECK_THROWS(Timeout, "timed out after 0.", c->split(0, 0, "part"));
  });
}

TEST(long_reasons_end_with_a_whole_character) {
  CHECK_EQ(clipped("a\u00fcb", 3), "a\u00fc");
  CHECK_EQ(clipped("a\u00fcb", 2), "a");
  CHECK_EQ(clipped("a\u00fcb", 9), "a\u00fcb");
  CHECK_EQ(clipped("\u00fc", 0), "");
  std::string reason;
  while (reason.size() < 4000) reason += "\u00fc";
  for (const int late : {0, 50}) {  // before the abort, perhaps, and after it
    ranks::with_threads(2, [&](Comm c) {
      if (c->rank() == 0) return c->abort(reason);
      std::this_thread::sleep_for(std::chrono::milliseconds(late));
      try {
        c->barrier(ranks::blocking());
        CHECK(false);
      } catch (const Aborted& e) {
        std::string said = e.what();
        said = said.substr(0, said.find("; waited"));
        CHECK(said.size() > 500 && said.substr(said.size() - 2) == "\u00fc");
      }
    });
  }
}

TEST(time_limits_that_no_clock_holds) {
  ranks::with_threads(
      2,
      [](Comm c) {
        float x = 1.0f;
        auto work = c->recv(&x, 1, DType::float32, 1 - c->rank(), 1, {});
        std::this_thread::sleep_for(std::chrono::milliseconds(c->rank() * 60));  // more than a tick
        c->send(&x, 1, DType::float32, 1 - c->rank(), 1, {});
        work->synchronize(Milliseconds::max());
        CHECK(work->is_completed());
      },
      Milliseconds::max());
}

PROCESS_TEST(a_rank_that_may_open_no_files_says_so) {
  ranks::TableStore store;
  const auto ends = ranks::processes(2, [&](int r) {
    ranks::with_threads(1, [](Comm) {});  // the engine has what it needs
    if (r == 0) {
      CHECK_THROWS(PeerLost, "rank 1", ranks::connect(store, r, 2));
      return;
    }
    // Numbers that are free below the limit: four, whatever gaps there were. The leader's, a socket's, two more.
    std::vector<int> taken;
    for (int i = 0; i < 64; ++i) taken.push_back(::open("/dev/null", O_RDONLY));
    rlimit before{};
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit few{static_cast<rlim_t>(taken.back()) + 1, before.rlim_max};
    for (int i = 0; i < 4; ++i) {
      ::close(taken.back());
      taken.pop_back();
    }
    std::exception_ptr error;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    try {
      ranks::connect(store, r, 2);
    } catch (...) {
      error = std::current_exception();
    }
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);  // a sanitizer that looks at the error opens files too
    CHECK(error != nullptr);
    CHECK_THROWS(Error, "this process may not open the 5 files that its peers share", std::rethrow_exception(error));
  });
  ranks::all_well(ends);
}

TEST(abort_frees_a_shutdown) {
  ranks::with_threads(2, [](Comm c) {
    float x = 1.0f;
    if (c->rank() == 0) {
      auto pending = c->recv(&x, 1, DType::float32, 1, 7, {});  // never sent
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        c->abort("enough");
      });
      c->shutdown();
      other.join();
      CHECK_THROWS(Aborted, "enough", pending->wait());
      c->abort("too late");  // and not its affair
    } else {
      CHECK_THROWS(Aborted, "enough", c->barrier(ranks::blocking()));
    }
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
    CHECK_THROWS(Error, "broadcast: root: got 2, expected a rank from 0 to 1",
                 c->broadcast(&x, 1, DType::float32, 2, {}));
    CHECK_THROWS(Error, "send: peer: got -1", c->send(&x, 1, DType::float32, -1, 0, {}));
    CHECK_THROWS(Error, "bxor is not defined on float32",
                 c->all_reduce(&x, &x, 1, DType::float32, ReduceOp::bit_xor, {}));
    CHECK_THROWS(Error, "sum is not defined on complex64",
                 c->all_reduce(&x, &x, 1, DType::complex64, ReduceOp::sum, {}));
    CHECK_THROWS(Error, "in: got null", c->all_reduce(nullptr, &x, 1, DType::float32, ReduceOp::sum, {}));
    CHECK_THROWS(Error, "expected 2 entries", c->all_to_all_v(&x, {1}, {0}, &x, {1}, {0}, DType::float32, {}));
    c->barrier(ranks::blocking());
    c->shutdown();
    c->shutdown();
    CHECK_THROWS(Error, "is closed", c->barrier({}));
  });
}

PROCESS_TEST(crossed_blocking_calls_are_named) {
  ranks::TableStore store;
  ranks::all_well(ranks::processes(2, [&](int r) {
    Comm c = ranks::connect(store, r, 2, Milliseconds(r == 0 ? 800 : 20000));
    auto a = c->split(0, 0, "a"), b = c->split(0, 0, "b");
    if (r == 0) {
      CHECK_THROWS(Timeout, "1 (last issued barrier #0, is blocked in barrier #1 on 'b' (rank 1 of 2))",
                   a->barrier(ranks::blocking()));
      b->barrier(ranks::blocking());
    } else {
      b->barrier(ranks::blocking());
      CHECK_THROWS(Timeout, "rank 0 timed out", a->barrier(ranks::blocking()));
    }
  }));
  ++check::checks();
}

// Non-blocking operations: order, groups, lifetimes, and random interleavings over overlapping communicators.
#include "tests/interleave.h"

using namespace axo;
using ranks::Comm;

PROCESS_TEST(progress_without_the_caller) {
  // The operation completes while the caller does something else and never calls Axo.
  ranks::TableStore store;
  ranks::all_well(ranks::processes(2, [&](int r) {
    Comm c = ranks::connect(store, r, 2);
    std::vector<float> data(4 << 20, 1.0f);
    std::atomic<bool> told{false};
    auto w = c->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum, {});
    w->on_completion([&] { told = true; });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!w->is_completed() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    CHECK(w->is_completed());
    CHECK_EQ(data.back(), 2.0f);
    w->wait();
    while (!told) std::this_thread::yield();  // told by the progress thread, just after completion
    bool at_once = false;
    w->on_completion([&] { at_once = true; });
    CHECK(at_once);
    c->shutdown();
  }));
}

PROCESS_TEST(what_came_before_is_complete_too) {
  // The progress thread finds two operations complete, and is kept by the first one's callback. Whoever waits for a
  // third one meanwhile must see the second complete.
  ranks::TableStore store;
  ranks::all_well(ranks::processes(2, [&](int r) {
    Comm c = ranks::connect(store, r, 2);
    std::vector<int> data(3, 1);
    std::atomic<bool> kept{r == 1};
    const auto sum = [&](int i) { return c->all_reduce(&data[i], &data[i], 1, DType::int32, ReduceOp::sum, {}); };
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that rank 0 is not done at once
    group_start();
    const WorkPtr first = sum(0), second = sum(1);
    if (r == 0) {
      first->on_completion([&] {
        kept = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      });
    }
    group_end();
    while (!kept) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    sum(2)->wait();
    CHECK(second->is_completed());
    CHECK_EQ(data[1], 2);
    first->wait();
    c->shutdown();
  }));
}

TEST(messages_match_by_tag) {
  ranks::with_threads(2, [](Comm c) {
    constexpr int kTags = 40;  // more than a channel has envelopes
    std::vector<std::vector<int>> data(kTags);
    std::vector<WorkPtr> works;
    for (int t = 0; t < kTags; ++t) {
      auto& d = data[static_cast<std::size_t>(t)];
      d.assign(static_cast<std::size_t>(t % 3 == 0 ? 50000 : t), 0);
      if (c->rank() == 0) {
        for (std::size_t i = 0; i < d.size(); ++i) d[i] = t * 1000000 + static_cast<int>(i);
        works.push_back(c->send(d.data(), d.size(), DType::int32, 1, t, {}));
      }
    }
    if (c->rank() == 1) {
      for (int t = kTags - 1; t >= 0; --t) {  // the other way round, one after the other
        auto& d = data[static_cast<std::size_t>(t)];
        c->recv(d.data(), d.size(), DType::int32, 0, t, ranks::blocking());
        for (std::size_t i = 0; i < d.size(); ++i) CHECK_EQ(d[i], t * 1000000 + static_cast<int>(i));
      }
    }
    for (auto& w : works) w->wait();
  });
}

TEST(equal_tags_keep_their_order) {
  ranks::with_threads(2, [](Comm c) {
    std::vector<int> data(100);
    std::vector<WorkPtr> works;
    for (int i = 0; i < 100; ++i) {
      int& x = data[static_cast<std::size_t>(i)];
      if (c->rank() == 0) x = i;
      works.push_back(c->rank() == 0 ? c->send(&x, 1, DType::int32, 1, 0, {}) : c->recv(&x, 1, DType::int32, 0, 0, {}));
    }
    for (auto& w : works) w->wait();
    for (int i = 0; i < 100; ++i) CHECK_EQ(data[static_cast<std::size_t>(i)], i);
  });
}

TEST(group_issues_at_its_end) {
  ranks::with_threads(3, [](Comm c) {
    auto other = c->split(0, 0, "other");
    std::vector<float> a(1000, 1.0f), b(10, 2.0f);
    group_start();
    group_start();
    auto w1 = c->all_reduce(a.data(), a.data(), a.size(), DType::float32, ReduceOp::sum, {});
    auto w2 = other->all_reduce(b.data(), b.data(), b.size(), DType::float32, ReduceOp::sum, {});
    CHECK_THROWS(Error, "blocking call inside a group", c->barrier(ranks::blocking()));
    CHECK_THROWS(Error, "inside a group", c->split(0, 0, "x"));
    group_end();
    CHECK(!w1->is_completed());
    CHECK_THROWS(Error, "group that has not ended", w1->wait());
    group_end();
    w2->wait();
    w1->wait();
    CHECK_EQ(a[999], 3.0f);
    CHECK_EQ(b[9], 6.0f);
    CHECK_THROWS(Error, "no group_start", group_end());
  });
}

TEST(crossed_order_without_blocking) {
  ranks::with_threads(2, [](Comm c) {
    auto a = c->split(0, 0, "a"), b = c->split(0, 0, "b");
    for (int i = 0; i < (check::kThreadSanitizer ? 20 : 200); ++i) {
      std::vector<int> x(5000, 1), y(70000, 2);
      auto& first = c->rank() == 0 ? a : b;
      auto& second = c->rank() == 0 ? b : a;
      auto& fx = c->rank() == 0 ? x : y;
      auto& fy = c->rank() == 0 ? y : x;
      auto w1 = first->all_reduce(fx.data(), fx.data(), fx.size(), DType::int32, ReduceOp::sum, {});
      second->all_reduce(fy.data(), fy.data(), fy.size(), DType::int32, ReduceOp::sum, ranks::blocking());
      w1->wait();
      CHECK_EQ(x[4999], 2);
      CHECK_EQ(y[69999], 4);
    }
  });
}

TEST(keep_alive_lives_until_the_end) {
  ranks::with_threads(2, [](Comm c) {
    const auto me = std::this_thread::get_id();
    std::atomic<int> dead{0};
    std::atomic<bool> elsewhere{false};
    const auto token = [&] {
      return std::shared_ptr<void>(new int, [&, me](void* p) {
        delete static_cast<int*>(p);
        if (std::this_thread::get_id() != me) elsewhere = true;
        ++dead;
      });
    };
    std::vector<float> data(300000, 1.0f);
    CallOptions options;
    options.keep_alive = token();
    auto w = c->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum, options);
    options.keep_alive.reset();
    if (c->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK_EQ(dead.load(), 0);
    w->wait();
    CHECK_EQ(dead.load(), 1);
    // Dropped before it is complete: the object dies later, on a thread of the program.
    options.keep_alive = token();
    c->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum, options);
    options.keep_alive.reset();
    c->barrier(ranks::blocking());
    c->barrier(ranks::blocking());
    c->shutdown();
  });
}

TEST(random_interleavings_threads) {
  ranks::with_threads(4, [](Comm c) { ranks::interleave(c, 1, check::kThreadSanitizer ? 40 : 150); });
}
PROCESS_TEST(random_interleavings_processes) {
  ranks::TableStore store;
  ranks::all_well(ranks::processes(4, [&](int r) {
    Comm c = ranks::connect(store, r, 4);
    ranks::interleave(c, 2, 400);
    c->shutdown();
  }));
  ++check::checks();
}

namespace {

constexpr int kTag = 3;

// What rank `r` sends as its message number `i`: short ones inside the envelope, long ones in several chunks.
std::vector<int> letter(int r, int i) {
  std::vector<int> text(i % 2 == 0 ? 64 : 60000);
  for (std::size_t k = 0; k < text.size(); ++k) text[k] = r * 1000000 + i * 100000 + static_cast<int>(k);
  return text;
}

}  // namespace

TEST(messages_from_any_rank) {
  constexpr int n = 4, each = 6;
  for (const bool pending : {false, true}) {
    ranks::with_threads(n, [&](Comm c) {
      std::vector<std::vector<int>> mine;
      std::vector<WorkPtr> sends;
      for (int i = 0; i < each && c->rank() != 0; ++i) {
        mine.push_back(letter(c->rank(), i));
        sends.push_back(
            c->send(mine[static_cast<std::size_t>(i)].data(), mine.back().size(), DType::int32, 0, kTag + i % 2, {}));
      }
      if (c->rank() == 0) {
        int seen[n] = {};
        for (int parity = 0; parity < 2; ++parity) {  // one tag for each length
          constexpr std::size_t kMost = (n - 1) * each / 2;
          std::vector<std::vector<int>> got(kMost, letter(0, parity));
          std::vector<WorkPtr> works;
          for (auto& g : got) {
            works.push_back(c->recv(g.data(), g.size(), DType::int32, kAnyPeer, kTag + parity,
                                    pending ? CallOptions{} : ranks::blocking()));
          }
          std::fill(seen, seen + n, parity);
          for (std::size_t i = 0; i < kMost; ++i) {
            works[i]->wait();
            const int from = works[i]->source();
            CHECK(from > 0 && from < n);
            CHECK(got[i] == letter(from, seen[from]));  // those of one rank come in the order in which it sent them
            seen[from] += 2;
          }
        }
        for (int r = 1; r < n; ++r) CHECK_EQ(seen[r], each + 1);
      }
      for (auto& w : sends) w->wait();
    });
  }
}

// A message goes to the receive that was issued first, whether that one names its sender or not.
TEST(receives_from_any_rank_keep_their_place) {
  ranks::with_threads(3, [](Comm c) {
    if (c->rank() == 0) {
      int a = -1, b = -1, d = -1, e = -1, self = 77;
      auto first = c->recv(&a, 1, DType::int32, 1, 0, {});
      auto second = c->recv(&b, 1, DType::int32, kAnyPeer, 0, {});
      auto third = c->recv(&d, 1, DType::int32, 1, 0, {});
      CHECK_EQ(second->source(), -1);
      c->barrier(ranks::blocking());
      for (auto& w : {first, second, third}) w->wait();
      CHECK_EQ(a, 10);
      CHECK_EQ(b, 11);  // only rank 1 sends before the next barrier
      CHECK_EQ(d, 12);
      CHECK_EQ(first->source(), 1);
      CHECK_EQ(second->source(), 1);
      c->barrier(ranks::blocking());
      auto last = c->recv(&e, 1, DType::int32, kAnyPeer, 0, {});
      last->wait();
      CHECK_EQ(e, 20);
      CHECK_EQ(last->source(), 2);
      auto own = c->recv(&e, 1, DType::int32, kAnyPeer, 9, {});
      auto sent = c->send(&self, 1, DType::int32, 0, 9, {});
      own->wait();
      sent->wait();
      CHECK_EQ(e, 77);
      CHECK_EQ(own->source(), 0);
      CHECK_EQ(sent->source(), -1);
    } else {
      c->barrier(ranks::blocking());
      for (int i = 0; i < 3 && c->rank() == 1; ++i) {
        const int x = 10 + i;
        c->send(&x, 1, DType::int32, 0, 0, ranks::blocking());
      }
      c->barrier(ranks::blocking());
      const int x = 20;
      if (c->rank() == 2) c->send(&x, 1, DType::int32, 0, 0, ranks::blocking());
    }
  });
}

TEST(a_receive_from_any_rank_that_nobody_sends) {
  ranks::with_threads(3, [](Comm c) {
    if (c->rank() != 0) return;
    int x = 0;
    // Both others leave at once.
    CHECK_THROWS(PeerLost, "recv(int32[1], from any rank, tag 5) #0 on 'world' (rank 0 of 3): rank ",
                 c->recv(&x, 1, DType::int32, kAnyPeer, 5, ranks::blocking()));
  });
  ranks::with_threads(2, [](Comm c) {
    auto other = c->split(0, c->rank(), "other");
    if (c->rank() == 0) {
      int x = 0;
      CallOptions options = ranks::blocking();
      options.timeout = Milliseconds(60);
      CHECK_THROWS(Timeout, "no rank has sent such a message: 1 (",
                   other->recv(&x, 1, DType::int32, kAnyPeer, 5, options));
      CHECK_THROWS(Error, "send: peer: got -1", c->send(&x, 1, DType::int32, kAnyPeer, 5, ranks::blocking()));
      c->barrier(ranks::blocking());
      std::vector<float> y(10);
      CHECK_THROWS(Mismatch, "rank 1 sends float32[9], rank 0 expects float32[10]",
                   c->recv(y.data(), y.size(), DType::float32, kAnyPeer, 0, ranks::blocking()));
    } else {
      c->barrier(ranks::blocking());
      std::vector<float> y(9);
      c->send(y.data(), y.size(), DType::float32, 0, 0, ranks::blocking());
    }
  });
}

// Non-blocking operations: order, groups, lifetimes, and random interleavings over overlapping communicators.
#include "interleave.h"

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

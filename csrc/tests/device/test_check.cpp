// AXO_CHECK=1: ranks that issue different things, or the same things in another order, hear it before anything hangs.
// Oracle: Mismatch on every rank that can know, with both sides named; and silence when all is well.
#include "device/order_check.h"
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

DeviceOptions checked(int timeout_ms = 20000) {
  DeviceOptions options;
  options.check = 1;
  options.timeout = Milliseconds(timeout_ms);
  return options;
}

TEST(equal_orders_pass) {
  ranks(3, [](Rank& me) {
    Comm a = me.connect("a", checked()), b = me.connect("b", checked());
    float x[3] = {1, 1, 1}, y = 1, z[3] = {};
    const auto o = me.on_stream();
    for (int i = 0; i < 3; ++i) {
      a->all_reduce(&y, &y, 1, f32, ReduceOp::max, o)->wait();
      b->all_gather(&y, z, 1, f32, o)->wait();
      axo::group_start();
      // Inside a group the order is free.
      if (me.rank == 1) b->broadcast(x, 3, f32, 0, o);
      auto work = a->reduce(x, x, 3, f32, ReduceOp::max, 2, o);
      if (me.rank != 1) b->broadcast(x, 3, f32, 0, o);
      axo::group_end();
      work->wait();
      if (me.rank == 0) a->send(&y, 1, f32, 1, 5, o)->wait();
      if (me.rank == 1) a->recv(&y, 1, f32, 0, 5, o)->wait();
    }
    auto row = a->split(0, 0, "row");
    row->barrier(me.on_stream(true));
    row->shutdown();
    a->shutdown();
    b->shutdown();
  });
  CHECK_EQ(standin::aborts(), 0);
}

TEST(different_operations_are_named) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("pair", checked());
    float x[8] = {};
    const auto o = me.on_stream();
    comm->all_reduce(x, x, 8, f32, ReduceOp::sum, o);
    const std::string issued[2] = {"all_reduce(float32[4], sum)", "broadcast(float32[4], root 0)"};
    const std::string said = "operation 2 of 'pair' differs: rank " + std::to_string(me.rank) + " issued " +
                             issued[me.rank] + ", rank " + std::to_string(1 - me.rank) + " issued " +
                             issued[1 - me.rank];
    CHECK_THROWS(axo::Mismatch, said,
                 me.rank == 0 ? comm->all_reduce(x, x, 4, f32, ReduceOp::sum, o) : comm->broadcast(x, 4, f32, 0, o));
    CHECK_THROWS(axo::Aborted, "differs", comm->barrier(o));
    comm->shutdown();
  });
}

TEST(different_messages_are_named) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("pair", checked());
    float x[2] = {};
    if (me.rank == 0) {
      comm->send(x, 1, f32, 1, 3, me.on_stream());
      comm->abort("nobody takes it");
      comm->shutdown();
      return;
    }
    CHECK_THROWS(axo::Mismatch,
                 "rank 1 issued recv(float32[2], from rank 0, tag 4), rank 0 issued send(float32[1], to rank 1, tag 3)",
                 comm->recv(x, 2, f32, 0, 4, me.on_stream()));
    comm->shutdown();
  });
}

// Rank 0: a, b. Rank 1: b, a. Each waits for the other: found without a timeout.
TEST(crossed_orders_are_found) {
  std::atomic<int> found{0};
  Meet all(2);
  ranks(2, [&](Rank& me) {
    Comm a = me.connect("a", checked(60000)), b = me.connect("b", checked(60000));
    float x = 1;
    Comm first = me.rank == 0 ? a : b;
    try {
      first->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    } catch (const axo::Mismatch& e) {
      ++found;
      CHECK(std::string(e.what()).find("crossed order: rank") != std::string::npos);
    }
    all.here();
    CHECK_EQ(found.load(), 2);
    a->shutdown();
    b->shutdown();
  });
}

// The same operations on the shared pair, but another communicator came in between on one rank only.
TEST(a_shifted_order_is_found) {
  auto store = std::make_shared<MapStore>();
  axo::OrderCheck zero(store, "k", "pair", 0, 2, Milliseconds(1000)), one(store, "k", "pair", 1, 2, Milliseconds(1000));
  const auto none = [] { return std::vector<axo::OrderCheck::Neighbour>(); };
  const auto go = [] {};
  const axo::OrderCheck::Positions at_zero = {{"other", 2}, {"mine", 9}}, at_one = {{"other", 3}, {"theirs", 1}};
  const auto first = zero.publish("op", at_zero);
  CHECK_EQ(first, one.publish("op", at_one));
  CHECK_THROWS(axo::Mismatch, "before it rank 0 issued 2 operations of 'other', rank 1 issued 3",
               zero.verify(first, "op", at_zero, none, go));
  CHECK_THROWS(axo::Mismatch, "before it rank 1 issued 3", one.verify(first, "op", at_one, none, go));
  const auto second = zero.publish("op", {});
  one.publish("op", {{"other", 5}});
  zero.verify(second, "op", {}, none, go);  // nothing in common: nothing to compare
}

TEST(what_a_store_says_is_not_trusted) {
  auto store = std::make_shared<MapStore>();
  axo::OrderCheck check(store, "k", "pair", 0, 2, Milliseconds(260));
  const auto neighbours = [] { return std::vector<axo::OrderCheck::Neighbour>{{"q", "other", 0, 1}}; };
  const auto go = [] {};
  const auto n = check.publish("op", {{"other", 1}});
  store->set("k/op/1/1", "op\nnonsense\n-3 other\n1 other");
  check.verify(n, "op", {{"other", 1}}, neighbours, go);
  for (const char* board : {"", "x y z", "2 1 elsewhere\nop", "1 0 q\nop"}) {  // none of these is a crossing
    store->set("k/at/1", board);
    CHECK_THROWS(axo::Timeout, "rank 1 has not arrived",
                 check.verify(check.publish("op", {}), "op", {}, neighbours, go));
  }
  axo::OrderCheck patient(store, "k", "pair", 0, 2, Milliseconds(20000));
  store->set("k/at/1", "2 0 q\nall_reduce");
  store->set("k/op/1/1", "op");
  patient.verify(patient.publish("op", {}), "op", {}, neighbours, go);
  CHECK_THROWS(axo::Mismatch, "which waits in operation 2 of 'other' (all_reduce) for this rank",
               patient.verify(patient.publish("op", {}), "op", {}, neighbours, go));
}

TEST(a_rank_that_does_not_come_is_named) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("pair", checked(300));
    float x = 1;
    if (me.rank == 0) {
      CHECK_THROWS(axo::Timeout,
                   "operation 1 of 'pair' (all_reduce(float32[1], sum)): rank 1 has not arrived after 300 ms",
                   comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    }
    comm->shutdown();
  });
}

TEST(a_check_without_a_time_limit) {
  Meet both(2);
  ranks(2, [&](Rank& me) {
    DeviceOptions options = checked();
    options.timeout = axo::kNoTimeout;
    Comm comm = me.rank == 0 ? me.connect("pair", options) : me.connect("pair", checked());
    float x = 1;
    if (me.rank == 1) eventually([&] { return me.store->has("pair/op/1/0"); });  // the other one waits
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(axo::kNoTimeout);
    CHECK_EQ(x, 2.0f);
    both.here();
    comm->shutdown();
  });
}

TEST(abort_ends_the_wait_of_a_check) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("pair", checked());
    if (me.rank == 1) return;
    std::thread impatient([&] {
      std::this_thread::sleep_for(Milliseconds(20));
      comm->abort("enough");
    });
    float x = 1;
    CHECK_THROWS(axo::Aborted, "enough", comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    impatient.join();
    comm->shutdown();
  });
}

TEST(the_environment_switches_the_check_on) {
  for (const auto& [value, on] : std::vector<std::pair<const char*, bool>>{{"1", true}, {"0", false}, {"", false}}) {
    ::setenv("AXO_CHECK", value, 1);
    ranks(2, [on = on](Rank& me) {
      Comm comm = me.connect();
      float x = 1;
      comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->wait();
      CHECK_EQ(me.store->has("world/op/1/" + std::to_string(me.rank)), on);
      comm->shutdown();
    });
  }
  ::unsetenv("AXO_CHECK");
}

TEST(a_switch_that_is_neither_on_nor_off_is_an_error) {
  ::setenv("AXO_CHECK", "true", 1);
  ranks(2, [](Rank& me) { CHECK_THROWS(axo::Error, "AXO_CHECK: got 'true', expected 0 or 1", me.connect()); });
  ::unsetenv("AXO_CHECK");
}

}  // namespace
}  // namespace device

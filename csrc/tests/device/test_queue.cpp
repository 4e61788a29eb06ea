// The launch queue under several threads, and a library that hangs.
// Oracle: the stand-in's rule that two threads are never in the library for one device; values.
#include <future>

#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

// One rank, one device, four communicators, four threads that launch as fast as they can.
TEST(one_launch_at_a_time) {
  ranks(1, [](Rank& me) {
    std::vector<Comm> comms;
    for (int i = 0; i < 4; ++i) comms.push_back(me.connect("c" + std::to_string(i)));
    std::vector<std::thread> threads;
    std::vector<float> values(4, 1);
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        CallOptions o = me.on_stream();
        for (int k = 0; k < 100; ++k) comms[i]->all_reduce(&values[i], &values[i], 1, f32, ReduceOp::sum, o)->wait();
        if (i % 2) comms[i]->barrier(o)->synchronize(Milliseconds(30000));
      });
    }
    for (auto& thread : threads) thread.join();
    for (Comm comm : comms) comm->shutdown();
  });
}

TEST(many_pending_operations) {
  ranks(2, [](Rank& me) {
    Comm a = me.connect("a"), b = me.connect("b");
    std::vector<float> x(600, 1), y(600, 1);
    std::vector<std::shared_ptr<axo::Work>> works;
    for (int i = 0; i < 600; ++i) {
      works.push_back(a->all_reduce(&x[i], &x[i], 1, f32, ReduceOp::sum, me.on_stream()));
      works.push_back(b->all_reduce(&y[i], &y[i], 1, f32, ReduceOp::sum, me.on_stream()));
    }
    for (auto& work : works) work->wait();
    standin::synchronize(me.stream);
    CHECK(x == std::vector<float>(600, 2));
    CHECK(y == x);
    a->shutdown();
    b->shutdown();
  });
}

// Both wait for a rank that does not come, and the second stands behind the first on the caller's stream. An abort of
// NCCL's returns when the communicator's kernels are over (init.cc, commDestroySync).
TEST(aborts_do_not_wait_for_each_other) {
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm a = me.connect("a"), b = me.connect("b");
    a->set_timeout(Milliseconds(300));
    b->set_timeout(Milliseconds(600));
    both.here();
    if (me.rank == 0) {
      float x = 1, y = 1;
      auto first = b->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true));
      auto second = a->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream(true));
      standin::synchronize(me.stream);  // a program's .item()
      CHECK_THROWS(axo::Timeout, "on 'a'", second->wait());
      CHECK_THROWS(axo::Timeout, "on 'b'", first->wait());
      eventually([&] { return standin::aborts() >= 2; });
    }
    both.here();
    a->shutdown();
    b->shutdown();
  });
}

// The watchdog drops the last reference to a communicator, which is aborted by that. It must go on looking after the
// others, one of which has a kernel that only its own abort ends.
TEST(a_dropped_communicator_does_not_hold_the_watchdog) {
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm dropped = me.connect("dropped"), stuck = me.connect("stuck");
    stuck->set_timeout(Milliseconds(300));
    void* other = standin::create_stream(0);
    CallOptions on_other;
    on_other.stream = other;
    on_other.blocking = true;
    standin::Gate gate;
    float x = 1;
    standin::kernel(me.stream, [] {}, &gate);
    dropped->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    dropped.reset();  // the pending operation holds it
    both.here();
    call_that_is_stuck(me, stuck, on_other, gate);
    both.here();
    stuck->shutdown();
    standin::destroy_stream(other);
  });
}

// A thread that has chosen no device counts as one of GPU 0. Nobody makes a context there, of hundreds of megabytes, by
// giving it back.
TEST(no_context_on_a_gpu_that_is_not_the_ranks) {
  if (is_hip() || is_old()) return ranks(1, [](Rank& me) { CHECK(me.context->gpu().has_context(0)); });  // cannot tell
  const auto store = std::make_shared<MapStore>();
  std::weak_ptr<axo::DeviceContext> watched;
  std::async(std::launch::async,
             [&] {  // a new thread
               Rank me{store, 0, 1, new_context(3), nullptr};
               watched = me.context;
               DeviceOptions options;
               options.device = 3;
               options.context = me.context;
               Comm comm = axo::create_device_communicator(store, "third", 0, 1, options);
               Comm broken = axo::create_device_communicator(store, "broken", 0, 1, options);
               standin::current_device() = 3;
               me.stream = standin::create_stream(0);
               standin::current_device() = 0;
               float x = 1;
               comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(axo::kNoTimeout);
               CHECK(!me.context->gpu().has_context(0));
               broken->abort("its end is on a thread of its own");
               eventually([] { return standin::aborts() == 1; });
               broken->shutdown();
               comm->shutdown();
               standin::destroy_stream(me.stream);
             })
      .get();
  eventually([&] { return watched.expired(); });
  CHECK(standin::contexts() == std::set<int>{3});
  // Where there is one the thread gets its device back.
  const auto context = new_context(3);
  standin::make_context(0);
  standin::current_device() = 0;
  {
    axo::DeviceGuard guard(context->gpu(), 3);
    CHECK_EQ(standin::current_device(), 3);
  }
  CHECK_EQ(standin::current_device(), 0);
}

// The library itself hangs inside a call: the abort does not wait for its turn for ever.
TEST(abort_of_a_call_that_hangs_in_the_library) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    {
      const auto stuck = me.context->queue().turn();  // stands for the thread inside the library
      comm->abort("it hangs");
      CHECK_THROWS(axo::Aborted, "it hangs", work->wait());
      eventually([&] { return standin::aborts() > 0; });
    }
    gate.open();
    comm->shutdown();
  });
}

// The last reference to everything is dropped on the watchdog's own thread.
TEST(the_watchdog_may_be_the_last) {
  std::weak_ptr<axo::DeviceContext> context;
  standin::Gate gate;
  float x = 1;
  ranks(1, [&](Rank& me) {
    Comm comm = me.connect();
    standin::kernel(me.stream, [] {}, &gate);
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    context = me.context;
    comm.reset();
    me.context.reset();
    CHECK(!context.expired());  // the pending operation holds it
    gate.open();
    eventually([&] { return context.expired(); });
  });
  eventually([] { return standin::live_events() == 0; });
}

}  // namespace
}  // namespace device

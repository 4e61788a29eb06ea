// The order that streams give: which calls are made, and that nothing runs before what it depends on.
// Oracle: a gate that the test opens. While it is shut, what must come later has not happened.
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

TEST(calls_of_one_pending_operation) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);  // pending until then
    standin::clear_calls();
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    // The stream follows the caller's, the operation is launched, its end is marked.
    CHECK_EQ(text(sequence()), "EventRecord; StreamWaitEvent; ncclAllReduce count=1 type=7 op=0; EventRecord");
    standin::clear_calls();
    work->wait();
    CHECK_EQ(text(sequence()), "StreamWaitEvent");
    gate.open();
    work->synchronize(Milliseconds(30000));
    standin::clear_calls();
    work->wait();  // complete: nothing left to order
    CHECK_EQ(text(sequence()), "");
    comm->shutdown();
  });
}

TEST(calls_of_one_blocking_operation) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::clear_calls();
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true));
    CHECK_EQ(text(sequence()), "ncclAllReduce count=1 type=7 op=0; EventRecord");
    standin::clear_calls();
    work->wait();  // it is on the caller's stream already
    CHECK_EQ(text(sequence()), "");
    comm->shutdown();
  });
}

TEST(an_operation_waits_for_the_callers_stream) {
  Meet issued(2);
  standin::Gate gate;
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    float x = 0;
    standin::kernel(me.stream, [&] { x = 5; }, &gate);  // the producer, not done yet
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    CHECK(!work->is_completed());
    float seen = 0;
    work->wait();
    standin::kernel(me.stream, [&] { seen = x; });  // the consumer
    issued.here();
    CHECK(!work->is_completed());
    CHECK_THROWS(axo::Timeout, "still pending after 5 ms", work->synchronize(Milliseconds(5)));
    issued.here();
    if (me.rank == 0) gate.open();
    standin::synchronize(me.stream);
    CHECK_EQ(seen, 10.0f);
    work->synchronize(Milliseconds(30000));
    comm->shutdown();
  });
}

TEST(another_stream_can_wait) {
  Meet issued(2);
  standin::Gate gate;
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    void* other = standin::create_stream(0);
    float x = 1, seen = 0;
    standin::kernel(me.stream, [] {}, &gate);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    work->wait_on(other);
    standin::kernel(other, [&] { seen = x; });
    issued.here();
    CHECK_EQ(seen, 0.0f);
    issued.here();
    if (me.rank == 0) gate.open();
    standin::synchronize(other);
    CHECK_EQ(seen, 2.0f);
    comm->shutdown();
    standin::destroy_stream(other);
  });
}

// Blocking and non-blocking operations of one communicator run on different streams and still in issue order.
TEST(issue_order_across_streams) {
  Meet issued(2);
  standin::Gate gate;
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    void* side = standin::create_stream(0);
    float x = 1;
    standin::kernel(me.stream, [] {}, &gate);
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());  // 2, on the communicator's stream
    CallOptions aside;
    aside.stream = side;
    aside.blocking = true;
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::product, aside);  // 4, on `side`, which nothing else orders
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());  // 8
    issued.here();
    CHECK(!standin::is_idle(side));
    CHECK_EQ(x, 1.0f);
    issued.here();
    if (me.rank == 0) gate.open();
    work->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 8.0f);
    comm->shutdown();
    standin::destroy_stream(side);
  });
}

// Ranks 0 and 1 are in an operation that rank 2 is late for; what they share without it goes on beside it, where
// launches are ordered by the library.
TEST(communicators_overlap_or_share_a_stream) {
  const bool overlap = !shares_a_stream();
  Meet issued(3);
  standin::Gate gate;
  ranks(3, [&](Rank& me) {
    Comm a = me.connect("a");
    auto b = std::dynamic_pointer_cast<axo::DeviceCommunicator>(a->split(me.rank < 2 ? 0 : -1, 0, "b"));
    CHECK(!b || (a->stream() == b->stream()) == !overlap);
    CHECK_EQ(standin::stream_priority(a->stream()), -5);
    float x = 1, y = 1;
    if (me.rank == 2) standin::kernel(me.stream, [] {}, &gate);
    auto first = a->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    auto second = b ? b->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream()) : nullptr;
    issued.here();
    if (second && overlap) second->synchronize(Milliseconds(30000));
    if (second) CHECK_EQ(second->is_completed(), overlap);
    CHECK(!first->is_completed());
    issued.here();
    if (me.rank == 0) gate.open();
    first->synchronize(Milliseconds(30000));
    if (second) second->synchronize(Milliseconds(30000));
    CHECK_EQ(x + y, second ? 5.0f : 4.0f);
    if (b) b->shutdown();
    a->shutdown();
  });
}

// A device holds one kernel, which stays until its peers come. Rank 1's own stream is late: were `b` free to begin
// there while rank 0 is in `a`, both would wait for ever. So whatever stream an operation is on, its place is that of
// issue.
TEST(kernels_that_do_not_fit_beside_each_other) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    standin::settings().resident_kernels = 1;
    Meet issued(2);
    standin::Gate late;
    ranks(2, [&](Rank& me) {
      DeviceOptions options;
      options.timeout = Milliseconds(4000);
      Comm a = me.connect("a", options), b = me.connect("b", options);
      void* side = standin::create_stream(0);
      float x = 1, y = 1, z = 1;
      if (me.rank == 1) standin::kernel(side, [] {}, &late);
      CallOptions aside;
      aside.stream = side;
      aside.blocking = true;
      a->all_reduce(&x, &x, 1, f32, ReduceOp::sum, aside);
      auto work = b->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream());
      auto last = b->all_reduce(&z, &z, 1, f32, ReduceOp::sum, me.on_stream(true));
      issued.here();
      if (me.rank == 1) late.open();
      work->synchronize(axo::kNoTimeout);
      last->synchronize(axo::kNoTimeout);
      standin::synchronize(side);
      CHECK_EQ(x + y + z, 6.0f);
      a->shutdown();
      b->shutdown();
      standin::destroy_stream(side);
    });
  }
}

// Oracles: the process's own pthread_create, and what the stand-in says that the library would have made.
TEST(no_launch_makes_a_thread) {
  const long before = threads_made();
  std::thread([] {}).join();
  CHECK_EQ(threads_made() - before, 1);  // it counts
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    Meet both(2);
    ranks(2, [&](Rank& me) {
      Comm a = me.connect("a"), b = me.connect("b");
      Comm four = capped(a, 4, "four");
      float x = 1, y = 1;
      std::uint32_t flag = 0;
      both.here();  // both ranks' communicators are there
      const long made = threads_made();
      const auto none = [&](const char* what, const std::function<void()>& operation) {
        operation();
        both.here();
        if (threads_made() != made) check::fail(__FILE__, __LINE__, std::string(what) + " has made a thread");
        both.here();
      };
      for (const bool blocking : {false, true}) {
        const CallOptions how = me.on_stream(blocking);
        none("a sum", [&] { a->all_reduce(&x, &x, 1, f32, ReduceOp::max, how)->wait(); });
        none("a transfer", [&] {
          if (me.rank == 0) a->send(&x, 1, f32, 1, 0, how)->wait();
          if (me.rank == 1) a->recv(&y, 1, f32, 0, 0, how)->wait();
        });
        none("a capped sum", [&] { four->all_reduce(&x, &x, 1, f32, ReduceOp::max, how)->wait(); });
        none("a barrier", [&] { a->barrier(how)->wait(); });
      }
      none("a group", [&] {
        axo::group_start();
        auto work = a->all_reduce(&x, &x, 1, f32, ReduceOp::max, me.on_stream());
        b->all_reduce(&y, &y, 1, f32, ReduceOp::max, me.on_stream());
        axo::group_end();
        work->wait();
      });
      none("a chunk after its flag", [&] {
        CallOptions by_flag = me.on_stream();
        by_flag.after_caller = false;
        four->follow(me.stream);
        standin::kernel(me.stream, [&] { flag = 1; });
        if (me.context->gpu().has_stream_values()) four->wait_flag(&flag, 1);
        four->all_reduce(&x, &x, 1, f32, ReduceOp::max, by_flag)->wait();
        if (me.context->gpu().has_stream_values()) four->write_flag(&flag, 2);
      });
      none("a host that waits", [&] {
        a->all_reduce(&x, &x, 1, f32, ReduceOp::max, me.on_stream())->synchronize(kPatience);
        standin::synchronize(me.stream);
      });
      standin::synchronize(four->stream());
      for (const Comm& comm : {four, a, b}) comm->shutdown();
    });
    CHECK_EQ(standin::launch_threads(), 0);
  }
}

TEST(stream_policy_can_be_chosen) {
  ranks(1, [](Rank& me) {
    DeviceOptions shared, own;
    shared.streams = axo::StreamPolicy::shared;
    own.streams = axo::StreamPolicy::own;
    own.high_priority = false;
    Comm a = me.connect("a", shared), b = me.connect("b", shared), c = me.connect("c", own);
    CHECK(a->stream() == b->stream());
    CHECK(c->stream() != a->stream());
    CHECK_EQ(standin::stream_priority(c->stream()), 0);
    for (Comm comm : {a, b, c}) comm->shutdown();
  });
}

// The launch is complete only after several "in progress" answers: the end must not be marked before.
TEST(a_launch_that_takes_its_time) {
  standin::settings().launch_polls = 4;
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    work->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 2.0f);
    axo::group_start();
    auto one = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    axo::group_end();
    one->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 4.0f);
    comm->shutdown();
  });
}

TEST(tensors_live_as_long_as_they_must) {
  ranks(1, [&](Rank& me) {
    Comm comm = me.connect();
    void* other = standin::create_stream(0);
    float x = 1;
    standin::Gate gate;
    const auto pending = [&](std::weak_ptr<int>& watch) {
      auto tensor = std::make_shared<int>(0);
      watch = tensor;
      CallOptions o = me.on_stream();
      o.keep_alive = tensor;
      return comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, o);
    };
    standin::kernel(me.stream, [] {}, &gate);
    std::weak_ptr<int> on_caller, on_other, dropped;
    auto first = pending(on_caller), second = pending(on_other), third = pending(dropped);
    first->wait();  // whoever reuses the memory comes after it on the same stream
    CHECK(on_caller.expired());
    second->wait_on(other);  // says nothing about the caller's stream
    CHECK(!on_other.expired());
    third.reset();  // the operation goes on
    CHECK(!dropped.expired());
    gate.open();
    second->synchronize(Milliseconds(30000));
    CHECK(on_other.expired());
    eventually([&] { return dropped.expired(); });  // the watchdog sees its end
    comm->shutdown();
    standin::destroy_stream(other);
  });
}

TEST(callbacks_and_timing) {
  ranks(2, [](Rank& me) {
    DeviceOptions options;
    options.timing = true;
    Comm comm = me.connect("timed", options);
    float x = 1;
    std::atomic<int> called{0};
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    work->on_completion([&] { ++called; });
    eventually([&] { return called > 0; });  // the watchdog asks, nobody else does
    CHECK_EQ(called.load(), 1);
    work->on_completion([&] { ++called; });
    CHECK_EQ(called.load(), 2);
    CHECK_EQ(work->seconds(), 0.25);
    CHECK(work->exception() == nullptr);
    auto untimed = me.connect("untimed");
    auto other = untimed->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    other->synchronize(axo::kNoTimeout);
    CHECK_EQ(other->seconds(), -1.0);
    untimed->shutdown();
    comm->shutdown();
  });
}

TEST(a_callback_that_throws_harms_nobody) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    std::atomic<bool> called{false};
    work->on_completion([] { throw std::runtime_error("a bad callback"); });
    work->on_completion([&] { called = true; });
    gate.open();
    eventually([&] { return called.load(); });
    work->synchronize(axo::kNoTimeout);
    comm->shutdown();
  });
}

TEST(flags_order_chunks_of_a_running_kernel) {
  if (is_old() || is_hip()) {  // the one has no driver library, the other's compares without wrap-around
    ranks(1, [](Rank& me) {
      std::uint32_t word = 0;
      CHECK_THROWS(axo::Error, "wait_flag: stream waits for values: got none", me.connect()->wait_flag(&word, 1));
      CHECK_THROWS(axo::Error, "write_flag", me.connect("w")->write_flag(&word, 1));
    });
    return;
  }
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    std::uint32_t flags[2] = {0xFFFFFFF0u, 0xFFFFFFF0u}, done = 0;
    float chunks[2] = {};
    standin::Gate gates[2];
    comm->follow(me.stream);
    CallOptions by_flag = me.on_stream();
    by_flag.after_caller = false;
    // One kernel that finishes chunk 0, raises its flag, and goes on.
    standin::kernel(me.stream, [&] { chunks[0] = 1, flags[0] = 3; }, &gates[0]);
    standin::kernel(me.stream, [&] { chunks[1] = 2, flags[1] = 3; }, &gates[1]);
    std::vector<std::shared_ptr<axo::Work>> works;
    for (int i = 0; i < 2; ++i) {
      comm->wait_flag(&flags[i], 3);  // 0xFFFFFFF0 is before 3: the compare is cyclic
      works.push_back(comm->all_reduce(&chunks[i], &chunks[i], 1, f32, ReduceOp::sum, by_flag));
    }
    comm->write_flag(&done, 7);
    CHECK(!works[0]->is_completed());
    gates[0].open();
    works[0]->synchronize(Milliseconds(30000));
    CHECK_EQ(chunks[0], 2.0f);
    CHECK(!works[1]->is_completed());
    CHECK_EQ(done, 0u);
    gates[1].open();
    works[1]->synchronize(Milliseconds(30000));
    CHECK_EQ(chunks[1], 4.0f);
    standin::synchronize(comm->stream());
    CHECK_EQ(done, 7u);
    comm->shutdown();
  });
}

// The flag is up already, as one that another kernel has raised: the chunk still comes after what the stream held
// before follow().
TEST(chunks_come_after_what_the_stream_held_before) {
  Meet issued(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    standin::Gate gate;
    std::uint32_t flag = 3;
    float x = 1;
    standin::kernel(me.stream, [&] { x = 5; }, &gate);
    comm->follow(me.stream);
    if (me.context->gpu().has_stream_values()) comm->wait_flag(&flag, 3);
    CallOptions by_flag = me.on_stream();
    by_flag.after_caller = false;
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, by_flag);
    issued.here();
    CHECK(!work->is_completed());
    CHECK_EQ(x, 1.0f);
    issued.here();
    gate.open();
    work->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 10.0f);
    comm->shutdown();
  });
}

TEST(events_are_reused) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    int first = 0;
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < 20; ++i) comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->wait();
      // The communicator keeps the end of its last operation.
      eventually([&] { return static_cast<int>(me.context->events().idle()) == standin::live_events() - 1; });
      if (round == 0) first = standin::live_events();
      CHECK(standin::live_events() <= std::max(first, 21));  // at most what was pending at once
    }
    comm->shutdown();
  });
  eventually([] { return standin::live_events() == 0; });
  eventually([] { return standin::live_streams() == 0; });
  eventually([] { return standin::live_allocations() == 0; });
}

}  // namespace
}  // namespace device

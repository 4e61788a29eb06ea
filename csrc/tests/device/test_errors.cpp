// What goes wrong, and who hears of it: launch errors, asynchronous errors, timeouts, aborts, calls after the end.
// Oracle: the type and text of the exception, and that every waiter is freed.
#include <sstream>

#include "base/flight_recorder.h"
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

const char* prefixed(const char* name) {
  static thread_local std::string text;
  text = std::string(is_hip() ? "hip" : "cuda") + name;
  return text.c_str();
}

DeviceOptions with_timeout(int ms) {
  DeviceOptions options;
  options.timeout = Milliseconds(ms);
  return options;
}

TEST(a_runtime_call_that_fails) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::fail(prefixed("EventRecord"), 400);
    CHECK_THROWS(axo::Error, "EventRecord: invalid resource handle (400)",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    CHECK_THROWS(axo::Aborted, "is aborted: ", comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    comm->shutdown();
    CHECK_THROWS(axo::Aborted, "is aborted: ", comm->barrier(me.on_stream()));
  });
}

TEST(a_library_call_that_fails) {
  ranks(1, [](Rank& me) {
    if (!is_old()) standin::settings().last_error = "the socket said no";
    Comm comm = me.connect("c"), other = me.connect("d"), third = me.connect("e"), fourth = me.connect("f");
    float x = 1;
    standin::fail("ncclAllReduce", axo::kNcclInvalidUsage);
    CHECK_THROWS(axo::Error, is_old() ? "'c': all_reduce: invalid usage (5)" : "invalid usage (5): the socket said no",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    // In a group: the library must be out of its group afterwards.
    standin::fail("ncclBroadcast", axo::kNcclRemoteError);
    axo::group_start();
    auto work = other->broadcast(&x, 1, f32, 0, me.on_stream());
    auto also = other->broadcast(&x, 1, f32, 0, me.on_stream());
    standin::clear_calls();
    axo::group_end();
    CHECK(text(sequence()).find("ncclGroupEnd") != std::string::npos);
    CHECK_THROWS(axo::PeerLost, "remote process exited", work->wait());
    CHECK_THROWS(axo::PeerLost, "remote process exited", also->synchronize(Milliseconds(1)));
    CHECK(work->is_completed());
    CHECK(also->exception() != nullptr);
    CHECK_EQ(also->seconds(), -1.0);
    standin::fail("ncclReduce", axo::kNcclTimeout);
    CHECK_THROWS(axo::Timeout, "'e': reduce", third->reduce(&x, &x, 1, f32, ReduceOp::sum, 0, me.on_stream()));
    standin::fail("ncclRedOpCreatePreMulSum", 99);  // an answer that the library has no text for
    CHECK_THROWS(axo::Error, "unknown error (99)", fourth->all_reduce_scaled(&x, &x, 1, f32, 2, me.on_stream()));
    for (Comm c : {comm, other, third, fourth}) c->shutdown();
  });
}

TEST(a_device_that_breaks_while_working) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    standin::fail(prefixed("EventQuery"), 700, 1000);
    CHECK_THROWS(axo::Error, "illegal memory access", work->synchronize(axo::kNoTimeout));
    gate.open();
    comm->shutdown();
  });
}

TEST(an_asynchronous_error_frees_the_waiter) {
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    both.here();
    float x = 1;
    std::shared_ptr<axo::Work> work;
    std::atomic<int> called{0};
    if (me.rank == 0) {  // rank 1 never comes
      work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      work->on_completion([&] { ++called; });
      __atomic_store_n(&standin::settings().async_error, int{axo::kNcclRemoteError}, __ATOMIC_SEQ_CST);
      CHECK_THROWS(axo::PeerLost,
                   "asynchronous error in all_reduce(float32[1], sum) #1 on 'world' (rank 0 of 2), after",
                   work->synchronize(axo::kNoTimeout));
      eventually([&] { return called.load() == 1; });  // perhaps in another thread, which has just begun with it
      CHECK_THROWS(axo::PeerLost, "remote", work->wait());
    }
    both.here();
    // Rank 1 hears it from its own library, without an operation.
    eventually([&] {
      try {
        comm->all_reduce(&x, &x, 0, f32, ReduceOp::sum, me.on_stream());
      } catch (const axo::Error&) {
        return true;
      }
      return false;
    });
    comm->shutdown();
  });
}

TEST(a_timeout_names_who_has_not_arrived) {
  Meet all(3);
  ranks(3, [&](Rank& me) {
    Comm comm = me.connect("trio", with_timeout(100));
    float x = 1;
    // The report that a rank writes at its own timeout, here beforehand: whose comes first depends on the machine.
    if (me.rank < 2) me.store->set("trio/issued/" + std::to_string(me.rank), "1");
    all.here();
    if (me.rank < 2) {
      CallOptions o = me.on_stream();
      auto tensor = std::make_shared<int>(0);
      std::weak_ptr<int> watch = tensor;
      o.keep_alive = std::move(tensor);
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, o);
      try {
        work->synchronize(axo::kNoTimeout);
        CHECK(false);
      } catch (const axo::Timeout& e) {
        const std::string said = e.what();
        CHECK(said.find("all_reduce(float32[1], sum) #1 on 'trio' (rank " + std::to_string(me.rank) + " of 3)") !=
              std::string::npos);
        CHECK(said.find("also in it: rank " + std::to_string(1 - me.rank)) != std::string::npos);
        CHECK(said.find("no report (late, or gone): rank 2") != std::string::npos);
      }
      CHECK(comm->size() == 3);
      work.reset();
      o.keep_alive.reset();
      eventually([&] { return watch.expired(); });  // once the library has let go of it
    }
    all.here();
    comm->shutdown();
  });
}

TEST(a_late_rank_is_named) {
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect("pair");
    float x[2] = {};
    CallOptions o = me.on_stream();
    auto first = comm->all_reduce(x, x, 1 + me.rank, f32, ReduceOp::sum, o);  // of unequal size: never complete
    o.timeout = Milliseconds(1);
    if (me.rank == 0) {
      eventually([&] { return me.store->has("pair/issued/1"); });
      me.store->set("pair/issued/1", "1");
      auto second = comm->all_reduce(x, x, 1, f32, ReduceOp::sum, o);
      CHECK_THROWS(axo::Timeout, "has not arrived: rank 1", second->synchronize(axo::kNoTimeout));
    } else {
      auto second = comm->all_reduce(x, x, 1, f32, ReduceOp::sum, o);
      CHECK_THROWS(axo::Timeout, "#2 on 'pair' (rank 1 of 2) did not complete in",
                   second->synchronize(axo::kNoTimeout));
    }
    comm->shutdown();
  });
}

TEST(the_timeout_of_one_call) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("patient");
    float x = 1;
    if (me.rank == 1) return;
    CallOptions o = me.on_stream();
    auto patient = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, o);
    o.timeout = Milliseconds(100);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, o);
    CHECK_THROWS(axo::Timeout, "#2 on 'patient'", work->synchronize(axo::kNoTimeout));
    CHECK_THROWS(axo::Timeout, "#2 on 'patient'", patient->wait());  // it could not have come after
    comm->shutdown();
  });
}

TEST(abort_frees_every_waiter_on_every_rank) {
  Meet all(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    if (me.rank == 0) {
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      // Rank 1 aborts: this rank hears it through the store, long before its timeout.
      CHECK_THROWS(axo::Aborted, "aborted by another rank: rank 1: communicator 'world' was aborted: enough",
                   work->synchronize(axo::kNoTimeout));
    } else {
      comm->abort("enough");
      comm->abort("again");
      CHECK_THROWS(axo::Aborted, "enough", comm->barrier(me.on_stream()));
      CHECK_THROWS(axo::Aborted, "enough", comm->split(0, 0, "child"));
      CHECK_THROWS(axo::Aborted, "enough", comm->follow(me.stream));
      CHECK_THROWS(axo::Aborted, "enough", comm->register_buffer(&x, 4, false));
    }
    all.here();
    comm->shutdown();
    comm->shutdown();
    CHECK_THROWS(axo::Aborted, "is aborted", comm->barrier(me.on_stream()));
  });
}

TEST(a_rank_that_gives_up_is_lost_to_its_peers_with_its_error) {
  Meet all(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    if (me.rank == 0) {
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      CHECK_THROWS(axo::PeerLost, "rank 1 raised ValueError: bad batch", work->synchronize(axo::kNoTimeout));
    } else {
      comm->give_up("raised ValueError: bad batch");
      CHECK_THROWS(axo::Aborted, "raised ValueError: bad batch", comm->barrier(me.on_stream()));
    }
    all.here();
    comm->shutdown();
  });
}

TEST(abort_frees_a_launch_that_hangs) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    standin::settings().launch_polls = 1 << 30;
    float x = 1;
    std::thread impatient([&] {
      std::this_thread::sleep_for(Milliseconds(50));
      comm->abort("no longer");
    });
    CHECK_THROWS(axo::Aborted, "no longer", comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    impatient.join();
    comm->shutdown();
  });
}

// The library tells of an error while a call of its own hangs: nobody else can free it.
TEST(an_asynchronous_error_frees_a_launch_that_hangs) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    standin::settings().launch_polls = 1 << 30;
    float x = 1;
    std::thread network([&] {
      std::this_thread::sleep_for(Milliseconds(50));
      __atomic_store_n(&standin::settings().async_error, int{axo::kNcclRemoteError}, __ATOMIC_SEQ_CST);
    });
    CHECK_THROWS(axo::PeerLost, "asynchronous error in all_reduce",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    network.join();
    comm->shutdown();
  });
}

TEST(a_launch_that_never_connects_times_out) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect("slow", with_timeout(100));
    standin::settings().launch_polls = 1 << 30;
    float x = 1;
    CHECK_THROWS(axo::Timeout, "all_reduce could not be launched in time",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    comm->shutdown();
  });
}

TEST(the_flight_recorder_sees_device_operations) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect("black box");
    float x = 1;
    comm->reduce(&x, &x, 1, f32, ReduceOp::max, 0, me.on_stream())->synchronize(Milliseconds(30000));
    standin::fail("ncclAllReduce", axo::kNcclRemoteError);
    CHECK_THROWS(axo::PeerLost, "", comm->all_reduce_scaled(&x, &x, 1, f32, 2, me.on_stream()));
    eventually([] { return axo::flight_lines().find("remote process exited") != std::string::npos; });
    std::istringstream lines(axo::flight_lines());
    int done = 0, failed = 0;
    for (std::string line; std::getline(lines, line);) {
      if (line.find("black box") == std::string::npos) continue;
      done += line.find("\"reduce\"") != std::string::npos && line.find("\"done\"") != std::string::npos;
      failed += line.find("all_reduce") != std::string::npos && line.find("\"failed\"") != std::string::npos;
    }
    CHECK_EQ(done, 1);
    CHECK_EQ(failed, 1);
    comm->shutdown();
  });
}

TEST(shutdown_waits_and_is_final) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    standin::clear_calls();
    comm->shutdown();
    CHECK(work->is_completed());
    CHECK_EQ(x, 2.0f);
    const std::string calls = text(sequence());
    CHECK(calls.find("ncclCommFinalize; ncclCommDestroy") != std::string::npos);
    CHECK(calls.find("ncclCommAbort") == std::string::npos);
    CHECK_THROWS(axo::Aborted, "has been shut down", comm->barrier(me.on_stream()));
    comm->abort("too late to matter");
    work->wait();
  });
}

TEST(no_time_limit_and_those_that_no_clock_holds) {
  standin::settings().init_polls = standin::settings().finalize_polls = 3;
  for (const Milliseconds timeout : {axo::kNoTimeout, Milliseconds::max()}) {
    ranks(2, [&](Rank& me) {
      DeviceOptions options;
      options.timeout = timeout;
      Comm comm = me.rank == 0 ? me.connect("patient") : me.connect("patient", options);  // rank 0: the usual one
      float x = 1;
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      work->synchronize(Milliseconds::max());
      CHECK_EQ(x, 2.0f);
      standin::clear_calls();
      comm->shutdown();
      CHECK(text(sequence()).find("ncclCommAbort") == std::string::npos);
    });
  }
}

TEST(shutdown_of_a_stuck_communicator) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect("stuck", with_timeout(200));
    float x = 1;
    if (me.rank == 1) return;  // dropped without shutdown: aborted on that rank alone
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    comm->shutdown();
    CHECK_THROWS(axo::Timeout, "", work->wait());
  });
}

TEST(shutdown_that_the_library_refuses) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    standin::fail("ncclCommFinalize", axo::kNcclInternalError);
    comm->shutdown();
    eventually([] { return standin::aborts() > 0; });  // on a thread of its own
    CHECK_EQ(standin::aborts(), 1);
  });
}

TEST(a_dropped_communicator_frees_everything) {
  ranks(1, [](Rank& me) {
    float x = 1;
    {
      me.connect()->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    }
    eventually([&] { return me.context.use_count() == 1; });
    CHECK_EQ(me.context->reserved_ctas(), 0);
  });
  eventually([] { return standin::live_streams() == 0; });
  eventually([] { return standin::live_allocations() == 0; });
  eventually([] { return standin::live_events() == 0; });
}

TEST(a_store_that_is_gone) {
  Meet all(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect("orphan", with_timeout(1200));
    float x = 1;
    if (me.rank == 0) me.store->break_down();
    all.here();
    if (me.rank == 0) {
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      CHECK_THROWS(axo::Timeout, "the other ranks could not be asked: the store is gone",
                   work->synchronize(axo::kNoTimeout));
    }
    all.here();
    comm->shutdown();
  });
}

}  // namespace
}  // namespace device

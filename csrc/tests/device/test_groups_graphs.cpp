// Groups: several operations, one launch. Graphs: all communicators captured into one and replayed.
// Oracle: the calls made between ncclGroupStart and ncclGroupEnd, and the values after every replay.
#include <algorithm>

#include "device_ranks.h"
#include "host/communicator.h"

namespace device {
namespace {

const auto f32 = DType::float32;

TEST(a_group_is_one_launch) {
  ranks(2, [](Rank& me) {
    Comm a = me.connect("a"), b = me.connect("b");
    float x = 1, y = 2;
    standin::clear_calls();
    axo::group_start();
    auto first = a->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    axo::group_start();
    auto second = b->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream());
    axo::group_end();
    CHECK_EQ(text(sequence()), "");  // nothing before the outermost end
    CHECK_THROWS(axo::Error, "recorded in a group that has not ended", first->wait());
    CHECK(!first->is_completed());
    axo::group_end();
    const std::string middle =
        "ncclGroupStart; ncclAllReduce count=1 type=7 op=0; ncclAllReduce count=1 type=7 op=0; ncclGroupEnd";
    const std::string edge = "EventRecord; StreamWaitEvent; ";
    CHECK_EQ(text(sequence()),
             shares_a_stream() ? edge + middle + "; EventRecord" : edge + edge + middle + "; EventRecord; EventRecord");
    first->wait();
    second->wait();
    standin::synchronize(me.stream);
    CHECK_EQ(x, 2.0f);
    CHECK_EQ(y, 4.0f);
    a->shutdown();
    b->shutdown();
  });
}

// Opposite transfers between two ranks, which would wait for each other one by one.
TEST(a_group_of_transfers) {
  ranks(3, [](Rank& me) {
    Comm comm = me.connect();
    const int next = (me.rank + 1) % 3, last = (me.rank + 2) % 3;
    float mine = static_cast<float>(me.rank), theirs = -1;
    axo::group_start();
    comm->send(&mine, 1, f32, next, 0, me.on_stream());
    auto work = comm->recv(&theirs, 1, f32, last, 0, me.on_stream());
    axo::group_end();
    work->synchronize(Milliseconds(30000));
    CHECK_EQ(theirs, static_cast<float>(last));
    comm->shutdown();
  });
}

// On a shared stream the order of a group's communicators is the order of execution: it must not depend on the calls.
TEST(a_group_in_another_order_on_every_rank) {
  ranks(3, [](Rank& me) {
    std::vector<Comm> comms;
    for (const char* name : {"x", "y", "z"}) comms.push_back(me.connect(name));
    std::vector<float> v(3, 1);
    std::vector<std::shared_ptr<axo::Work>> works;
    axo::group_start();
    for (int i = 0; i < 3; ++i) {
      const int axis = (i + me.rank) % 3;
      works.push_back(comms[axis]->all_reduce(&v[axis], &v[axis], 1, f32, ReduceOp::sum, me.on_stream()));
    }
    axo::group_end();
    for (auto& work : works) work->synchronize(Milliseconds(30000));
    CHECK(v == std::vector<float>(3, 3));
    for (Comm comm : comms) comm->shutdown();
  });
}

TEST(blocking_and_split_inside_a_group) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    axo::group_start();
    CHECK_THROWS(axo::Error, "a blocking call inside a group",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true)));
    CHECK_THROWS(axo::Error, "split: got a call inside a group", comm->split(0, 0, "child"));
    axo::group_end();
    comm->shutdown();
  });
}

TEST(an_aborted_member_does_not_stop_the_group) {
  ranks(2, [](Rank& me) {
    Comm a = me.connect("a"), b = me.connect("b");
    float x = 1, y = 1;
    axo::group_start();
    auto bad = a->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    auto good = b->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream());
    a->abort("tired");
    axo::group_end();
    CHECK_THROWS(axo::Aborted, "tired", bad->wait());
    good->synchronize(Milliseconds(30000));
    CHECK_EQ(y, 2.0f);
    a->shutdown();
    b->shutdown();
  });
}

TEST(a_group_spans_host_and_device) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    axo::HostOptions options;
    options.timeout = Milliseconds(30000);
    const auto own = std::make_shared<axo::host::Leader>();
    me.store->set("host/" + std::to_string(me.rank), own->address().text());
    const std::string leader = me.store->get("host/0", Milliseconds(30000));
    auto host = axo::create_host_communicator(own, leader, me.rank, 2, options);
    float x = 1, y = 3;
    axo::group_start();
    auto on_host = host->all_reduce(&y, &y, 1, f32, ReduceOp::sum, {});
    auto on_device = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    axo::group_end();
    on_host->wait();
    on_device->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 2.0f);
    CHECK_EQ(y, 6.0f);
    host->shutdown();
    comm->shutdown();
  });
}

TEST(one_graph_holds_all_communicators) {
  ranks(2, [](Rank& me) {
    std::vector<Comm> axes;
    for (const char* name : {"x", "y", "z"}) axes.push_back(me.connect(name));
    float v[3] = {1, 1, 1}, seen = 0;
    for (int i = 0; i < 3; ++i) axes[i]->all_reduce(&v[i], &v[i], 1, f32, ReduceOp::avg, me.on_stream(true));
    standin::synchronize(me.stream);

    standin::begin_capture(me.stream);
    std::vector<std::shared_ptr<axo::Work>> works;
    for (int i = 0; i < 3; ++i)
      works.push_back(axes[i]->all_reduce(&v[i], &v[i], 1, f32, ReduceOp::sum, me.on_stream()));
    works.push_back(axes[0]->all_reduce(&v[0], &v[0], 1, f32, ReduceOp::sum, me.on_stream(true)));
    works.push_back(axes[2]->barrier(me.on_stream(true)));  // does not hold the host here
    for (auto& work : works) work->wait();
    standin::kernel(me.stream, [&] { seen = v[0] + v[1] + v[2]; });
    std::shared_ptr<standin::Graph> graph;
    CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    CHECK_EQ(standin::nodes_in(*graph), 6u);
    CHECK_EQ(v[0], 1.0f);  // captured, not run
    CHECK(works[0]->is_completed());
    CHECK_EQ(works[0]->seconds(), -1.0);
    CHECK_THROWS(axo::Error, "part of a graph", works[0]->synchronize(Milliseconds(1)));

    for (int i = 0; i < 100; ++i) {
      v[0] = v[1] = v[2] = 1;
      standin::replay(graph, me.stream);
      standin::synchronize(me.stream);
      CHECK_EQ(seen, 8.0f);  // 4 + 2 + 2
    }
    // And as before, outside.
    axes[1]->all_reduce(&v[1], &v[1], 1, f32, ReduceOp::sum, me.on_stream())->synchronize(Milliseconds(30000));
    CHECK_EQ(v[1], 4.0f);
    graph.reset();
    for (Comm comm : axes) comm->shutdown();
  });
}

// hipStreamEndCapture walks from each stream to those that waited for it, and back if they may: with a stream beside
// the capturing one, that issues, and that waits for what the other has issued. Else Axo's stream leads nowhere.
TEST(streams_of_a_capture_that_form_a_circle_on_amd) {
  for (const bool circle : {false, true}) {
    const auto capture = [&](Rank& me) {
      Comm comm = me.connect();
      float x = 1;
      void *beside = standin::create_stream(0), *event = standin::create_event(false);
      CallOptions on_beside;
      on_beside.stream = beside;
      standin::begin_capture(me.stream);
      comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->wait();
      standin::record(*standin::event_of(event), *standin::stream_of(me.stream));
      standin::wait(*standin::stream_of(beside), *standin::event_of(event));
      auto first = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, on_beside);
      auto second = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      if (circle) second->wait_on(beside);
      first->wait_on(me.stream);
      second->wait();
      standin::kernel(beside, [] {});
      std::shared_ptr<standin::Graph> graph;
      standin::end_capture(me.stream, graph);
      graph.reset();
      comm->shutdown();
      standin::destroy_event(event);
      standin::destroy_stream(beside);
    };
    if (circle && is_hip()) {
      CHECK_THROWS(check::Failed, "form a circle", ranks(1, capture));
    } else {
      ranks(1, capture);
    }
  }
}

TEST(a_work_that_was_not_waited_for_spoils_the_capture) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    standin::begin_capture(me.stream);
    auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
    std::shared_ptr<standin::Graph> graph;
    CHECK_EQ(standin::end_capture(me.stream, graph), 904);  // the runtime says so
    graph.reset();
    comm->shutdown();
  });
}

TEST(flags_and_groups_in_a_graph) {
  if (is_old() || is_hip()) return ranks(1, [](Rank& me) { CHECK(!me.context->gpu().has_stream_values()); });
  ranks(2, [](Rank& me) {
    Comm a = me.connect("a"), b = me.connect("b");
    float x = 1, y = 1;
    std::uint32_t flag = 0;
    standin::begin_capture(me.stream);
    CallOptions by_flag = me.on_stream();
    by_flag.after_caller = false;
    b->follow(me.stream);
    b->wait_flag(&flag, 1);
    axo::group_start();
    // after_caller is off, and the stream joins the capture all the same.
    auto first = a->all_reduce(&x, &x, 1, f32, ReduceOp::sum, by_flag);
    auto second = b->all_reduce(&y, &y, 1, f32, ReduceOp::sum, by_flag);
    axo::group_end();
    first->wait();
    second->wait();
    std::shared_ptr<standin::Graph> graph;
    CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    standin::replay(graph, me.stream);
    CHECK(!standin::is_idle(me.stream));
    CHECK_EQ(y, 1.0f);
    {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      flag = 1;
    }
    standin::synchronize(me.stream);
    CHECK_EQ(x + y, 4.0f);
    graph.reset();
    a->shutdown();
    b->shutdown();
  });
}

// NCCL's end waits for the graphs that captured the communicator (init.cc, commDestroySync).
TEST(a_communicator_is_not_closed_while_graphs_hold_it) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect(), other = me.connect("other"), dropped = me.connect("dropped");
    comm->set_timeout(Milliseconds(3000));
    float x = 1;
    std::shared_ptr<standin::Graph> graphs[2];
    for (auto& graph : graphs) {
      standin::begin_capture(me.stream);
      for (const bool blocking : {true, false}) {
        comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(blocking))->wait();
      }
      dropped->barrier(me.on_stream(true));
      CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    }
    CHECK_THROWS(axo::Error, "'world' is held by graphs that captured it; drop them first", comm->shutdown());
    dropped.reset();  // without an abort, which would wait for the graphs too
    CHECK_EQ(standin::aborts(), 0);
    graphs[0].reset();
    CHECK_THROWS(axo::Error, "is held by graphs that", comm->shutdown());
    other->shutdown();                      // of no graph
    standin::replay(graphs[1], me.stream);  // and it is as good as before
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(axo::kNoTimeout);
    CHECK_EQ(x, 8.0f);
    graphs[1].reset();
    comm->shutdown();
    CHECK(text(sequence()).find("ncclCommAbort") == std::string::npos);
  });
}

TEST(a_communicator_that_is_being_captured_elsewhere) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    void* other = standin::create_stream(0);
    standin::begin_capture(other);
    CallOptions o;
    o.stream = other;
    auto captured = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, o);
    // The communicator's stream has joined that graph: an operation from outside would end up in it.
    CHECK_THROWS(axo::Error, "part of a graph that is being captured",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream()));
    std::shared_ptr<standin::Graph> graph;
    standin::end_capture(other, graph);
    graph.reset();
    comm->shutdown();
    standin::destroy_stream(other);
  });
}

}  // namespace
}  // namespace device

// Ends while something holds the device: a graph, a kernel of another communicator, a capture of somebody else's.
// Oracle: who has come back, what memory and which contexts still live, and which threads and objects were made.
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

std::string prefixed(const char* name) { return std::string(is_hip() ? "hip" : "cuda") + name; }

// The watchdog tells of a failure before it aborts. It takes long here: whoever shuts down comes to the abort first.
class SlowNews final : public axo::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    if (key.find("/abort") != std::string::npos) std::this_thread::sleep_for(Milliseconds(400));
    store_.set(key, value);
  }
  std::string get(const std::string& key, Milliseconds timeout) override { return store_.get(key, timeout); }
  bool has(const std::string& key) override { return store_.has(key); }

 private:
  MapStore store_;
};

Comm connect_with_slow_news(Rank& me) {
  DeviceOptions options;
  options.device = me.rank;
  options.context = me.context;
  return axo::create_device_communicator(std::make_shared<SlowNews>(), "alone", 0, 1, options);
}

// Whether `end` comes back by itself. What holds it is let go afterwards: a test that fails ends too.
bool comes_back(const std::function<void()>& end, const std::function<void()>& let_go) {
  std::atomic<bool> over{false};
  std::thread ends([&] {
    end();
    over = true;
  });
  const auto until = std::chrono::steady_clock::now() + Milliseconds(10000);
  while (!over && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(Milliseconds(2));
  const bool came = over;
  let_go();
  ends.join();
  return came;
}

}  // namespace

// The abort waits for the graph, which the thread that shuts down owns; and what the operation may still write stays.
TEST(shutdown_after_an_abort_while_a_graph_lives) {
  ranks(1, [](Rank& me) {
    Comm comm = connect_with_slow_news(me);
    float x = 1;
    std::shared_ptr<standin::Graph> graph;
    standin::begin_capture(me.stream);
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true))->wait();
    CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    CallOptions keeps = me.on_stream();
    auto tensor = std::make_shared<float>(1.0f);
    std::weak_ptr<float> watch = tensor;
    float* data = tensor.get();
    keeps.keep_alive = std::move(tensor);
    comm->all_reduce(data, data, 1, f32, ReduceOp::sum, keeps);
    keeps.keep_alive.reset();
    comm->abort("enough");
    bool kept = false;
    const bool came = comes_back([&] { comm->shutdown(); },
                                 [&] {
                                   kept = !watch.expired();  // the abort is not over
                                   graph.reset();
                                   gate.open();
                                 });
    CHECK(came);
    CHECK(kept);
    eventually([&] { return watch.expired(); });
    CHECK_EQ(standin::aborts(), 1);
  });
}

TEST(shutdown_after_an_abort_while_the_device_is_busy) {
  ranks(1, [](Rank& me) {
    Comm comm = connect_with_slow_news(me);
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);  // stands for a kernel of another communicator, which is stuck
    comm->abort("enough");
    CHECK(comes_back([&] { comm->shutdown(); }, [&] { gate.open(); }));
    CHECK_EQ(standin::aborts(), 1);
  });
}

TEST(a_communicator_is_dropped_while_the_device_is_busy) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    CHECK(comes_back([&] { comm.reset(); }, [&] { gate.open(); }));
    eventually([] { return standin::aborts() > 0; });
    CHECK_EQ(standin::aborts(), 1);
  });
}

TEST(memory_that_is_dropped_during_a_capture_does_not_hold_the_context) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  for (const bool shut_down : {false, true}) {
    eventually([] { return standin::live_allocations() == 0; });  // of the test before
    ranks(1, [&](Rank& me) {
      Comm comm = me.connect("comm"), captured = me.connect("captured");
      auto memory = comm->allocate(64);
      auto window = comm->register_buffer(memory.get(), 64, true);
      float x = 1;
      standin::begin_capture(me.stream);
      captured->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true))->wait();
      window.reset();
      memory.reset();
      CHECK_EQ(standin::live_allocations(), 2);  // with the context's word
      if (shut_down) comm->shutdown();
      comm.reset();
      std::shared_ptr<standin::Graph> graph;
      CHECK_EQ(standin::end_capture(me.stream, graph), 0);
      graph.reset();
      captured.reset();
      const std::weak_ptr<axo::DeviceContext> context = me.context;
      me.context.reset();
      eventually([&] { return context.expired(); });
    });
    eventually([] { return standin::live_allocations() == 0; });
  }
}

// A capture without an operation of Axo's: only the runtime knows of it, and refuses to wait.
TEST(memory_that_is_dropped_during_a_capture_of_somebody_elses) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  for (const int code : {900, 901, 907}) {
    ranks(1, [&](Rank& me) {
      Comm comm = me.connect();
      const int before = standin::live_allocations();
      auto memory = comm->allocate(64);
      standin::fail(prefixed("DeviceSynchronize"), code);
      memory.reset();
      CHECK_EQ(standin::live_allocations(), before + 1);
      comm->allocate(64).reset();
      CHECK_EQ(standin::live_allocations(), before);
      memory = comm->allocate(64);
      standin::fail(prefixed("DeviceSynchronize"), 700);  // a device that is broken runs nothing any more
      memory.reset();
      CHECK_EQ(standin::live_allocations(), before);
      comm->shutdown();
    });
  }
}

// Within a turn another thread waits for the device. Where none can be made the memory goes with the next.
TEST(memory_that_is_dropped_within_a_turn_where_no_thread_can_be_made) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    const int before = standin::live_allocations();
    auto memory = comm->allocate(64);
    {
      const auto turn = me.context->queue().turn();
      refuse_threads(true);
      memory.reset();
      refuse_threads(false);
      CHECK_EQ(standin::live_allocations(), before + 1);
    }
    comm->allocate(64).reset();
    CHECK_EQ(standin::live_allocations(), before);
    comm->shutdown();
  });
}

TEST(a_graph_that_takes_no_object) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    const int before = standin::live_user_objects();
    float x = 1;
    standin::begin_capture(me.stream);
    standin::fail(prefixed("GraphRetainUserObject"), 1);
    CHECK_THROWS(axo::Error, "GraphRetainUserObject: invalid argument (1)",
                 comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true)));
    CHECK_EQ(standin::live_user_objects(), before);
    std::shared_ptr<standin::Graph> graph;
    CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    graph.reset();
    comm->shutdown();
  });
}

// Each capture is noted more than once, and the end of its graph takes all of that back.
TEST(two_captures_that_alternate) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    void* other = standin::create_stream(0);
    CallOptions on_other = me.on_stream(true);
    on_other.stream = other;
    standin::begin_capture(me.stream);
    standin::begin_capture(other);
    for (int i = 0; i < 2; ++i) {
      for (const CallOptions& where : {me.on_stream(true), on_other}) {
        comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, where)->wait();
      }
    }
    std::shared_ptr<standin::Graph> first, second;
    CHECK_EQ(standin::end_capture(me.stream, first), 0);
    CHECK_EQ(standin::end_capture(other, second), 0);
    CHECK_THROWS(axo::Error, "'world' is held by graphs that captured it; drop them first", comm->shutdown());
    first.reset();
    CHECK_THROWS(axo::Error, "'world' is held by graphs that captured it; drop them first", comm->shutdown());
    second.reset();
    comm->shutdown();
    CHECK_EQ(standin::aborts(), 0);
    standin::destroy_stream(other);
  });
}

}  // namespace device

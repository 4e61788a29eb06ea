// Collectives composed of those inside hosts and those between them, on ranks that are told to be on hosts: values, the
// bytes that leave hosts, order, graphs and ends. Oracle: the definitions in base/communicator.h on small integers.
#include "device_ranks.h"

namespace device {
namespace {

using axo::Kind;

Values total(int size, std::size_t first, std::size_t n) {
  Values v(n);
  for (int r = 0; r < size; ++r) {
    for (std::size_t i = 0; i < n; ++i) v[i] += value(r, first + i);
  }
  return v;
}

// Composed from `least` bytes on, among `hosts` of `local` ranks.
Comm composed(Rank& me, int hosts, int local, std::size_t least = 0, const std::string& key = "world") {
  DeviceOptions options;
  for (Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast, Kind::all_to_all}) {
    options.composed.push_back({hosts, local, kind, least});
  }
  me.store->pretend(key + "/host/" + std::to_string(me.rank), std::to_string(me.rank / local));
  return me.connect(key, options);
}

// Issues by `call(options)`, waits as a user would, and says how many bytes have left hosts meanwhile.
class Counted {
 public:
  Counted(Rank& me, Meet& meet, bool blocking) : me_(me), meet_(meet), blocking_(blocking) {}
  template <class Call>
  std::size_t operator()(const Call& call) {
    meet_.here();
    if (me_.rank == 0) standin::clear_sent_between();
    meet_.here();
    call(me_.on_stream(blocking_))->wait();
    standin::synchronize(me_.stream);
    meet_.here();
    return standin::sent_between();
  }

 private:
  Rank& me_;
  Meet& meet_;
  bool blocking_;
};

void everything(int hosts, int local, std::size_t n, bool blocking) {
  const int size = hosts * local;
  Meet meet(size);
  standin::settings().ranks_of_a_host = local;
  ranks(size, [&](Rank& me) {
    const Comm comm = composed(me, hosts, local);
    CHECK_EQ(comm->composed().size(), 5u);
    Counted sent(me, meet, blocking);
    const auto f32 = DType::float32;
    const std::size_t all = n * size, bytes = 4 * n, others = hosts - 1, from = me.rank * n;

    Values data = values(me.rank, n), out(n);
    const auto least = 2 * others * bytes;  // of all hosts
    CHECK_EQ(sent([&](auto o) { return comm->all_reduce(data.data(), out.data(), n, f32, ReduceOp::sum, o); }), least);
    CHECK(out == total(size, 0, n) && data == values(me.rank, n));
    CHECK_EQ(sent([&](auto o) { return comm->all_reduce(data.data(), data.data(), n, f32, ReduceOp::max, o); }), least);
    CHECK(data == values(size - 1, n));
    Values halves(n, 8.0f * (me.rank + 1));
    sent([&](auto o) { return comm->all_reduce(halves.data(), halves.data(), n, f32, ReduceOp::avg, o); });
    CHECK(halves == Values(n, 4.0f * (size + 1)) || (size & (size - 1)) != 0);  // others are not exact

    Values wide = values(me.rank, all);
    CHECK_EQ(sent([&](auto o) { return comm->reduce_scatter(wide.data(), out.data(), n, f32, ReduceOp::sum, o); }),
             others * bytes * size);
    CHECK(out == total(size, from, n));
    sent([&](auto o) { return comm->reduce_scatter(wide.data(), &wide[from], n, f32, ReduceOp::sum, o); });
    CHECK(Values(&wide[from], &wide[from] + n) == out);

    Values gathered(all), expected;
    for (int r = 0; r < size; ++r) {
      const Values theirs = values(r, n);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    data = values(me.rank, n);
    CHECK_EQ(sent([&](auto o) { return comm->all_gather(data.data(), gathered.data(), n, f32, o); }),
             others * bytes * size);
    CHECK(gathered == expected);
    std::fill(gathered.begin(), gathered.end(), -1.0f);
    std::copy(data.begin(), data.end(), gathered.begin() + from);
    sent([&](auto o) { return comm->all_gather(&gathered[from], gathered.data(), n, f32, o); });
    CHECK(gathered == expected);

    for (int root = 0; root < size; ++root) {
      data = values(me.rank, n);
      CHECK_EQ(sent([&](auto o) { return comm->broadcast(data.data(), n, f32, root, o); }), others * bytes);
      CHECK(data == values(root, n));
    }

    Values exchanged(all);
    expected.clear();
    for (int r = 0; r < size; ++r) {
      for (std::size_t i = 0; i < n; ++i) expected.push_back(value(r, from + i));
    }
    wide = values(me.rank, all);
    CHECK_EQ(sent([&](auto o) { return comm->all_to_all(wide.data(), exchanged.data(), n, f32, o); }),
             others * local * bytes * size);
    CHECK(exchanged == expected);
    sent([&](auto o) { return comm->all_to_all(wide.data(), wide.data(), n, f32, o); });
    CHECK(wide == expected);
    comm->shutdown();
  });
}

TEST(composed_collectives) {
  everything(2, 2, 8, false);
  everything(2, 3, 7, false);
  everything(4, 2, 1, false);
  everything(2, 4, 5, true);
  CHECK_EQ(standin::aborts(), 0);
  eventually([] { return standin::live_allocations() == 0; });
}

// What is smaller, and what is not composed: one call of the library on all ranks. So is it where hosts are not equal.
TEST(what_is_not_composed) {
  const auto calls = [](Rank& me, const Comm& comm, std::size_t n, DType dtype, ReduceOp op) {
    std::vector<double> data(n, 1);
    standin::clear_calls();
    comm->all_reduce(data.data(), data.data(), n, dtype, op, me.on_stream())->wait();
    standin::synchronize(me.stream);
    std::size_t count = 0;
    for (const auto& call : standin::calls()) count += call.find(" count=") != std::string::npos;
    return count;
  };
  ranks(4, [&](Rank& me) {
    const Comm comm = composed(me, 2, 2, 64);
    CHECK_EQ(calls(me, comm, 15, DType::float32, ReduceOp::sum), 1u);
    CHECK_EQ(calls(me, comm, 16, DType::float32, ReduceOp::sum), 3u);
    CHECK_EQ(calls(me, comm, 16, DType::int32, ReduceOp::sum), 3u);
    CHECK_EQ(calls(me, comm, 16, DType::int32, ReduceOp::avg), 1u);
    const Comm half = std::dynamic_pointer_cast<axo::DeviceCommunicator>(comm->split(me.rank % 2, me.rank, "half"));
    CHECK(half->composed().empty());  // two hosts of one rank
    comm->shutdown();
    half->shutdown();
    me.store->pretend("unequal/host/" + std::to_string(me.rank), me.rank == 3 ? "b" : "a");
    DeviceOptions options;
    options.composed = {{2, 2, Kind::all_reduce, 0}};
    const Comm unequal = me.connect("unequal", options);
    CHECK(unequal->composed().empty());
    unequal->shutdown();
  });
}

TEST(ranks_with_different_tables) {
  ranks(4, [](Rank& me) {
    DeviceOptions options;
    options.composed = {{2, 2, Kind::all_reduce, me.rank == 2 ? 1u : 0u}};
    CHECK_THROWS(axo::Error, "with composition table", me.connect("world", options));
  });
}

// Of one communicator and stream, whatever is composed: each sees what the one before it has written.
TEST(composed_operations_keep_their_order) {
  ranks(4, [](Rank& me) {
    const Comm comm = composed(me, 2, 2, 32);
    Values x(8, 1), y(4, 1), z(8, 1);
    standin::Gate gate;
    standin::kernel(me.stream, [&] { std::fill(x.begin(), x.end(), 2.0f); }, &gate);
    auto first = comm->all_reduce(x.data(), x.data(), 8, DType::float32, ReduceOp::sum, me.on_stream());
    auto small = comm->all_reduce(x.data(), y.data(), 4, DType::float32, ReduceOp::sum, me.on_stream());
    auto blocking = comm->all_reduce(x.data(), z.data(), 8, DType::float32, ReduceOp::sum, me.on_stream(true));
    CHECK(!first->is_completed() && !small->is_completed());
    gate.open();
    first->wait();
    small->wait();
    blocking->wait();
    standin::synchronize(me.stream);
    CHECK(x == Values(8, 8) && y == Values(4, 32) && z == Values(8, 32));
    axo::group_start();
    auto one = comm->all_reduce(x.data(), x.data(), 8, DType::float32, ReduceOp::sum, me.on_stream());
    auto two = comm->all_reduce(y.data(), y.data(), 4, DType::float32, ReduceOp::sum, me.on_stream());
    axo::group_end();
    one->wait();
    two->wait();
    standin::synchronize(me.stream);
    CHECK(x == Values(8, 32) && y == Values(4, 128));
    comm->shutdown();
  });
}

TEST(graphs_hold_composed_operations) {
  ranks(4, [](Rank& me) {
    const Comm comm = composed(me, 2, 2);
    Values x(8, 1), parts(2);
    standin::begin_capture(me.stream);
    comm->all_reduce(x.data(), x.data(), 8, DType::float32, ReduceOp::sum, me.on_stream())->wait();
    comm->reduce_scatter(x.data(), parts.data(), 2, DType::float32, ReduceOp::sum, me.on_stream())->wait();
    std::shared_ptr<standin::Graph> graph;
    CHECK_EQ(standin::end_capture(me.stream, graph), 0);
    CHECK(x == Values(8, 1));
    for (int turn = 1; turn <= 3; ++turn) {
      standin::replay(graph, me.stream);
      standin::synchronize(me.stream);
      CHECK(x == Values(8, std::pow(4.0f, turn)) && parts == Values(2, std::pow(4.0f, turn + 1)));
    }
    CHECK_THROWS(axo::Error, "is held by graphs that captured it", comm->shutdown());
    graph.reset();
    comm->shutdown();
  });
  CHECK_EQ(standin::aborts(), 0);
}

// A rank that does not come holds those of its host inside it and those of the other between: all end, and say so.
TEST(a_late_rank_ends_all_levels) {
  std::vector<Values> data(4, Values(8, 1));  // the stand-in may write what ranks bring that are aborted at other times
  ranks(4, [&](Rank& me) {
    const Comm comm = composed(me, 2, 2);
    comm->set_timeout(Milliseconds(me.rank == 0 ? 300 : 20000));
    Values& x = data[me.rank];
    if (me.rank == 3) {
      eventually([&] { return me.store->has("told/1") && me.store->has("told/2"); });  // else it may be told first
      comm->abort("ends with the others");
      return;
    }
    auto work = comm->all_reduce(x.data(), x.data(), 8, DType::float32, ReduceOp::sum, me.on_stream());
    if (me.rank == 0) {
      CHECK_THROWS(axo::Timeout, "all_reduce(float32[8], sum)", work->synchronize(axo::kNoTimeout));
    } else {
      CHECK_THROWS(axo::Aborted, "rank 0", work->synchronize(Milliseconds(10000)));
      me.store->set("told/" + std::to_string(me.rank), "");
    }
    CHECK_THROWS(axo::Aborted, "is aborted", comm->barrier(me.on_stream()));
    comm->shutdown();
  });
  eventually([] { return standin::aborts() == 12; });  // three communicators of each rank
}

}  // namespace
}  // namespace device

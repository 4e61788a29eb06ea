// Every collective on 1 to 4 ranks: the values, in place and out of place, at once and by Work, whatever the version
// has. Oracle: the definition of each collective in base/communicator.h, on small integers, which every dtype holds
// exactly.
#include "device_ranks.h"

namespace device {
namespace {

Values total(int size, std::size_t n, float factor = 1) {
  Values v(n);
  for (int r = 0; r < size; ++r) {
    for (std::size_t i = 0; i < n; ++i) v[i] += factor * value(r, i);
  }
  return v;
}
Values part(const Values& all, std::size_t index, std::size_t n) {
  return Values(all.begin() + index * n, all.begin() + (index + 1) * n);
}

// Issues by `call(options)`, non-blocking or blocking, and waits as a user would.
template <class Call>
void run(Rank& me, bool blocking, const Call& call) {
  auto work = call(me.on_stream(blocking));
  work->wait();
  standin::synchronize(me.stream);
}

void everything(Rank& me, bool blocking, std::size_t n) {
  Comm comm = me.connect(blocking ? "blocking" : "pending");
  const int size = me.size;
  const std::size_t all = n * size;
  const auto f32 = DType::float32;

  Values data = values(me.rank, n), out(n);
  run(me, blocking, [&](auto o) { return comm->all_reduce(data.data(), out.data(), n, f32, ReduceOp::sum, o); });
  CHECK(out == total(size, n));
  run(me, blocking, [&](auto o) { return comm->all_reduce(data.data(), data.data(), n, f32, ReduceOp::avg, o); });
  CHECK(data == total(size, n, 1.0f / size) || size == 3);  // thirds are not exact
  data = values(me.rank, n);
  run(me, blocking, [&](auto o) { return comm->all_reduce(data.data(), data.data(), n, f32, ReduceOp::max, o); });
  CHECK(data == values(size - 1, n));
  run(me, blocking, [&](auto o) { return comm->all_reduce_scaled(data.data(), out.data(), n, f32, 0.5, o); });
  for (std::size_t i = 0; i < n; ++i) CHECK_EQ(out[i], size * 0.5f * value(size - 1, i));

  Values gathered(all);
  data = values(me.rank, n);
  run(me, blocking, [&](auto o) { return comm->all_gather(data.data(), gathered.data(), n, f32, o); });
  for (int r = 0; r < size; ++r) CHECK(part(gathered, r, n) == values(r, n));
  Values in_place(all);
  std::copy(data.begin(), data.end(), in_place.begin() + me.rank * n);
  run(me, blocking,
      [&](auto o) { return comm->all_gather(in_place.data() + me.rank * n, in_place.data(), n, f32, o); });
  CHECK(in_place == gathered);

  Values wide = values(me.rank, all);
  run(me, blocking, [&](auto o) { return comm->reduce_scatter(wide.data(), out.data(), n, f32, ReduceOp::sum, o); });
  CHECK(out == part(total(size, all), me.rank, n));
  run(me, blocking, [&](auto o) { return comm->reduce_scatter_scaled(wide.data(), out.data(), n, f32, 2, o); });
  CHECK(out == part(total(size, all, 2), me.rank, n));

  for (int root = 0; root < size; ++root) {
    data = values(me.rank, n);
    run(me, blocking, [&](auto o) { return comm->broadcast(data.data(), n, f32, root, o); });
    CHECK(data == values(root, n));
    data = values(me.rank, n);
    Values rooted(n, -1);
    float* target = me.rank == root ? rooted.data() : nullptr;
    run(me, blocking, [&](auto o) { return comm->reduce(data.data(), target, n, f32, ReduceOp::sum, root, o); });
    CHECK(me.rank != root || rooted == total(size, n));
    Values parts(all, -1);
    float* whole = me.rank == root ? parts.data() : nullptr;
    run(me, blocking, [&](auto o) { return comm->gather(data.data(), whole, n, f32, root, o); });
    CHECK(me.rank != root || parts == gathered);
    Values scattered(n, -1);
    run(me, blocking, [&](auto o) { return comm->scatter(whole, scattered.data(), n, f32, root, o); });
    CHECK(scattered == data);
  }

  Values exchanged(all), expected;
  for (int r = 0; r < size; ++r) {
    const Values theirs = part(values(r, all), me.rank, n);
    expected.insert(expected.end(), theirs.begin(), theirs.end());
  }
  wide = values(me.rank, all);
  run(me, blocking, [&](auto o) { return comm->all_to_all(wide.data(), exchanged.data(), n, f32, o); });
  CHECK(exchanged == expected);
  run(me, blocking, [&](auto o) { return comm->all_to_all(wide.data(), wide.data(), n, f32, o); });
  CHECK(wide == expected);

  run(me, blocking, [&](auto o) { return comm->barrier(o); });
  comm->shutdown();
}

TEST(collectives_by_work) {
  for (int n : {1, 2, 3, 4}) ranks(n, [](Rank& me) { everything(me, false, 5); });
  CHECK_EQ(standin::aborts(), 0);
}

TEST(collectives_on_the_callers_stream) {
  for (int n : {1, 3}) ranks(n, [](Rank& me) { everything(me, true, 4); });
  CHECK_EQ(standin::aborts(), 0);
}

// All versions: parts of one rank are a copy, and ask nothing of the library.
TEST(exchanges_of_one_rank) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    ranks(1, [](Rank& me) {
      Comm comm = me.connect();
      const auto o = me.on_stream();
      Values in = {1, 2, 3, 4}, out(4, -1);
      standin::clear_calls();
      comm->all_to_all_v(in.data(), {3}, {1}, out.data(), {3}, {0}, DType::float32, o)->wait();
      standin::synchronize(me.stream);
      CHECK(out == Values({2, 3, 4, -1}));
      comm->all_to_all_v(in.data(), {3}, {0}, in.data(), {3}, {1}, DType::float32, o)->wait();
      comm->all_to_all(in.data(), out.data(), 4, DType::float32, o)->wait();
      standin::synchronize(me.stream);
      CHECK(in == Values({1, 1, 2, 3}) && out == in);
      for (const auto& call : standin::calls()) {
        CHECK(call.rfind("nccl", 0) != 0 || call == "ncclCommGetAsyncError");
      }
      comm->shutdown();
    });
  }
}

TEST(empty_tensors) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    const auto o = me.on_stream();
    std::vector<std::shared_ptr<axo::Work>> works = {
        comm->all_reduce(nullptr, nullptr, 0, DType::float32, ReduceOp::sum, o),
        comm->all_gather(nullptr, nullptr, 0, DType::int8, o), comm->all_to_all(nullptr, nullptr, 0, DType::int8, o),
        comm->gather(nullptr, nullptr, 0, DType::int8, 1, o),
        comm->all_to_all_v(nullptr, {0, 0}, {0, 0}, nullptr, {0, 0}, {0, 0}, DType::int8, o)};
    for (auto& work : works) {
      work->synchronize(Milliseconds(30000));
      CHECK(work->is_completed());
    }
    comm->shutdown();
  });
}

// Rank r sends r + p + 1 elements to rank p, from and to places that leave gaps; also in place.
TEST(all_to_all_of_unequal_parts) {
  for (bool in_place : {false, true}) {
    ranks(3, [in_place](Rank& me) {
      Comm comm = me.connect();
      std::vector<std::size_t> counts(3), offsets(3);
      for (int p = 0; p < 3; ++p) {
        counts[p] = p == (me.rank + 1) % 3 || me.rank == (p + 1) % 3 ? 0 : me.rank + p + 1;
        offsets[p] = 10 * p + 1;
      }
      std::vector<std::int16_t> in(30, -1), out(30, -2);
      for (int p = 0; p < 3; ++p) {
        for (std::size_t i = 0; i < counts[p]; ++i)
          in[offsets[p] + i] = static_cast<std::int16_t>(100 * me.rank + 10 * p + i);
      }
      std::int16_t* target = in_place ? in.data() : out.data();
      auto work = comm->all_to_all_v(in.data(), counts, offsets, target, counts, offsets, DType::int16, me.on_stream());
      work->wait();
      standin::synchronize(me.stream);
      for (int p = 0; p < 3; ++p) {
        for (std::size_t i = 0; i < counts[p]; ++i) {
          CHECK_EQ(target[offsets[p] + i], static_cast<std::int16_t>(100 * p + 10 * me.rank + i));
        }
      }
      comm->shutdown();
    });
  }
  eventually([] { return standin::live_allocations() == 0; });
}

// Also the versions that say a lone transfer is launched before it is (2.18 to 2.23, without blocking).
TEST(a_lone_transfer_ends_when_it_has_come) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    ranks(2, [](Rank& me) {
      Comm comm = me.connect();
      Values data = values(0, 6);
      if (me.rank == 1) std::fill(data.begin(), data.end(), 0.0f);
      auto work = me.rank == 0 ? comm->send(data.data(), 6, DType::float32, 1, 0, me.on_stream())
                               : comm->recv(data.data(), 6, DType::float32, 0, 0, me.on_stream());
      work->synchronize(Milliseconds(30000));
      CHECK(data == values(0, 6));
      comm->shutdown();
    });
  }
}

TEST(send_and_recv) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    Values mine = values(me.rank, 6), theirs(6);
    if (me.rank == 0) {
      comm->send(mine.data(), 6, DType::float32, 1, 0, me.on_stream(true));
      comm->recv(theirs.data(), 6, DType::float32, 1, 0, me.on_stream(true));
    } else {
      comm->recv(theirs.data(), 6, DType::float32, 0, 0, me.on_stream(true));
      comm->send(mine.data(), 6, DType::float32, 0, 0, me.on_stream(true));
    }
    standin::synchronize(me.stream);
    CHECK(theirs == values(1 - me.rank, 6));
    comm->shutdown();
  });
}

template <class T>
void sum_of(Comm comm, Rank& me, DType dtype, ReduceOp op, std::vector<T> in, std::vector<T> expected) {
  comm->all_reduce(in.data(), in.data(), in.size(), dtype, op, me.on_stream())->wait();
  standin::synchronize(me.stream);
  CHECK(std::memcmp(in.data(), expected.data(), in.size() * sizeof(T)) == 0);
}

TEST(dtypes_and_operations) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    const int r = me.rank;
    sum_of<double>(comm, me, DType::float64, ReduceOp::product, {2.0 + r}, {6.0});
    sum_of<std::int64_t>(comm, me, DType::int64, ReduceOp::sum, {1 + r}, {3});
    sum_of<std::int32_t>(comm, me, DType::int32, ReduceOp::min, {5 - r}, {4});
    sum_of<std::int8_t>(comm, me, DType::int8, ReduceOp::sum, {static_cast<std::int8_t>(-4 + r)}, {-7});
    sum_of<std::uint8_t>(comm, me, DType::uint8, ReduceOp::max, {static_cast<std::uint8_t>(200 + r)}, {201});
    sum_of<std::uint16_t>(comm, me, DType::bfloat16, ReduceOp::sum, {0x3f80, 0x4000},
                          {0x4000, 0x4080});  // 1, 2 -> 2, 4
    sum_of<std::uint16_t>(comm, me, DType::float16, ReduceOp::sum, {0x3c00, 0x4000}, {0x4000, 0x4400});
    // On bool: sum and bit or are "or", product and bit and are "and".
    const std::vector<std::uint8_t> flags = {0, 1, static_cast<std::uint8_t>(r)};
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::bit_or, ReduceOp::max}) {
      sum_of<std::uint8_t>(comm, me, DType::boolean, op, flags, {0, 1, 1});
    }
    for (ReduceOp op : {ReduceOp::product, ReduceOp::bit_and, ReduceOp::min}) {
      sum_of<std::uint8_t>(comm, me, DType::boolean, op, flags, {0, 1, 0});
    }
    // Moved as bytes: what the library has no type for.
    std::vector<std::uint8_t> bytes(2 * 16, 0), mine(16, static_cast<std::uint8_t>(r + 1));
    comm->all_gather(mine.data(), bytes.data(), 1, DType::complex128, me.on_stream())->wait();
    standin::synchronize(me.stream);
    CHECK_EQ(static_cast<int>(bytes[0]), 1);
    CHECK_EQ(static_cast<int>(bytes[31]), 2);
    CHECK_EQ(standin::calls().empty(), false);
    comm->shutdown();
  });
}

TEST(refuses_what_it_cannot_reduce) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 0;
    const auto o = me.on_stream();
    CHECK_THROWS(axo::Error, "no sum on int16", comm->all_reduce(&x, &x, 1, DType::int16, ReduceOp::sum, o));
    CHECK_THROWS(axo::Error, "no bxor on bool", comm->all_reduce(&x, &x, 1, DType::boolean, ReduceOp::bit_xor, o));
    CHECK_THROWS(axo::Error, "no band on int32", comm->reduce_scatter(&x, &x, 1, DType::int32, ReduceOp::bit_and, o));
    CHECK_THROWS(axo::Error, "sum is not defined on float8_e4m3fn",
                 comm->reduce(&x, &x, 1, DType::float8_e4m3fn, ReduceOp::sum, 0, o));
    CHECK_THROWS(axo::Error, "a scaled sum: got int32", comm->all_reduce_scaled(&x, &x, 1, DType::int32, 2, o));
    // None of these touched the communicator.
    comm->all_reduce(&x, &x, 1, DType::float32, ReduceOp::sum, me.on_stream(true));
    comm->shutdown();
  });
}

TEST(wrong_arguments) {
  ranks(2, [](Rank& me) {
    Comm comm = me.connect();
    float x[2] = {};
    const auto o = me.on_stream();
    const auto f32 = DType::float32;
    CHECK_THROWS(axo::Error, "broadcast: root: got 2, expected a rank from 0 to 1", comm->broadcast(x, 1, f32, 2, o));
    CHECK_THROWS(axo::Error, "gather: root: got -1", comm->gather(x, x, 1, f32, -1, o));
    CHECK_THROWS(axo::Error, "send: peer", comm->send(x, 1, f32, me.rank, 0, o));
    CHECK_THROWS(axo::Error, "recv: peer: got 7", comm->recv(x, 1, f32, 7, 0, o));
    CHECK_THROWS(axo::Error, "all_reduce: out: got null", comm->all_reduce(x, nullptr, 1, f32, ReduceOp::sum, o));
    CHECK_THROWS(axo::Error, "send_counts: got 1, expected 2",
                 comm->all_to_all_v(x, {1}, {0, 1}, x, {1, 1}, {0, 1}, f32, o));
    CHECK_THROWS(axo::Error, "4-byte aligned", comm->wait_flag(reinterpret_cast<char*>(x) + 2, 1));
    CHECK_THROWS(axo::Error, "register_buffer", comm->register_buffer(x, 0, false));
    comm->shutdown();
  });
}

TEST(scale_factors_of_every_dtype) {
  const auto bits = [](DType dtype, double x) {
    std::uint16_t b;
    std::memcpy(&b, axo::NcclScalar(dtype, x).bytes, 2);
    return static_cast<int>(b);
  };
  // Against IEEE 754 and bfloat16 codes written out by hand: exact, ties to even, subnormal, overflow, zero, NaN.
  CHECK_EQ(bits(DType::float16, 1.0), 0x3c00);
  CHECK_EQ(bits(DType::float16, -0.1), 0xae66);
  CHECK_EQ(bits(DType::float16, 1.0 + 1.0 / 2048), 0x3c00);
  CHECK_EQ(bits(DType::float16, 1.0 + 3.0 / 2048), 0x3c02);
  CHECK_EQ(bits(DType::float16, 65519.0), 0x7bff);
  CHECK_EQ(bits(DType::float16, 65520.0), 0x7c00);
  CHECK_EQ(bits(DType::float16, 1.0 / (1 << 24)), 0x0001);
  CHECK_EQ(bits(DType::float16, 1e-30), 0x0000);
  CHECK_EQ(bits(DType::bfloat16, 1.0 / 3), 0x3eab);
  CHECK_EQ(bits(DType::bfloat16, 0.0), 0x0000);
  CHECK_EQ(bits(DType::bfloat16, -1e300), 0xff80);
  CHECK((bits(DType::bfloat16, std::nan("")) & 0x7fff) > 0x7f80);
}

}  // namespace
}  // namespace device

// Every collective against the serial oracle of values.h, with ranks as threads and as processes.
#include <algorithm>

#include "tests/ranks.h"
#include "tests/values.h"

using namespace axo;
using ranks::Comm;
using values::Bytes;

namespace {

void same(const Bytes& got, const Bytes& want, const std::string& what) {
  ++check::checks();
  if (got == want) return;
  std::size_t at = 0;
  while (at < want.size() && got[at] == want[at]) ++at;
  throw check::Failed(what + ": differs from byte " + std::to_string(at) + " of " + std::to_string(want.size()));
}

std::string label(const char* op, const Comm& c, std::size_t count, DType d, const char* more = "") {
  return std::string(op) + " " + more + " n=" + std::to_string(c->size()) + " count=" + std::to_string(count) + " " +
         name_of(d);
}

void reductions(const Comm& c, std::size_t count, DType d, ReduceOp op) {
  const int n = c->size(), me = c->rank();
  const auto N = static_cast<std::size_t>(n);
  const auto options = ranks::blocking();
  const std::size_t item = item_size(d);
  const Bytes mine = values::make(me, 0, count, d, op);
  const Bytes want = values::reduced(n, 0, count, d, op);
  {
    Bytes out(count * item, 'x');
    c->all_reduce(mine.data(), out.data(), count, d, op, options);
    same(out, want, label("all_reduce", c, count, d, name_of(op)));
    Bytes in_place = mine;
    c->all_reduce(in_place.data(), in_place.data(), count, d, op, {})->wait();
    same(in_place, want, label("all_reduce in place", c, count, d, name_of(op)));
  }
  {
    const int root = n - 1;
    Bytes out(me == root ? count * item : 0, 'x');
    c->reduce(mine.data(), me == root ? out.data() : nullptr, count, d, op, root, options);
    if (me == root) same(out, want, label("reduce", c, count, d, name_of(op)));
  }
  {
    const std::size_t part = count / N;
    const Bytes all = values::make(me, 0, part * N, d, op);
    const Bytes want_part = values::reduced(n, part * static_cast<std::size_t>(me), part, d, op);
    Bytes out(part * item, 'x');
    c->reduce_scatter(all.data(), out.data(), part, d, op, options);
    same(out, want_part, label("reduce_scatter", c, part, d, name_of(op)));
    Bytes in_place = all;
    char* at = in_place.data() + part * item * static_cast<std::size_t>(me);
    c->reduce_scatter(in_place.data(), at, part, d, op, options);
    same(Bytes(at, at + part * item), want_part, label("reduce_scatter in place", c, part, d, name_of(op)));
  }
}

void movements(const Comm& c, std::size_t count, DType d) {
  const int n = c->size(), me = c->rank();
  const auto N = static_cast<std::size_t>(n), self = static_cast<std::size_t>(me);
  const auto options = ranks::blocking();
  const std::size_t item = item_size(d), bytes = count * item;
  const ReduceOp op = ReduceOp::sum;  // only chooses the values
  const Bytes mine = values::make(me, 0, count, d, op);
  Bytes everything;
  for (int p = 0; p < n; ++p) {
    const Bytes part = values::make(p, 0, count, d, op);
    everything.insert(everything.end(), part.begin(), part.end());
  }
  Bytes out(bytes * N, 'x');
  c->all_gather(mine.data(), out.data(), count, d, options);
  same(out, everything, label("all_gather", c, count, d));
  out.assign(bytes * N, 'x');
  std::copy(mine.begin(), mine.end(), out.begin() + static_cast<long>(bytes * self));
  c->all_gather(out.data() + bytes * self, out.data(), count, d, options);
  same(out, everything, label("all_gather in place", c, count, d));
  for (int root : {0, n - 1}) {
    Bytes data = me == root ? mine : Bytes(bytes, 'x');
    c->broadcast(data.data(), count, d, root, options);
    same(data, values::make(root, 0, count, d, op), label("broadcast", c, count, d));
    Bytes gathered(me == root ? bytes * N : 0, 'x');
    c->gather(mine.data(), me == root ? gathered.data() : nullptr, count, d, root, options);
    if (me == root) same(gathered, everything, label("gather", c, count, d));
    Bytes mine_again(bytes, 'x');
    c->scatter(me == root ? everything.data() : nullptr, mine_again.data(), count, d, root, options);
    same(mine_again, mine, label("scatter", c, count, d));
  }
  // all_to_all: rank r sends the elements [p * count, (p + 1) * count) of its sequence to p.
  const Bytes send = values::make(me, 0, count * N, d, op);
  Bytes want;
  for (int p = 0; p < n; ++p) {
    const Bytes part = values::make(p, count * self, count, d, op);
    want.insert(want.end(), part.begin(), part.end());
  }
  out.assign(bytes * N, 'x');
  c->all_to_all(send.data(), out.data(), count, d, options);
  same(out, want, label("all_to_all", c, count, d));
  out = send;
  c->all_to_all(out.data(), out.data(), count, d, options);
  same(out, want, label("all_to_all in place", c, count, d));
  // all_to_all_v: r sends (r + 2 p) % 3 * count elements to p, from the start of its sequence.
  const auto amount = [&](int from, int to) { return static_cast<std::size_t>((from + 2 * to) % 3) * count; };
  std::vector<std::size_t> sc, so, rc, ro;
  std::size_t total = 0;
  Bytes v_want;
  for (int p = 0; p < n; ++p) {
    sc.push_back(amount(me, p));
    so.push_back(0);
    rc.push_back(amount(p, me));
    ro.push_back(total);
    total += amount(p, me);
    const Bytes part = values::make(p, 0, amount(p, me), d, op);
    v_want.insert(v_want.end(), part.begin(), part.end());
  }
  const Bytes v_in = values::make(me, 0, 2 * count, d, op);
  Bytes v_out(total * item, 'x');
  c->all_to_all_v(v_in.data(), sc, so, v_out.data(), rc, ro, d, options);
  same(v_out, v_want, label("all_to_all_v", c, count, d));
  // A ring of messages, and one to myself.
  const int next = (me + 1) % n, previous = (me + n - 1) % n;
  Bytes received(bytes, 'x'), to_self(bytes, 'x');
  auto s = c->send(mine.data(), count, d, next, 5, {});
  auto r = c->recv(received.data(), count, d, previous, 5, {});
  auto s2 = c->send(mine.data(), count, d, me, 6, {});
  auto r2 = c->recv(to_self.data(), count, d, me, 6, {});
  for (auto& w : {s, r, s2, r2}) w->wait();
  same(received, values::make(previous, 0, count, d, op), label("send/recv", c, count, d));
  same(to_self, mine, label("send to self", c, count, d));
}

constexpr DType kReducible[] = {DType::float64, DType::float32, DType::bfloat16, DType::float16, DType::int64,
                                DType::int32,   DType::int16,   DType::int8,     DType::uint8,   DType::boolean};

void everything(const Comm& c, const std::vector<std::size_t>& sizes) {
  for (std::size_t count : sizes) {
    for (DType d : kReducible) {
      for (int o = 0; o < kReduceOpCount; ++o) {
        if (can_reduce(d, static_cast<ReduceOp>(o))) reductions(c, count, d, static_cast<ReduceOp>(o));
      }
    }
    for (int d = 0; d < kDTypeCount; ++d) movements(c, count, static_cast<DType>(d));
    c->barrier(ranks::blocking());
  }
}

void large(const Comm& c) {
  constexpr std::size_t kCount = 3 * 1024 * 1024 / 4 + 5;
  for (ReduceOp op : {ReduceOp::sum, ReduceOp::max}) reductions(c, kCount, DType::float32, op);
  reductions(c, kCount, DType::bfloat16, ReduceOp::avg);
  movements(c, kCount / static_cast<std::size_t>(c->size()), DType::int32);
}

// Messages that begin elsewhere in their slots each time round, with other values each time: of sizes at the borders,
// in a row that is longer than the slots need to come round to the same place. Oracle: a formula of rank, turn and
// place.
void moving(const Comm& c) {
  using Value = std::int64_t;
  constexpr int kTurns = 40;  // of eight collectives, in eight slots of 128 KiB; a message of 8 KiB has 16 places
  const int n = c->size(), me = c->rank();
  const auto N = static_cast<std::size_t>(n);
  const auto options = ranks::blocking();
  const auto value = [](int rank, int turn, std::size_t i) { return rank * 1000003 + turn * 7919 + Value(i) * 31; };
  for (const std::size_t count : {std::size_t{1023}, std::size_t{1024}, std::size_t{2048}, std::size_t{5120},
                                  std::size_t{8192}, std::size_t{8193}}) {
    for (int turn = 0; turn < kTurns; ++turn) {
      std::vector<Value> mine(count * N), whole(count * N), part(count);
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = value(me, turn, i);
      const auto sum = [&](std::size_t i) {
        Value total = 0;
        for (int p = 0; p < n; ++p) total += value(p, turn, i);
        return total;
      };
      const auto expect = [&](const char* op, const std::vector<Value>& got, std::size_t many, const auto& want) {
        ++check::checks();
        for (std::size_t i = 0; i < many; ++i) {
          if (got[i] != want(i))
            throw check::Failed(label(op, c, count, DType::int64) + ": place " + std::to_string(i));
        }
      };
      const int root = turn % n;
      const auto own = static_cast<std::size_t>(me) * count;
      const auto of_rank = [&](std::size_t i) { return value(int(i / count), turn, i % count); };
      const auto to_me = [&](std::size_t i) { return value(int(i / count), turn, own + i % count); };
      c->all_reduce(mine.data(), part.data(), count, DType::int64, ReduceOp::sum, options);
      expect("all_reduce", part, count, sum);
      c->all_gather(mine.data(), whole.data(), count, DType::int64, options);
      expect("all_gather", whole, count * N, of_rank);
      c->reduce_scatter(mine.data(), part.data(), count, DType::int64, ReduceOp::sum, options);
      expect("reduce_scatter", part, count, [&](std::size_t i) { return sum(own + i); });
      c->all_to_all(mine.data(), whole.data(), count, DType::int64, options);
      expect("all_to_all", whole, count * N, to_me);
      c->reduce(mine.data(), part.data(), count, DType::int64, ReduceOp::sum, root, options);
      if (me == root) expect("reduce", part, count, sum);
      c->gather(mine.data(), whole.data(), count, DType::int64, root, options);
      if (me == root) expect("gather", whole, count * N, of_rank);
      c->scatter(mine.data(), part.data(), count, DType::int64, root, options);
      expect("scatter", part, count, [&](std::size_t i) { return value(root, turn, own + i); });
      c->broadcast(mine.data(), count, DType::int64, root, options);
      expect("broadcast", mine, count, [&](std::size_t i) { return value(root, turn, i); });
    }
  }
}

}  // namespace

TEST(collectives_alone) {
  ranks::with_threads(1, [](Comm c) { everything(c, {0, 1, 17, 70000}); });
}
TEST(collectives_2_threads) {
  ranks::with_threads(2, [](Comm c) { everything(c, {0, 1, 3, 17, 1000}); });
}
TEST(collectives_3_threads) {
  ranks::with_threads(3, [](Comm c) { everything(c, {0, 1, 3, 17, 1000}); });
}
TEST(collectives_4_threads) {
  ranks::with_threads(4, [](Comm c) { everything(c, {0, 3, 17, 1000}); });
}
TEST(collectives_8_threads) {
  ranks::with_threads(8, [](Comm c) { everything(c, {3, 17}); });
}
TEST(collectives_large_threads) {
  for (int n : {2, 3, 4}) {
    if (!check::kThreadSanitizer || n == 3) ranks::with_threads(n, large);
  }
}
TEST(collectives_medium_threads) {
  ranks::with_threads(3, [](Comm c) {
    for (DType d : kReducible) reductions(c, 65536 + 3, d, ReduceOp::min);
    for (DType d : {DType::uint8, DType::int64, DType::complex128}) movements(c, 65536 + 3, d);
  });
}
TEST(collectives_that_move_in_their_slots) {
  for (int n : {2, 3, 4, 8}) {
    if (!check::kThreadSanitizer || n == 3) ranks::with_threads(n, moving);
  }
}
PROCESS_TEST(collectives_processes) {
  for (int n : {2, 5, 8, 16}) {
    ranks::TableStore store;
    ranks::all_well(ranks::processes(n, [&](int r) {
      Comm c = ranks::connect(store, r, n);
      everything(c, {1, 100});
      if (n <= 5) large(c);
      c->shutdown();
    }));
    ++check::checks();
  }
}

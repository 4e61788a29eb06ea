// Shared buffers: the same values and bits as with stages, and memory that comes back.
//
// Oracle: the same collective on private buffers (which test_collectives.cpp holds against the serial oracle), and the
// serial oracle of values.h.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>

#include "memory/shared_buffers.h"
#include "tests/ranks.h"
#include "tests/values.h"

using namespace axo;
using ranks::Comm;
using values::Bytes;

namespace {

struct Buffer {
  explicit Buffer(std::size_t bytes) : owner(allocate_shared(bytes)), data(static_cast<char*>(owner.get())) {}
  std::shared_ptr<void> owner;
  char* data;
};

bool equal(const char* a, const Bytes& b) { return std::equal(b.begin(), b.end(), a); }

void compare(const Comm& c, std::size_t count, DType d, ReduceOp op, bool odd_one_out) {
  const int n = c->size(), me = c->rank();
  const auto N = static_cast<std::size_t>(n), self = static_cast<std::size_t>(me);
  const std::size_t bytes = count * item_size(d);
  const auto b = ranks::blocking();
  // When one rank has private memory, all fall back to stages.
  const bool mine_is_private = odd_one_out && me == n - 1;
  Bytes private_in(bytes * N), private_out(bytes * N);
  Buffer shared_in(bytes * N), shared_out(bytes * N);
  char* in = mine_is_private ? private_in.data() : shared_in.data;
  char* out = mine_is_private ? private_out.data() : shared_out.data;

  Bytes mine = values::make(me, 0, count, d, op), want = values::reduced(n, 0, count, d, op);
  std::copy(mine.begin(), mine.end(), in);
  c->all_reduce(in, out, count, d, op, b);
  CHECK(equal(out, want));
  c->all_reduce(in, in, count, d, op, {})->wait();
  CHECK(equal(in, want));

  mine = values::make(me, 0, count * N, d, op);
  want = values::reduced(n, count * self, count, d, op);
  std::copy(mine.begin(), mine.end(), in);
  c->reduce_scatter(in, out, count, d, op, b);
  CHECK(equal(out, want));
  c->reduce_scatter(in, in + self * bytes, count, d, op, b);
  CHECK(equal(in + self * bytes, want));

  mine = values::make(me, 0, count, d, op);
  want.clear();
  for (int p = 0; p < n; ++p) {
    const Bytes part = values::make(p, 0, count, d, op);
    want.insert(want.end(), part.begin(), part.end());
  }
  std::copy(mine.begin(), mine.end(), in);
  c->all_gather(in, out, count, d, b);
  CHECK(equal(out, want));
  std::copy(mine.begin(), mine.end(), out + self * bytes);
  c->all_gather(out + self * bytes, out, count, d, b);
  CHECK(equal(out, want));

  mine = values::make(1 % n, 0, count, d, op);
  if (me == 1 % n) std::copy(mine.begin(), mine.end(), in);
  c->broadcast(in, count, d, 1 % n, b);
  CHECK(equal(in, mine));
}

void all_sizes(const Comm& c) {
  for (bool odd : {false, true}) {
    for (std::size_t count : {16387ul, 100003ul, 1000001ul}) {
      if (check::kThreadSanitizer && count > 20000) continue;  // the oracle is slow under it
      compare(c, count, DType::float32, ReduceOp::sum, odd);
      compare(c, count, DType::bfloat16, ReduceOp::avg, odd);
      compare(c, count, DType::int64, ReduceOp::max, odd);
      compare(c, count, DType::uint8, ReduceOp::sum, odd);
    }
  }
}

// Random floats, whose sum depends on the order: shared and staged must agree to the bit, and all ranks.
void same_bits(const Comm& c) {
  constexpr std::size_t kCount = 300007;
  std::mt19937 random(static_cast<unsigned>(c->rank()) + 5);
  std::normal_distribution<float> normal;
  std::vector<float> staged(kCount);
  for (auto& x : staged) x = normal(random);
  Buffer shared(kCount * 4);
  auto* s = reinterpret_cast<float*>(shared.data);
  std::copy(staged.begin(), staged.end(), s);
  c->all_reduce(staged.data(), staged.data(), kCount, DType::float32, ReduceOp::sum, ranks::blocking());
  c->all_reduce(s, s, kCount, DType::float32, ReduceOp::sum, ranks::blocking());
  CHECK(std::memcmp(s, staged.data(), kCount * 4) == 0);
  std::vector<float> others(kCount * static_cast<std::size_t>(c->size()));
  c->all_gather(s, others.data(), kCount, DType::float32, ranks::blocking());
  for (int p = 0; p < c->size(); ++p) {
    CHECK(std::memcmp(others.data() + static_cast<std::size_t>(p) * kCount, s, kCount * 4) == 0);
  }
}

long resident_shared_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, 9, "RssShmem:") == 0) return std::atol(line.c_str() + 9);
  }
  return -1;
}

}  // namespace

TEST(shared_buffers_threads) {
  ranks::with_threads(3, all_sizes);
  ranks::with_threads(2, same_bits);
}

PROCESS_TEST(shared_buffers_processes) {
  for (int n : {2, 4, 7}) {
    ranks::TableStore store;
    ranks::all_well(ranks::processes(n, [&](int r) {
      Comm c = ranks::connect(store, r, n);
      if (n < 7) all_sizes(c);
      same_bits(c);
      auto half = c->split(r % 2, r, "half");
      same_bits(half);
      c->shutdown();
    }));
    ++check::checks();
  }
}

TEST(shared_buffers_come_back) {
  auto first = allocate_shared(3 << 20);
  std::memset(first.get(), 1, 3 << 20);
  const long before = resident_shared_kib();
  CHECK(before >= 3 * 1024);
  const void* at = first.get();
  first.reset();
  CHECK(resident_shared_kib() <= before - 3 * 1024);
  auto second = allocate_shared(3 << 20);
  CHECK_EQ(second.get(), const_cast<void*>(at));
  CHECK_EQ(static_cast<char*>(second.get())[100], 0);
  CHECK_THROWS(Error, "no room", allocate_shared(std::size_t{1} << 60));
  auto third = allocate_shared(0);
  CHECK(third.get() != second.get());
}

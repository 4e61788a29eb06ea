// How fast is the host transport without Python? Forked ranks, private buffers that every rank has touched:
//
//   make -C csrc/tests bench ARGS="2 all_reduce,broadcast 1K,1M,256M 7 [shared]"
//
// For each operation and size (nccl-tests' size column: the whole buffer): the median and the least time of a call,
// each the slowest rank's mean over a round, and size / time. The first row is what all cores copy at once (bytes read
// plus bytes written), against which the copies of an algorithm can be counted. `shared` takes buffers of
// allocate_shared.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "memory/shared_buffers.h"
#include "tests/ranks.h"

namespace {

using Clock = std::chrono::steady_clock;
using axo::DType;
using axo::ReduceOp;

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::size_t size_of(const std::string& text) {
  const std::size_t n = std::stoul(text);
  switch (text.back()) {
    case 'K':
      return n << 10;
    case 'M':
      return n << 20;
    case 'G':
      return n << 30;
    default:
      return n;
  }
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Buffer {
  Buffer(std::size_t bytes, bool shared) {
    if (shared) {
      owner = axo::allocate_shared(bytes);
    } else {
      owner = std::shared_ptr<void>(::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64), ::free);
    }
    data = static_cast<char*>(owner.get());
    std::memset(data, 0, bytes);
  }
  std::shared_ptr<void> owner;
  char* data;
};

// GB/s of bytes read plus bytes written by all ranks that copy at once.
double copy_traffic(const ranks::Comm& c) {
  constexpr std::size_t kBytes = 128 << 20;
  Buffer from(kBytes, false), to(kBytes, false);
  double best = 1e9;
  for (int i = 0; i < 4; ++i) {
    c->barrier(ranks::blocking());
    const auto start = Clock::now();
    std::memcpy(to.data, from.data, kBytes);
    c->barrier(ranks::blocking());
    best = std::min(best, seconds_since(start));
  }
  return 2.0 * kBytes * c->size() / best / 1e9;
}

void call(const ranks::Comm& c, const std::string& op, char* whole, char* part, char* other, std::size_t count,
          DType dtype) {
  const auto b = ranks::blocking();
  const std::size_t each = count / static_cast<std::size_t>(c->size());
  if (op == "all_reduce") c->all_reduce(whole, whole, count, dtype, ReduceOp::sum, b);
  if (op == "all_gather") c->all_gather(part, whole, each, dtype, b);
  if (op == "reduce_scatter") c->reduce_scatter(whole, part, each, dtype, ReduceOp::sum, b);
  if (op == "broadcast") c->broadcast(whole, count, dtype, 0, b);
  if (op == "reduce") c->reduce(whole, whole, count, dtype, ReduceOp::sum, 0, b);
  if (op == "gather") c->gather(part, whole, each, dtype, 0, b);
  if (op == "scatter") c->scatter(whole, part, each, dtype, 0, b);
  if (op == "all_to_all") c->all_to_all(whole, other, each, dtype, b);
  if (op == "barrier") c->barrier(b);
  if (op == "sendrecv") {
    if (c->rank() % 2 == 0 && c->rank() + 1 < c->size()) c->send(whole, count, dtype, c->rank() + 1, 0, b);
    if (c->rank() % 2 == 1) c->recv(whole, count, dtype, c->rank() - 1, 0, b);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 2;
  const auto ops = parts_of(argc > 2 ? argv[2] : "all_reduce");
  const auto sizes = parts_of(argc > 3 ? argv[3] : "1K,1M,16M");
  const int rounds = argc > 4 ? std::atoi(argv[4]) : 7;
  const std::string more = argc > 5 ? argv[5] : "";
  const bool shared = more.find("shared") != std::string::npos;
  const DType dtype = more.find("bf16") != std::string::npos ? DType::bfloat16 : DType::float32;
  ranks::TableStore store;
  const auto ends = ranks::processes(n, [&](int r) {
    ranks::Comm c = ranks::connect(store, r, n);
    const double traffic = copy_traffic(c);
    if (r == 0) std::printf("copy traffic of %d ranks: %.1f GB/s\n", n, traffic);
    for (const auto& op : ops) {
      for (const auto& text : sizes) {
        const std::size_t bytes = size_of(text), count = bytes / axo::item_size(dtype) / n * n;
        Buffer whole(bytes, shared), part(bytes / n, shared), other(op == "all_to_all" ? bytes : 1, shared);
        const int repeats = static_cast<int>(std::max<std::size_t>(2, std::min<std::size_t>(500, (8 << 20) / bytes)));
        std::vector<double> times;
        for (int round = 0; round <= rounds; ++round) {
          c->barrier(ranks::blocking());
          const auto start = Clock::now();
          for (int i = 0; i < repeats; ++i) call(c, op, whole.data, part.data, other.data, count, dtype);
          double mine = seconds_since(start) / repeats, slowest = 0;
          c->all_reduce(&mine, &slowest, 1, DType::float64, ReduceOp::max, ranks::blocking());
          if (round > 0) times.push_back(slowest);
        }
        std::sort(times.begin(), times.end());
        const double median = times[times.size() / 2];
        if (r == 0) {
          std::printf("%-15s %6s x%d  median %10.1f us  least %10.1f us  %7.2f GB/s\n", op.c_str(), text.c_str(), n,
                      median * 1e6, times[0] * 1e6, static_cast<double>(bytes) / median / 1e9);
          std::fflush(stdout);
        }
      }
    }
    c->shutdown();
  });
  ranks::all_well(ends);
}

// Random non-blocking operations over four overlapping communicators, each checked against the serial oracle.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "tests/ranks.h"
#include "tests/values.h"

namespace ranks {

using namespace axo;
using values::Bytes;

// Every rank issues the same operations per communicator, but each interleaves the communicators in its own way. In an
// epoch a rank issues some operations of every communicator, then waits for some, in any order: what it waits for, all
// have issued or will issue before they wait, so no order of waiting can deadlock.
inline void interleave(const Comm& world, unsigned seed, int operations) {
  const int me = world->rank(), n = world->size();
  std::vector<Comm> comms{world, world->split(me / 2, me, "half"), world->split(me % 2, -me, "stripe"),
                          world->split(0, n - me, "mirror")};
  struct Op {
    int kind;
    std::size_t count;
    DType dtype;
    int root;
  };
  struct Pending {
    WorkPtr work;
    Bytes in, out, want;
  };
  std::vector<std::vector<Op>> plans(comms.size());
  for (std::size_t k = 0; k < comms.size(); ++k) {
    std::mt19937 common(seed * 131 + static_cast<unsigned>(k));
    for (int i = 0; i < operations; ++i) {
      const std::size_t largest[] = {4, 300, 5000, 150000};
      const std::size_t limit = largest[common() % 4];
      constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::int64, DType::uint8, DType::float16};
      plans[k].push_back({static_cast<int>(common() % 5), common() % limit, kTypes[common() % 5],
                          static_cast<int>(common() % static_cast<unsigned>(comms[k]->size()))});
    }
  }
  std::mt19937 own(seed * 977 + static_cast<unsigned>(me));
  std::vector<std::size_t> next(comms.size(), 0);
  std::vector<std::unique_ptr<Pending>> pending;
  const auto settle = [&](std::size_t i) {
    pending[i]->work->wait();
    CHECK(pending[i]->out == pending[i]->want);
    pending.erase(pending.begin() + static_cast<long>(i));
  };
  constexpr std::size_t kEpoch = 8;
  for (std::size_t limit = kEpoch;;) {
    std::vector<std::size_t> open;
    for (std::size_t k = 0; k < comms.size(); ++k) {
      if (next[k] < std::min(limit, plans[k].size())) open.push_back(k);
    }
    if (open.empty()) {
      if (limit >= plans[0].size()) break;
      limit += kEpoch;
      for (auto some = own() % (pending.size() + 1); some > 0; --some) settle(own() % pending.size());
      while (pending.size() > 100) settle(own() % pending.size());
      continue;
    }
    const std::size_t k = open[own() % open.size()];
    const Op op = plans[k][next[k]++];
    auto& c = comms[k];
    const int size = c->size(), rank = c->rank();
    const auto N = static_cast<std::size_t>(size), self = static_cast<std::size_t>(rank);
    auto p = std::make_unique<Pending>();
    const ReduceOp sum = ReduceOp::sum;
    switch (op.kind) {
      case 0:
        p->in = values::make(rank, 0, op.count, op.dtype, sum);
        p->out.resize(p->in.size());
        p->want = values::reduced(size, 0, op.count, op.dtype, sum);
        p->work = c->all_reduce(p->in.data(), p->out.data(), op.count, op.dtype, sum, {});
        break;
      case 1:
        p->in = values::make(rank, 0, op.count, op.dtype, sum);
        p->out.resize(p->in.size() * N);
        for (int r = 0; r < size; ++r) {
          const Bytes part = values::make(r, 0, op.count, op.dtype, sum);
          p->want.insert(p->want.end(), part.begin(), part.end());
        }
        p->work = c->all_gather(p->in.data(), p->out.data(), op.count, op.dtype, {});
        break;
      case 2:
        p->in = values::make(rank, 0, op.count * N, op.dtype, sum);
        p->out.resize(op.count * item_size(op.dtype));
        p->want = values::reduced(size, op.count * self, op.count, op.dtype, sum);
        p->work = c->reduce_scatter(p->in.data(), p->out.data(), op.count, op.dtype, sum, {});
        break;
      case 3:
        p->want = values::make(op.root, 0, op.count, op.dtype, sum);
        p->out = rank == op.root ? p->want : Bytes(p->want.size());
        p->work = c->broadcast(p->out.data(), op.count, op.dtype, op.root, {});
        break;
      default: {
        p->in = values::make(rank, 0, op.count, op.dtype, sum);
        p->want = values::make((rank + size - 1) % size, 0, op.count, op.dtype, sum);
        p->out.resize(p->want.size());
        auto sent = c->send(p->in.data(), op.count, op.dtype, (rank + 1) % size, 7, {});
        p->work = c->recv(p->out.data(), op.count, op.dtype, (rank + size - 1) % size, 7, {});
        auto q = std::make_unique<Pending>();
        q->work = sent;
        q->in = p->in;
        pending.push_back(std::move(p));
        p = std::move(q);
        std::swap(p->in, pending.back()->in);  // the send reads the first buffer: it must live with the send
        break;
      }
    }
    pending.push_back(std::move(p));
  }
  while (!pending.empty()) settle(pending.size() - 1);
}

}  // namespace ranks

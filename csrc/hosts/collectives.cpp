// The collectives of a communicator that spans hosts: shared memory inside a host, the fewest bytes between hosts.
//
// H hosts; K slices, K the fewest ranks on a host; the k-th rank of each host owns slice k. N bytes, n a rank's part.
//   operation       inside, between, inside                                             leaves a host, in bytes
//   all_reduce      reduce slice k to its owner; owners of k reduce-scatter and         2 (H-1)/H N
//                   all-gather (two hosts: exchange); owners broadcast
//   reduce          the same reduce; owners send to those of the root's host, which     N
//                   reduce and send to the root
//   reduce_scatter  reduce the part of rank q to a relay; relays send to q, which       the parts of the other hosts
//                   reduces its host's and the other hosts'
//   all_gather      q sends its part to a relay on each other host; relays broadcast    (H-1) n a rank
//   broadcast       the root broadcasts; owners pass their slice from host to host in   N
//                   chunks; owners broadcast
//   gather, scatter, all_to_all(_v)   each part goes straight from rank to rank         what must
//   barrier         everybody's `begin`
// The relay of rank q on another host is its rank number local(q) modulo that host's ranks.
//
// In what they add up stands in hosts/numbers.h.
#include <algorithm>
#include <cstring>

#include "hosts/core.h"
#include "hosts/numbers.h"

namespace axo::span {
namespace {

void copy(char* to, const char* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}
class Collective {
 public:
  Collective(SpanCore& core, const SpanWork& work)
      : core_(core),
        work_(work),
        r_(work.request),
        place_(core.parts().place),
        inner_(core.parts().inner.get()),
        hosts_(static_cast<int>(place_.hosts.size())),
        me_(core.rank()),
        host_(host_of(me_)),
        local_(local_of(me_)),
        locals_(static_cast<int>(ranks_on(host_).size())),
        item_(item_size(r_.dtype)),
        in_(static_cast<const char*>(r_.in)),
        out_(static_cast<char*>(r_.out)) {
    slices_ = locals_;
    for (const auto& ranks : place_.hosts) slices_ = std::min(slices_, static_cast<int>(ranks.size()));
  }

  void run() {
    switch (r_.kind) {
      case Kind::barrier:
        return core_.await_all(work_);
      case Kind::all_reduce:
        return all_reduce();
      case Kind::reduce:
        return reduce_to_root();
      case Kind::reduce_scatter:
        return reduce_scatter();
      case Kind::all_gather:
        return all_gather();
      case Kind::broadcast:
        return broadcast();
      case Kind::gather:
        return gather();
      case Kind::scatter:
        return scatter();
      case Kind::all_to_all:
      case Kind::all_to_all_v:
        return all_to_all();
      default:
        throw Error("not a collective");
    }
  }

 private:
  struct Range {
    std::size_t at, count;
  };
  using Pieces = std::vector<Piece>;

  int host_of(int rank) const { return place_.host[static_cast<std::size_t>(rank)]; }
  int local_of(int rank) const { return place_.local[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& ranks_on(int host) const { return place_.hosts[static_cast<std::size_t>(host)]; }
  int owner(int host, int slice) const { return ranks_on(host)[static_cast<std::size_t>(slice)]; }
  // Who on `host` stands for `rank`: itself, or its relay.
  int relay(int rank, int host) const {
    const auto& ranks = ranks_on(host);
    return host_of(rank) == host ? rank : ranks[static_cast<std::size_t>(local_of(rank)) % ranks.size()];
  }
  bool near(int rank) const { return host_of(rank) == host_; }
  // The other hosts, beginning behind this one, so that not all send to one at a time.
  std::vector<int> others() const {
    std::vector<int> all;
    for (int i = 1; i < hosts_; ++i) all.push_back((host_ + i) % hosts_);
    return all;
  }
  // Part `i` of `n` of `whole`, with borders at 64 bytes of `item`.
  static Range part(Range whole, int i, int n, std::size_t item) {
    const std::size_t line = std::max<std::size_t>(1, 64 / item), parts = static_cast<std::size_t>(n);
    const std::size_t most = ((whole.count + parts - 1) / parts + line - 1) / line * line;
    const std::size_t lo = std::min(whole.count, static_cast<std::size_t>(i) * most);
    return {whole.at + lo, std::min(most, whole.count - lo)};
  }
  Range slice(int k) const { return part({0, r_.count}, k, slices_, item_); }

  void inside(const SpanCore::InnerCall& issue) {
    if (inner_ != nullptr) core_.inside(work_, issue);
  }
  void broadcast_inside(const std::vector<std::pair<int, Range>>& runs) {
    inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (const auto& [root, run] : runs) {
        if (run.count == 0) continue;
        works.push_back(inner_->broadcast(out_ + run.at * item_, run.count, r_.dtype, root, options));
      }
      return works;
    });
  }

  // This rank's slice, reduced inside the host: in `*space`, or in the input where the host has one rank.
  const char* reduce_slices(const Numbers& numbers, Buffer* wide, Buffer* space) {
    const char* in = numbers.widen(in_, r_.count, wide);
    const Range mine = local_ < slices_ ? slice(local_) : Range{0, 0};
    if (inner_ == nullptr) return in + mine.at * numbers.item();
    space->resize(mine.count * numbers.item());
    inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (int k = 0; k < slices_; ++k) {
        const Range run = slice(k);
        if (run.count == 0) continue;
        works.push_back(inner_->reduce(in + run.at * numbers.item(), k == local_ ? space->data() : nullptr, run.count,
                                       numbers.sum, numbers.op, k, options));
      }
      return works;
    });
    return space->data();
  }

  void all_reduce() {
    const Numbers numbers(r_, place_);
    Buffer wide, space;
    const char* partial = reduce_slices(numbers, &wide, &space);
    if (local_ < slices_ && slice(local_).count > 0) {
      const Range mine = slice(local_);
      char* result = out_ + mine.at * item_;
      if (hosts_ == 2 && numbers.sum == numbers.own) {
        exchange_whole(numbers, partial, mine.count, result);
      } else {
        exchange_parts(numbers, partial, mine.count, result);
      }
    }
    std::vector<std::pair<int, Range>> runs;
    for (int k = 0; k < slices_; ++k) runs.emplace_back(k, slice(k));
    broadcast_inside(runs);
  }

  // Two hosts: each sends its partial result whole and both finish it: as many bytes as in parts, in one step.
  void exchange_whole(const Numbers& numbers, const char* partial, std::size_t count, char* result) {
    Buffer theirs(count * numbers.item());
    const int peer = owner(1 - host_, local_);
    core_.exchange(work_, {{peer, const_cast<char*>(partial), theirs.size()}}, {{peer, theirs.data(), theirs.size()}});
    std::vector<const void*> inputs{partial, theirs.data()};
    if (host_ == 1) std::swap(inputs[0], inputs[1]);
    numbers.finish(inputs, result, count);
  }

  void exchange_parts(const Numbers& numbers, const char* partial, std::size_t count, char* result) {
    const auto run = [&](int host) { return part({0, count}, host, hosts_, item_); };
    const std::size_t item = numbers.item(), own = run(host_).count;
    Buffer theirs(own * item * static_cast<std::size_t>(hosts_));
    Pieces out, in;
    std::vector<const void*> inputs(static_cast<std::size_t>(hosts_), partial + run(host_).at * item);
    for (int h : others()) {
      const auto i = static_cast<std::size_t>(h);
      out.push_back({owner(h, local_), const_cast<char*>(partial) + run(h).at * item, run(h).count * item});
      in.push_back({owner(h, local_), theirs.data() + i * own * item, own * item});
      inputs[i] = in.back().data;
    }
    core_.exchange(work_, out, in);
    char* mine = result + run(host_).at * item_;
    numbers.finish(inputs, mine, own);
    out.clear();
    in.clear();
    for (int h : others()) {
      out.push_back({owner(h, local_), mine, own * item_});
      in.push_back({owner(h, local_), result + run(h).at * item_, run(h).count * item_});
    }
    core_.exchange(work_, out, in);
  }

  void reduce_to_root() {
    const Numbers numbers(r_, place_);
    const int root_host = host_of(r_.root);
    Buffer wide, space, result;
    const char* partial = reduce_slices(numbers, &wide, &space);
    const Range mine = local_ < slices_ ? slice(local_) : Range{0, 0};
    const std::size_t bytes = mine.count * numbers.item();
    if (bytes > 0 && host_ != root_host) {
      core_.exchange(work_, {{owner(root_host, local_), const_cast<char*>(partial), bytes}}, {});
    }
    if (host_ != root_host) return;
    if (bytes > 0) {
      Buffer theirs(bytes * static_cast<std::size_t>(hosts_));
      Pieces in;
      std::vector<const void*> inputs(static_cast<std::size_t>(hosts_), partial);
      for (int h : others()) {
        in.push_back({owner(h, local_), theirs.data() + static_cast<std::size_t>(h) * bytes, bytes});
        inputs[static_cast<std::size_t>(h)] = in.back().data;
      }
      core_.exchange(work_, {}, in);
      result.resize(mine.count * item_);
      numbers.finish(inputs, result.data(), mine.count);
    }
    if (inner_ == nullptr) return copy(out_, result.data(), result.size());
    // The slices meet at the root.
    std::vector<std::size_t> sends(static_cast<std::size_t>(locals_), 0), receives(sends), zeros(sends), offsets(sends);
    sends[static_cast<std::size_t>(local_of(r_.root))] = mine.count;
    for (int k = 0; k < slices_ && me_ == r_.root; ++k) {
      receives[static_cast<std::size_t>(k)] = slice(k).count;
      offsets[static_cast<std::size_t>(k)] = slice(k).at;
    }
    inside([&](const CallOptions& options) {
      return std::vector<WorkPtr>{
          inner_->all_to_all_v(result.data(), sends, zeros, out_, receives, offsets, r_.dtype, options)};
    });
  }

  void reduce_scatter() {
    const Numbers numbers(r_, place_);
    Buffer wide;
    const char* in = numbers.widen(in_, r_.count * place_.wire.size(), &wide);
    const std::size_t bytes = r_.count * numbers.item();
    std::vector<Buffer> space(place_.wire.size());  // the parts that end here, or pass through
    std::vector<const char*> partial(place_.wire.size(), nullptr);
    for (int q = 0; q < core_.size(); ++q) {
      const auto i = static_cast<std::size_t>(q);
      if (relay(q, host_) != me_) continue;
      if (inner_ != nullptr) space[i].resize(bytes);
      partial[i] = inner_ != nullptr ? space[i].data() : in + i * bytes;
    }
    if (r_.count == 0) return;
    inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (int q = 0; q < core_.size(); ++q) {
        const auto i = static_cast<std::size_t>(q);
        const int root = relay(q, host_);
        works.push_back(inner_->reduce(in + i * bytes, root == me_ ? space[i].data() : nullptr, r_.count, numbers.sum,
                                       numbers.op, local_of(root), options));
      }
      return works;
    });
    Pieces out, from;
    Buffer theirs(bytes * static_cast<std::size_t>(hosts_));
    std::vector<const void*> inputs(static_cast<std::size_t>(hosts_), partial[static_cast<std::size_t>(me_)]);
    for (int h : others()) {
      for (int q : ranks_on(h)) {
        if (relay(q, host_) == me_) out.push_back({q, const_cast<char*>(partial[static_cast<std::size_t>(q)]), bytes});
      }
      from.push_back({relay(me_, h), theirs.data() + static_cast<std::size_t>(h) * bytes, bytes});
      inputs[static_cast<std::size_t>(h)] = from.back().data;
    }
    core_.exchange(work_, out, from);
    numbers.finish(inputs, out_, r_.count);
  }

  void all_gather() {
    const std::size_t bytes = r_.count * item_;
    const auto at = [&](int rank) { return out_ + static_cast<std::size_t>(rank) * bytes; };
    copy(at(me_), in_, bytes);
    if (bytes == 0) return;
    Pieces out, in;
    for (int h : others()) {
      out.push_back({relay(me_, h), at(me_), bytes});
      for (int q : ranks_on(h)) {
        if (relay(q, host_) == me_) in.push_back({q, at(q), bytes});
      }
    }
    core_.exchange(work_, out, in);
    std::vector<std::pair<int, Range>> runs;
    for (int q = 0; q < core_.size(); ++q) {
      runs.emplace_back(local_of(relay(q, host_)), Range{static_cast<std::size_t>(q) * r_.count, r_.count});
    }
    broadcast_inside(runs);
  }

  void broadcast() {
    constexpr std::size_t kChunk = 256 * 1024;
    const int root_host = host_of(r_.root);
    if (host_ == root_host) broadcast_inside({{local_of(r_.root), Range{0, r_.count}}});
    if (local_ < slices_) {
      const Range mine = slice(local_);
      char* data = out_ + mine.at * item_;
      const std::size_t bytes = mine.count * item_;
      const bool last = (host_ + 1) % hosts_ == root_host;
      const int next = owner((host_ + 1) % hosts_, local_), previous = owner((host_ + hosts_ - 1) % hosts_, local_);
      for (std::size_t lo = 0; lo < bytes; lo += kChunk) {
        const std::size_t n = std::min(kChunk, bytes - lo);
        if (host_ != root_host) core_.exchange(work_, {}, {{previous, data + lo, n}});
        if (!last) core_.exchange(work_, {{next, data + lo, n}}, {});
      }
    }
    if (host_ == root_host) return;
    std::vector<std::pair<int, Range>> runs;
    for (int k = 0; k < slices_; ++k) runs.emplace_back(k, slice(k));
    broadcast_inside(runs);
  }

  void gather() {
    const std::size_t bytes = r_.count * item_;
    Sizes sizes(core_.size());
    if (me_ == r_.root) {
      for (int q = 0; q < core_.size(); ++q) sizes.receive(q, static_cast<std::size_t>(q) * bytes, bytes);
    }
    sizes.send(r_.root, 0, bytes);
    move(sizes);
  }

  void scatter() {
    const std::size_t bytes = r_.count * item_;
    Sizes sizes(core_.size());
    if (me_ == r_.root) {
      for (int q = 0; q < core_.size(); ++q) sizes.send(q, static_cast<std::size_t>(q) * bytes, bytes);
    }
    sizes.receive(r_.root, 0, bytes);
    move(sizes);
  }

  void all_to_all() {
    Sizes sizes(core_.size());
    const std::size_t bytes = r_.count * item_;
    for (int q = 0; q < core_.size(); ++q) {
      const auto i = static_cast<std::size_t>(q);
      if (r_.kind == Kind::all_to_all) {
        sizes.send(q, i * bytes, bytes);
        sizes.receive(q, i * bytes, bytes);
      } else {
        sizes.send(q, r_.send_offsets[i], r_.send_bytes[i]);
        sizes.receive(q, r_.recv_offsets[i], r_.recv_bytes[i]);
      }
    }
    move(sizes);
  }

  // What goes from and comes to this rank, in bytes, by peer.
  struct Sizes {
    explicit Sizes(int n) : sent(static_cast<std::size_t>(n), Range{0, 0}), received(sent) {}
    void send(int to, std::size_t at, std::size_t bytes) { sent[static_cast<std::size_t>(to)] = {at, bytes}; }
    void receive(int from, std::size_t at, std::size_t bytes) {
      received[static_cast<std::size_t>(from)] = {at, bytes};
    }
    std::vector<Range> sent, received;
  };

  void move(const Sizes& sizes) {
    const auto self = static_cast<std::size_t>(me_);
    if (inner_ == nullptr && sizes.received[self].count > 0) {
      copy(out_ + sizes.received[self].at, in_ + sizes.sent[self].at, sizes.received[self].count);
    }
    inside([&](const CallOptions& options) {
      std::vector<std::size_t> counts[4];
      for (int q : ranks_on(host_)) {
        const auto i = static_cast<std::size_t>(q);
        counts[0].push_back(sizes.sent[i].count);
        counts[1].push_back(sizes.sent[i].at);
        counts[2].push_back(sizes.received[i].count);
        counts[3].push_back(sizes.received[i].at);
      }
      return std::vector<WorkPtr>{
          inner_->all_to_all_v(in_, counts[0], counts[1], out_, counts[2], counts[3], DType::uint8, options)};
    });
    Pieces out, in;
    for (int h : others()) {
      for (int q : ranks_on(h)) {
        const Range to = sizes.sent[static_cast<std::size_t>(q)], from = sizes.received[static_cast<std::size_t>(q)];
        if (to.count > 0) out.push_back({q, const_cast<char*>(in_) + to.at, to.count});
        if (from.count > 0) in.push_back({q, out_ + from.at, from.count});
      }
    }
    core_.exchange(work_, out, in);
  }

  SpanCore& core_;
  const SpanWork& work_;
  const Request& r_;
  const Place& place_;
  Communicator* const inner_;
  const int hosts_, me_, host_, local_, locals_;
  const std::size_t item_;
  const char* const in_;
  char* const out_;
  int slices_ = 1;
};

}  // namespace

void run_collective(SpanCore& core, const SpanWork& work) { Collective(core, work).run(); }

}  // namespace axo::span

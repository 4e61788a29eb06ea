// The collectives of a communicator that spans hosts: shared memory inside a host, the fewest bytes between hosts.
//
// H hosts; K the fewest ranks on a host. A message is cut into parts, each with an owner; on every other host the rank
// with the owner's number there (modulo that host's ranks) stands for it. N bytes, n a rank's part.
//   operation       parts and owners                      steps                           leaves a host, in bytes
//   all_reduce      K slices, an H-th of each a host      reduce, spread                  2 (H-1)/H N
//                   (two hosts: both own a whole slice)   (two hosts: reduce, broadcast)
//   reduce          all: the root                         reduce                          N
//   reduce_scatter  a part a rank                         reduce                          the parts of the other hosts
//   all_gather      a part a rank                         spread                          (H-1) n a rank
//   broadcast       K slices go from host to host in chunks, then a broadcast inside      N
//   gather, scatter, all_to_all(_v)   each part goes straight from rank to rank           what must
//   barrier         everybody's `begin`
// reduce: each part is reduced inside a host to who stands for the owner; they send; the owner finishes.
// spread: the owner sends to who stands for it; they broadcast inside their hosts.
//
// Gloo's own collectives are not used: their sums are in another order for each part, they take turns in one queue for
// all communicators of a process, and none of them can be ended before its time limit.
// In what sums add up stands in memory/partial_sums.h.
#include <algorithm>
#include <cstring>
#include <limits>

#include "hosts/core.h"
#include "memory/partial_sums.h"

namespace axo::hosts {
namespace {

void copy(char* to, const char* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

// A run of elements, and the ranks that finish or hold it, at most one on a host.
struct Part {
  std::size_t at, count;
  std::vector<int> owners;
};
using Parts = std::vector<Part>;

class Collective {
 public:
  Collective(HostsCore& core, const Request& request)
      : core_(core),
        r_(request),
        map_(core.membership().map),
        inner_(core.membership().inner.get()),
        hosts_(static_cast<int>(map_.hosts.size())),
        me_(core.rank()),
        host_(map_.host_of(me_)),
        local_(map_.local_of(me_)),
        item_(item_size(r_.dtype)),
        in_(static_cast<const char*>(r_.in)),
        out_(static_cast<char*>(r_.out)) {
    for (const auto& ranks : map_.hosts) slices_ = std::min(slices_, static_cast<int>(ranks.size()));
  }

  void run() {
    const PartialSums numbers(r_.dtype, r_.op, core_.size(), hosts_ == core_.size());
    switch (r_.kind) {
      case Kind::barrier:
        return core_.begin();
      case Kind::all_reduce:
        return reduce(numbers, slices(hosts_ == 2 && numbers.sum == numbers.own), true);
      case Kind::reduce:
        return reduce(numbers, {{0, r_.count, {r_.root}}}, false);
      case Kind::reduce_scatter:
        return reduce(numbers, ranks(), false);
      case Kind::all_gather:
        copy(out_ + static_cast<std::size_t>(me_) * r_.bytes(), in_, r_.bytes());
        return spread(ranks());
      case Kind::broadcast:
        return broadcast();
      default:
        return move(moves());
    }
  }

 private:
  const std::vector<int>& ranks_on(int host) const { return map_.ranks_on(host); }
  int owner(int host, int slice) const { return ranks_on(host)[static_cast<std::size_t>(slice)]; }
  bool near(int rank) const { return map_.host_of(rank) == host_; }
  // The other hosts, beginning behind this one, so that not all send to one at a time.
  std::vector<int> others() const {
    std::vector<int> all;
    for (int i = 1; i < hosts_; ++i) all.push_back((host_ + i) % hosts_);
    return all;
  }
  // Who on `host` owns the part, or stands for its owner.
  int stands(const Part& part, int host) const {
    for (int o : part.owners) {
      if (map_.host_of(o) == host) return o;
    }
    return ranks_on(host)[static_cast<std::size_t>(map_.local_of(part.owners[0])) % ranks_on(host).size()];
  }
  bool owned(const Part& part) const { return std::count(part.owners.begin(), part.owners.end(), me_) != 0; }

  // Part `i` of `n` of a run, with borders at 64 bytes.
  Part cut(const Part& whole, int i, int n) const {
    const std::size_t line = std::max<std::size_t>(1, 64 / item_), parts = static_cast<std::size_t>(n);
    const std::size_t most = ((whole.count + parts - 1) / parts + line - 1) / line * line;
    const std::size_t lo = std::min(whole.count, static_cast<std::size_t>(i) * most);
    return {whole.at + lo, std::min(most, whole.count - lo), {}};
  }
  Part slice(int k) const { return cut({0, r_.count, {}}, k, slices_); }
  Parts slices(bool all_own) const {
    Parts parts;
    for (int k = 0; k < slices_; ++k) {
      if (all_own) parts.push_back(slice(k));
      for (int h = 0; h < hosts_; ++h) {
        if (!all_own) parts.push_back(cut(slice(k), h, hosts_));
        parts.back().owners.push_back(owner(h, k));
      }
    }
    return parts;
  }
  Parts ranks() const {
    Parts parts;
    for (int q = 0; q < core_.size(); ++q) parts.push_back({static_cast<std::size_t>(q) * r_.count, r_.count, {q}});
    return parts;
  }
  // Adjacent parts of one rank of this host as one, without empty ones; the owner is who stands for them here.
  Parts merged(const Parts& parts) const {
    Parts runs;
    for (const Part& p : parts) {
      const int here = stands(p, host_);
      if (p.count == 0) continue;
      if (!runs.empty() && runs.back().owners[0] == here && runs.back().at + runs.back().count == p.at) {
        runs.back().count += p.count;
      } else {
        runs.push_back({p.at, p.count, {here}});
      }
    }
    return runs;
  }

  void inside(const std::function<std::vector<WorkPtr>(const CallOptions&)>& issue) {
    if (inner_ != nullptr) core_.inside(issue);
  }
  void broadcast_inside(const Parts& parts) {
    inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (const Part& p : merged(parts)) {
        works.push_back(inner_->broadcast(out_ + p.at * item_, p.count, r_.dtype, map_.local_of(p.owners[0]), options));
      }
      return works;
    });
  }

  // The sum of each part at its owners, and with `all` everywhere.
  void reduce(const PartialSums& numbers, const Parts& parts, bool all) {
    const std::size_t item = numbers.item();
    Pieces sums;
    std::vector<std::vector<const void*>> inputs(parts.size());  // of the parts that this rank owns, by host
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!owned(parts[i])) continue;
      inputs[i].resize(static_cast<std::size_t>(hosts_));
      for (int h : others()) {
        char* sum = core_.scratch(parts[i].count * item);
        inputs[i][static_cast<std::size_t>(h)] = sum;
        sums.push_back(core_.expect(stands(parts[i], h), sum, parts[i].count * item));
      }
    }
    const auto results = all ? expect_parts(parts) : Pieces{};
    core_.begin();

    const char* in = in_;
    if (numbers.sum != numbers.own) {
      const std::size_t count = parts.back().at + parts.back().count;
      char* wide = core_.scratch(count * item);
      numbers.widen(in_, wide, count);
      in = wide;
    }
    const std::vector<const char*> partial = reduce_inside(numbers, parts, in);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      for (int o : parts[i].owners) {
        if (!near(o) && partial[i] != nullptr) sums.push_back(core_.send(o, partial[i], parts[i].count * item));
      }
    }
    core_.await(sums);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (inputs[i].empty() || parts[i].count == 0) continue;
      inputs[i][static_cast<std::size_t>(host_)] = partial[i];
      numbers.finish(inputs[i], all ? out_ + parts[i].at * item_ : out_, parts[i].count);
    }
    if (all) spread_parts(parts, results);
  }

  // This host's sum of each part that this rank stands for; null for the others.
  std::vector<const char*> reduce_inside(const PartialSums& numbers, const Parts& parts, const char* in) {
    const std::size_t item = numbers.item();
    std::vector<const char*> partial;
    for (const Part& p : parts) partial.push_back(stands(p, host_) == me_ ? in + p.at * item : nullptr);
    inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (const Part& run : merged(parts)) {
        const int root = run.owners[0];
        char* sum = root == me_ ? core_.scratch(run.count * item) : nullptr;
        works.push_back(
            inner_->reduce(in + run.at * item, sum, run.count, numbers.sum, numbers.op, map_.local_of(root), options));
        for (std::size_t i = 0; i < parts.size() && root == me_; ++i) {
          if (parts[i].at >= run.at && parts[i].at < run.at + run.count)
            partial[i] = sum + (parts[i].at - run.at) * item;
        }
      }
      return works;
    });
    return partial;
  }

  // Each part from its owner to all ranks.
  void spread(const Parts& parts) {
    const Pieces in = expect_parts(parts);
    core_.begin();
    spread_parts(parts, in);
  }
  Pieces expect_parts(const Parts& parts) {
    Pieces in;
    for (const Part& p : parts) {
      const int here = stands(p, host_);
      if (here == me_ && !owned(p)) in.push_back(core_.expect(p.owners[0], out_ + p.at * item_, p.count * item_));
    }
    return in;
  }
  void spread_parts(const Parts& parts, Pieces pieces) {
    for (const Part& p : parts) {
      if (p.owners.size() > 1 || !owned(p)) continue;
      for (int h : others()) pieces.push_back(core_.send(stands(p, h), out_ + p.at * item_, p.count * item_));
    }
    core_.await(pieces);
    broadcast_inside(parts);
  }

  void broadcast() {
    constexpr std::size_t kChunk = 256 * 1024;
    const int root_host = map_.host_of(r_.root);
    const bool passes = local_ < slices_, last = (host_ + 1) % hosts_ == root_host;
    const Part mine = passes ? slice(local_) : Part{0, 0, {}};
    char* data = out_ + mine.at * item_;
    const std::size_t bytes = mine.count * item_;
    Pieces in, out;
    for (std::size_t lo = 0; lo < bytes && host_ != root_host; lo += kChunk) {
      in.push_back(core_.expect(owner((host_ + hosts_ - 1) % hosts_, local_), data + lo, std::min(kChunk, bytes - lo)));
    }
    core_.begin();
    if (host_ == root_host) broadcast_inside({{0, r_.count, {r_.root}}});
    for (std::size_t lo = 0; lo < bytes; lo += kChunk) {
      if (host_ != root_host) core_.await({in[lo / kChunk]});
      if (!last)
        out.push_back(core_.send(owner((host_ + 1) % hosts_, local_), data + lo, std::min(kChunk, bytes - lo)));
    }
    core_.await(out);
    if (host_ == root_host) return;
    Parts parts;
    for (int k = 0; k < slices_; ++k) {
      parts.push_back(slice(k));
      parts.back().owners = {owner(host_, k)};
    }
    broadcast_inside(parts);
  }

  // The request as one that says what goes to and comes from each rank, in bytes.
  Request moves() const {
    Request m = r_;
    if (r_.kind == Kind::all_to_all_v) return m;
    const bool gather = r_.kind == Kind::gather, scatter = r_.kind == Kind::scatter;
    for (int q = 0; q < core_.size(); ++q) {
      const bool sends = gather ? q == r_.root : me_ == r_.root || !scatter;
      const bool receives = scatter ? q == r_.root : me_ == r_.root || !gather;
      m.send_bytes.push_back(sends ? r_.bytes() : 0);
      m.send_offsets.push_back(gather ? 0 : static_cast<std::size_t>(q) * r_.bytes());
      m.recv_bytes.push_back(receives ? r_.bytes() : 0);
      m.recv_offsets.push_back(scatter ? 0 : static_cast<std::size_t>(q) * r_.bytes());
    }
    return m;
  }

  void move(const Request& m) {
    std::vector<std::size_t> far;  // the ranks of other hosts
    for (int h : others()) far.insert(far.end(), ranks_on(h).begin(), ranks_on(h).end());
    const char* from = in_;
    if (in_ == out_ && (r_.kind == Kind::all_to_all || r_.kind == Kind::all_to_all_v)) {
      std::size_t bytes = 0;  // a part may come before the one that lies in its place has left
      for (std::size_t q = 0; q < m.send_bytes.size(); ++q)
        bytes = std::max(bytes, m.send_offsets[q] + m.send_bytes[q]);
      char* apart = core_.scratch(bytes);
      copy(apart, in_, bytes);
      from = apart;
    }
    Pieces pieces;
    for (std::size_t q : far) {
      pieces.push_back(core_.expect(static_cast<int>(q), out_ + m.recv_offsets[q], m.recv_bytes[q]));
    }
    core_.begin();
    for (std::size_t q : far) {
      pieces.push_back(core_.send(static_cast<int>(q), from + m.send_offsets[q], m.send_bytes[q]));
    }
    const auto self = static_cast<std::size_t>(me_);
    if (inner_ == nullptr) copy(out_ + m.recv_offsets[self], from + m.send_offsets[self], m.recv_bytes[self]);
    const auto here = [&](const std::vector<std::size_t>& all) {
      std::vector<std::size_t> some;
      for (int q : ranks_on(host_)) some.push_back(all[static_cast<std::size_t>(q)]);
      return some;
    };
    inside([&](const CallOptions& options) {
      return std::vector<WorkPtr>{inner_->all_to_all_v(from, here(m.send_bytes), here(m.send_offsets), out_,
                                                       here(m.recv_bytes), here(m.recv_offsets), DType::uint8,
                                                       options)};
    });
    core_.await(pieces);
  }

  HostsCore& core_;
  const Request& r_;
  const HostMap& map_;
  Communicator* const inner_;
  const int hosts_, me_, host_, local_;
  const std::size_t item_;
  const char* const in_;
  char* const out_;
  int slices_ = std::numeric_limits<int>::max();
};

}  // namespace

void run_collective(HostsCore& core, const Request& request) { Collective(core, request).run(); }

}  // namespace axo::hosts

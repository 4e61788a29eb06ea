// The collectives of a communicator that spans hosts: shared memory inside a host, the fewest bytes between hosts.
//
// H hosts; K the fewest ranks on a host. A message is cut into parts. On each host one rank stands for a part: its
// owner, or else the rank with the owner's number there (modulo that host's ranks). N bytes, n a rank's part.
//   operation       parts and owners                      steps                           leaves a host, in bytes
//   all_reduce      K slices, an H-th of each a host      reduce, spread                  2 (H-1)/H N
//                   (two hosts: both own a whole slice)   (two hosts: reduce, broadcast)
//   reduce          all: the root                         reduce                          N
//   reduce_scatter  a part a rank                         reduce                          the parts of the other hosts
//   all_gather      a part a rank                         spread                          (H-1) n a rank
//   broadcast       K slices go from host to host in chunks, then a broadcast inside      N
//   gather, scatter, all_to_all(_v)   each part goes straight from rank to rank           what must
//   barrier         everybody's `begin`
// reduce: each part is reduced inside a host to who stands for it; they exchange what they own, and the owner finishes.
// spread: who stands for a part gets it from its owners, and broadcasts it inside the host.
//
// In what sums add up stands in memory/partial_sums.h.
#include <algorithm>

#include "hosts/core.h"
#include "memory/copy.h"
#include "memory/partial_sums.h"

namespace axo::hosts {
namespace {

// A run of elements.
struct Run {
  std::size_t at, count;
};

// Owner of a part: a host's number, or one of these.
constexpr int kEachCut = -1;  // each host owns an H-th of it
constexpr int kEachAll = -2;  // each host owns all of it

struct Part : Run {
  int owner, rank;  // `rank` stands for it on its own host
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
        item_(item_size(r_.dtype)),
        in_(static_cast<const char*>(r_.in)),
        out_(static_cast<char*>(r_.out)) {
    for (int i = 1; i < hosts_; ++i) others_.push_back((host_ + i) % hosts_);
  }

  void run() {
    const PartialSums numbers(r_.dtype, r_.op, core_.size(), hosts_ == core_.size());
    switch (r_.kind) {
      case Kind::barrier:
        return core_.begin();
      case Kind::all_reduce:
        return reduce(numbers, slices(hosts_ == 2 && numbers.sum == numbers.own ? kEachAll : kEachCut), true);
      case Kind::reduce:
        return reduce(numbers, {part({0, r_.count}, r_.root)}, false);
      case Kind::reduce_scatter:
        return reduce(numbers, ranks(), false);
      case Kind::all_gather:
        copy(out_ + static_cast<std::size_t>(me_) * r_.bytes(), in_, r_.bytes());
        return spread(ranks());
      case Kind::broadcast:
        return broadcast();
      default:
        return move(by_rank(r_, me_, core_.size()));
    }
  }

 private:
  // One that a rank owns.
  Part part(const Run& run, int rank) const { return {run, map_.host_of(rank), rank}; }
  Parts ranks() const {
    Parts parts;
    for (int q = 0; q < core_.size(); ++q) parts.push_back(part({static_cast<std::size_t>(q) * r_.count, r_.count}, q));
    return parts;
  }
  Parts slices(int owner) const {
    const auto fewest = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    const auto& least = *std::min_element(map_.hosts.begin(), map_.hosts.end(), fewest);
    Parts parts;
    for (std::size_t k = 0; k < least.size(); ++k) {
      parts.push_back({cut({0, r_.count}, k, least.size()), owner, least[k]});
    }
    return parts;
  }
  // Piece `i` of `n` of a run, with borders at 64 bytes.
  Run cut(const Run& whole, std::size_t i, std::size_t n) const {
    const std::size_t line = std::max<std::size_t>(1, 64 / item_);
    const std::size_t most = ((whole.count + n - 1) / n + line - 1) / line * line;
    const std::size_t lo = std::min(whole.count, i * most);
    return {whole.at + lo, std::min(most, whole.count - lo)};
  }
  // What `host` owns of a part.
  Run owned(const Part& p, int host) const {
    if (p.owner == kEachCut) return cut(p, static_cast<std::size_t>(host), static_cast<std::size_t>(hosts_));
    return {p.at, p.owner == host || p.owner == kEachAll ? p.count : 0};
  }
  int stands(const Part& p, int host) const {
    const auto& there = map_.ranks_on(host);
    return there[static_cast<std::size_t>(map_.local_of(p.rank)) % there.size()];
  }
  bool mine(const Part& p) const { return stands(p, host_) == me_; }

  // Calls `issue(i, local root, options)` inside the host for each part that is not empty.
  template <class Issue>
  void inside(const Parts& parts, const Issue& issue) {
    if (inner_ == nullptr) return;
    core_.inside([&](const CallOptions& options) {
      std::vector<WorkPtr> works;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].count != 0) works.push_back(issue(i, map_.local_of(stands(parts[i], host_)), options));
      }
      return works;
    });
  }
  void broadcast_inside(const Parts& parts) {
    inside(parts, [&](std::size_t i, int root, const CallOptions& options) {
      return inner_->broadcast(out_ + parts[i].at * item_, parts[i].count, r_.dtype, root, options);
    });
  }

  // The sum of each part at its owners, and with `all` everywhere.
  void reduce(const PartialSums& numbers, const Parts& parts, bool all) {
    const std::size_t item = numbers.item();
    Pieces pieces;
    std::vector<std::vector<const void*>> inputs(parts.size());  // of what I own of the parts that are mine, by host
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!mine(parts[i])) continue;
      inputs[i].resize(static_cast<std::size_t>(hosts_));
      const std::size_t bytes = owned(parts[i], host_).count * item;
      for (int h : others_) {
        char* sum = core_.scratch(bytes);
        inputs[i][static_cast<std::size_t>(h)] = sum;
        pieces.push_back(core_.expect(stands(parts[i], h), sum, bytes));
      }
    }
    const Pieces results = all ? expect_owned(parts) : Pieces{};
    core_.begin();

    const char* in = in_;
    if (numbers.sum != numbers.own) {
      const std::size_t count = parts.back().at + parts.back().count;
      char* wide = core_.scratch(count * item);
      numbers.widen(in_, wide, count);
      in = wide;
    }
    std::vector<const char*> partial;  // this host's sum of each part that is mine
    for (const Part& p : parts) partial.push_back(in + p.at * item);
    inside(parts, [&](std::size_t i, int root, const CallOptions& options) {
      const Part& p = parts[i];
      char* sum = mine(p) ? core_.scratch(p.count * item) : nullptr;
      const char* from = std::exchange(partial[i], sum);
      return inner_->reduce(from, sum, p.count, numbers.sum, numbers.op, root, options);
    });
    // Where what `host` owns begins in this host's sum of part i.
    const auto sum_for = [&](std::size_t i, int host) {
      return partial[i] + (owned(parts[i], host).at - parts[i].at) * item;
    };
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!mine(parts[i])) continue;
      for (int h : others_) {
        pieces.push_back(core_.send(stands(parts[i], h), sum_for(i, h), owned(parts[i], h).count * item));
      }
    }
    core_.await(pieces);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Run own = owned(parts[i], host_);
      if (!mine(parts[i]) || own.count == 0) continue;
      inputs[i][static_cast<std::size_t>(host_)] = sum_for(i, host_);
      numbers.finish(inputs[i], all ? out_ + own.at * item_ : out_, own.count);
    }
    if (all) spread_owned(parts, results);
  }

  // Each part from its owner to all ranks.
  void spread(const Parts& parts) {
    const Pieces in = expect_owned(parts);
    core_.begin();
    spread_owned(parts, in);
  }
  Pieces expect_owned(const Parts& parts) {
    Pieces in;
    for (const Part& p : parts) {
      if (!mine(p) || p.owner == kEachAll) continue;
      for (int h : others_) {
        const Run run = owned(p, h);
        in.push_back(core_.expect(stands(p, h), out_ + run.at * item_, run.count * item_));
      }
    }
    return in;
  }
  void spread_owned(const Parts& parts, Pieces pieces) {
    for (const Part& p : parts) {
      if (!mine(p) || p.owner == kEachAll) continue;
      const Run run = owned(p, host_);
      for (int h : others_) pieces.push_back(core_.send(stands(p, h), out_ + run.at * item_, run.count * item_));
    }
    core_.await(pieces);
    broadcast_inside(parts);
  }

  // From host to host: a chunk goes on while the next one comes.
  void broadcast() {
    const std::size_t most = hosts_ == 2 ? r_.bytes() : 256 * 1024;  // of two hosts none passes on what comes
    const int root_host = map_.host_of(r_.root), before = (host_ + hosts_ - 1) % hosts_, next = (host_ + 1) % hosts_;
    const bool first = host_ == root_host, last = next == root_host;
    const Parts parts = slices(root_host);
    // At most one is mine: no host has fewer ranks than there are slices.
    const auto found = std::find_if(parts.begin(), parts.end(), [this](const Part& p) { return mine(p); });
    const Part own = found == parts.end() ? Part{} : *found;
    char* const data = out_ + own.at * item_;
    const std::size_t bytes = own.count * item_;
    Pieces in, out;
    for (std::size_t at = 0; at < bytes && !first; at += most) {
      in.push_back(core_.expect(stands(own, before), data + at, std::min(most, bytes - at)));
    }
    core_.begin();
    if (first) broadcast_inside({part({0, r_.count}, r_.root)});
    for (std::size_t at = 0; at < bytes; at += most) {
      if (!first) core_.await({in[at / most]});
      if (!last) out.push_back(core_.send(stands(own, next), data + at, std::min(most, bytes - at)));
    }
    core_.await(out);
    if (!first) broadcast_inside(parts);
  }

  void move(const Request& m) {
    const char* from = in_;
    if (in_ == out_ && (r_.kind == Kind::all_to_all || r_.kind == Kind::all_to_all_v)) {
      char* apart = core_.scratch(m.sent_bytes());  // a part may come before the one that lies in its place has left
      copy(apart, in_, m.sent_bytes());
      from = apart;
    }
    // Calls f(rank, its index) for the ranks of the other hosts.
    const auto far = [&](const auto& f) {
      for (int h : others_) {
        for (int q : map_.ranks_on(h)) f(q, static_cast<std::size_t>(q));
      }
    };
    Pieces pieces;
    far([&](int q, auto i) { pieces.push_back(core_.expect(q, out_ + m.recv_offsets[i], m.recv_bytes[i])); });
    core_.begin();
    far([&](int q, auto i) { pieces.push_back(core_.send(q, from + m.send_offsets[i], m.send_bytes[i])); });
    const auto self = static_cast<std::size_t>(me_);
    if (inner_ == nullptr) {
      copy(out_ + m.recv_offsets[self], from + m.send_offsets[self], m.recv_bytes[self]);
    } else {
      const auto here = [&](const std::vector<std::size_t>& all) {
        std::vector<std::size_t> some;
        for (int q : map_.ranks_on(host_)) some.push_back(all[static_cast<std::size_t>(q)]);
        return some;
      };
      core_.inside([&](const CallOptions& options) {
        return std::vector<WorkPtr>{inner_->all_to_all_v(from, here(m.send_bytes), here(m.send_offsets), out_,
                                                         here(m.recv_bytes), here(m.recv_offsets), DType::uint8,
                                                         options)};
      });
    }
    core_.await(pieces);
  }

  HostsCore& core_;
  const Request& r_;
  const HostMap& map_;
  Communicator* const inner_;
  const int hosts_, me_, host_;
  std::vector<int> others_;  // the other hosts, beginning behind this one, so that not all send to one at a time
  const std::size_t item_;
  const char* const in_;
  char* const out_;
};

}  // namespace

void run_collective(HostsCore& core, const Request& request) { Collective(core, request).run(); }

}  // namespace axo::hosts

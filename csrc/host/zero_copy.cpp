// Collectives whose buffers lie in the heaps of memory/shared_buffers.h: no stages.
//
//   operation       shared on                  combine                                       bytes moved (2 ranks)
//   all_reduce      all ranks, in and out      reduce my part of all inputs, write it to     4 a byte
//                                              all outputs
//   reduce_scatter  all ranks, in              reduce my part of all inputs to my output
//   all_gather      all ranks, in              copy all inputs to my output
//   broadcast       the root                   copy the root's data
//
// Ranks begin when all have issued (their inputs are ready) and end when all have combined (nobody reads my input any
// more). Copies allow overlap: a peer that is wrong about its offsets must not cause undefined behaviour here. The cut
// is another one than with stages, but every element is still reduced once, in rank order: the same bits.
#include <algorithm>
#include <array>
#include <cstring>

#include "host/core.h"
#include "memory/copy.h"
#include "memory/reduce.h"

namespace axo::host {
namespace {

constexpr std::size_t kSmallest = 32 * 1024;  // below this a stage costs less than the second wait
constexpr std::size_t kPiece = 256 * 1024;    // of one part, in one round: the gate is held no longer

void place(char* to, const char* from, std::size_t bytes, bool streams) {
  if (to == from) return;  // in place: peers read it now
  if (to < from + bytes && from < to + bytes) {
    std::memmove(to, from, bytes);
  } else {
    streams ? stream(to, from, bytes) : copy(to, from, bytes);
  }
}

}  // namespace

// Says in the header which of my buffers the peers can reach. Whether stages can be left out is decided by the headers
// of all, so a rank that offers its buffers must not stage before it has seen them.
void Rounds::offer_buffers(CollectiveHeader& header) {
  const Request& r = work_->request;
  const int n = core_.size();
  if (n == 1 || r.bytes() < kSmallest) return;
  const auto& processes = core_.processes();
  if (std::any_of(processes.begin(), processes.end(), [](const auto& p) { return p->heap() == nullptr; })) return;
  const auto parts = static_cast<std::size_t>(n);
  std::size_t in_bytes = r.bytes();
  std::uint32_t wanted = kSharedIn;
  switch (r.kind) {
    case Kind::all_reduce:
      wanted = kSharedIn | kSharedOut;
      break;
    case Kind::reduce_scatter:
      in_bytes *= parts;
      break;
    case Kind::all_gather:
      break;
    case Kind::broadcast:
      if (core_.rank() != r.root) wanted = 0;
      break;
    default:
      return;
  }
  header.shared = kMapsHeaps;
  SharedHeap& heap = core_.engine().heap();
  if ((wanted & kSharedIn) && heap.find(r.in, in_bytes, &header.in_offset)) header.shared |= kSharedIn;
  if ((wanted & kSharedOut) && heap.find(r.out, r.bytes(), &header.out_offset)) header.shared |= kSharedOut;
  offered_ = (header.shared & wanted) == wanted;
}

// Whether all ranks have offered what this collective needs, inside their heaps. Keeps the offsets: a header is in
// shared memory and must not be believed twice.
bool Rounds::all_offered() {
  const Request& r = work_->request;
  const auto n = static_cast<std::size_t>(core_.size());
  const std::size_t in_bytes = r.kind == Kind::reduce_scatter ? r.bytes() * n : r.bytes();
  const auto inside = [](std::uint64_t offset, std::size_t bytes, std::size_t heap) {
    return bytes <= heap && offset <= heap - bytes;
  };
  in_offsets_.assign(n, 0);
  out_offsets_.assign(n, 0);
  for (int p = 0; p < core_.size(); ++p) {
    const auto i = static_cast<std::size_t>(p);
    const CollectiveHeader& h = core_.state(p).headers[work_->sequence() % kHeaders];
    const std::size_t heap = core_.process(p).heap_bytes();
    const std::uint32_t shared = h.shared;
    in_offsets_[i] = h.in_offset;
    out_offsets_[i] = h.out_offset;
    if ((shared & kMapsHeaps) == 0) return false;
    if (r.kind == Kind::broadcast && p != r.root) continue;
    if ((shared & kSharedIn) == 0 || !inside(in_offsets_[i], in_bytes, heap)) return false;
    if (r.kind == Kind::all_reduce && ((shared & kSharedOut) == 0 || !inside(out_offsets_[i], r.bytes(), heap))) {
      return false;
    }
  }
  return true;
}

const char* Rounds::peer_in(int peer) const {
  if (peer == core_.rank()) return static_cast<const char*>(work_->request.in);
  return core_.process(peer).heap() + in_offsets_[static_cast<std::size_t>(peer)];
}

char* Rounds::peer_out(int peer) const {
  if (peer == core_.rank()) return static_cast<char*>(work_->request.out);
  return core_.process(peer).heap() + out_offsets_[static_cast<std::size_t>(peer)];
}

void Rounds::plan_shared() {
  const Request& r = work_->request;
  const auto n = static_cast<std::size_t>(core_.size());
  per_round_ = kPiece / item_size(r.dtype) * (r.kind == Kind::all_reduce ? n : 1);
  end_ = base_ + (r.count + per_round_ - 1) / per_round_;
  staged_ = end_;
  streams_ = streams();
  combined_ = base_;
  shared_ = combines_ = reads_ = planned_ = true;
}

void Rounds::combine_shared(std::uint64_t round) {
  const Request& r = work_->request;
  const int n = core_.size(), me = core_.rank();
  const auto self = static_cast<std::size_t>(me);
  const std::size_t item = item_size(r.dtype);
  const std::size_t lo = (round - base_) * per_round_, len = std::min(per_round_, r.count - lo);
  char* out = static_cast<char*>(r.out);
  std::array<const void*, kMaxRanks> inputs{};
  const auto reduce_at = [&](std::size_t element, char* to, std::size_t count) {
    for (int p = 0; p < n; ++p) inputs[static_cast<std::size_t>(p)] = peer_in(p) + element * item;
    reduce(inputs.data(), n, to, count, r.dtype, r.op);
  };
  switch (r.kind) {
    case Kind::all_reduce: {
      const std::size_t part = part_of(len, static_cast<std::size_t>(n), item);
      const std::size_t from = std::min(self * part, len), size = std::min(part, len - from);
      // In pieces that stay in the cache until they are written to all.
      constexpr std::size_t kHot = 32 * 1024;
      for (std::size_t done = 0; done < size; done += kHot / item) {
        const std::size_t at = lo + from + done, count = std::min(kHot / item, size - done);
        alignas(64) char result[kHot];
        reduce_at(at, result, count);
        for (int p = 0; p < n; ++p) copy(peer_out(p) + at * item, result, count * item);
      }
      break;
    }
    case Kind::reduce_scatter:
      reduce_at(self * r.count + lo, out + lo * item, len);
      break;
    case Kind::all_gather:
      for (int p = 0; p < n; ++p) {
        char* to = out + (static_cast<std::size_t>(p) * r.count + lo) * item;
        place(to, peer_in(p) + lo * item, len * item, streams_);
      }
      break;
    default:  // broadcast
      if (me != r.root) place(out + lo * item, peer_in(r.root) + lo * item, len * item, streams_);
      break;
  }
}

}  // namespace axo::host

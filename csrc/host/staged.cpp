// What each collective copies and reduces in a round: plan, stage, combine, consume.
//
//   operation       a round covers            stage of a rank            result         consume
//   all_reduce      n parts of the whole      the n - 1 parts of others  its own part   the others' results
//   all_reduce, 2   the whole                 its whole input            -              reduce all stages
//   ranks or <=
//   kDirect bytes
//   reduce          as all_reduce             the same; without owners   as all_reduce  at the root only
//                                             not the root
//   reduce_scatter  a piece of each part      that piece for each other  -              reduce my part's pieces
//   all_gather      a piece of the input      that piece                 -              copy each piece to its part
//   gather          the same                  the same, but the root     -              at the root only
//   broadcast       a piece of the data       that piece, at the root    -              copy
//   scatter         a piece of each part      those pieces, at the root  -              copy my piece
//   all_to_all(_v)  a piece of each part      that piece for each other  -              copy my piece of each stage
//   barrier         no rounds: the headers are enough
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "host/core.h"
#include "memory/copy.h"
#include "memory/reduce.h"

namespace axo::host {
namespace {

constexpr std::size_t kDirect = 4096;
// Results of this size do not stay in the caches until somebody reads them.
constexpr std::size_t kStreamed = 8 << 20;
constexpr std::size_t kHot = 16 * 1024;  // what is reduced before it is copied on, in the first-level cache

constexpr std::size_t kMoved = 8 * 1024;  // smaller messages gain nothing, and every nanosecond counts

constexpr std::uint64_t kModeRounds = 64;  // rounds from which a collective may choose how to write stages

std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

}  // namespace

std::size_t part_of(std::size_t count, std::size_t n, std::size_t item) {
  const std::size_t line = 64 / item;
  return ceil_div(ceil_div(count, n), line) * line;
}

void Rounds::plan() {
  const Request& r = work_->request;
  const Layout& layout = core_.layout();
  const auto n = static_cast<std::size_t>(core_.size());
  const bool at_root = core_.rank() == r.root;
  const std::size_t item = item_size(r.dtype);
  stages_ = reads_ = true;
  std::uint64_t total = r.count;
  switch (r.kind) {
    case Kind::barrier:
      total = 0;
      per_round_ = 1;
      break;
    case Kind::all_reduce:
    case Kind::reduce:
      // With two ranks, owners move the same bytes but need two waits instead of one. Without owners a call takes 5 to
      // 20% less time between far cores, and 7 to 10% less from 16 MiB on between near ones.
      combines_ = n > 2 && r.bytes() > kDirect;
      per_round_ = (combines_ ? n * layout.part_bytes() : n > 2 ? kDirect : layout.slot_bytes()) / item;
      break;
    case Kind::reduce_scatter:
    case Kind::all_to_all:
    case Kind::scatter:
      per_round_ = layout.part_bytes() / item;
      break;
    case Kind::all_to_all_v:
      // In bytes; all ranks must agree on the number of rounds, so the longest part of any pair counts.
      per_round_ = layout.part_bytes();
      total = longest_;
      break;
    default:  // all_gather, gather, broadcast
      per_round_ = layout.slot_bytes() / item;
      break;
  }
  if (r.kind == Kind::broadcast || r.kind == Kind::scatter) {
    stages_ = at_root;
    reads_ = !at_root;
  } else if (r.kind == Kind::gather || r.kind == Kind::reduce) {
    stages_ = combines_ || !at_root;
    reads_ = at_root;
  }
  shift_ = shift(total);
  streams_ = streams();
  end_ = base_ + ceil_div(total, per_round_);
  staged_ = stages_ ? base_ : end_;
  combined_ = combines_ ? base_ : end_;
  planned_ = true;
  if (WriteMode* const mode = write_mode(); mode != nullptr) {
    mode->begin((static_cast<int>(r.dtype) * kReduceOpCount + static_cast<int>(r.op)) * 2 + (r.in == r.out));
  }
}

// A small message moves about in its slot: it begins where none of the last few began. A line that the peers have read
// lately is in their second-level caches, and taking it from there to write it takes longer than from the third level.
std::size_t Rounds::shift(std::uint64_t total) const {
  const Request& r = work_->request;
  const std::size_t item = r.kind == Kind::all_to_all_v ? 1 : item_size(r.dtype);
  const std::size_t owners = combines_ ? static_cast<std::size_t>(core_.size()) : 1;
  const std::size_t room = per_round_ / owners * item;  // of a slot, or of a part of one
  const std::size_t bytes = (combines_ ? part_of(total, owners, item) : total) * item;
  if (bytes < kMoved) return 0;
  std::size_t piece = kMoved;
  while (piece < bytes && piece < room) piece *= 2;
  const std::size_t pieces = room / piece;
  return pieces < 2 ? 0 : base_ / kDepth % pieces * piece;
}

char* Rounds::stage_of(int rank, std::uint64_t round) const {
  return core_.layout().stage(core_.base(), rank, round) + shift_;
}

char* Rounds::result_of(int rank, std::uint64_t round) const {
  return core_.layout().result(core_.base(), rank, round) + shift_;
}

WriteMode* Rounds::write_mode() {
  const bool large = stages_ && end_ - base_ >= kModeRounds;
  return large && !core_.engine().crowded() ? &write_modes_[static_cast<std::size_t>(work_->request.kind)] : nullptr;
}

// Whether what this rank receives is too large for the caches, and not already there (in place).
bool Rounds::streams() const {
  const Request& r = work_->request;
  const auto n = static_cast<std::size_t>(core_.size());
  switch (r.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      return r.in != r.out && r.bytes() >= kStreamed;
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      return r.bytes() * n >= kStreamed;
    case Kind::all_to_all_v:
      return std::accumulate(r.recv_bytes.begin(), r.recv_bytes.end(), std::size_t{0}) >= kStreamed;
    default:
      return r.bytes() >= kStreamed;
  }
}

void Rounds::stage(std::uint64_t round) {
  const Request& r = work_->request;
  const Layout& layout = core_.layout();
  const int n = core_.size(), me = core_.rank();
  const std::size_t item = item_size(r.dtype);
  const char* in = static_cast<const char*>(r.in);
  char* to = stage_of(me, round);
  const auto copy = around_ ? &stream : &axo::copy;
  const std::size_t lo = (round - base_) * per_round_;
  switch (r.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      const std::size_t len = std::min(per_round_, r.count - lo);
      if (!combines_) {
        copy(to, in + lo * item, len * item);
        break;
      }
      const std::size_t part = part_of(len, static_cast<std::size_t>(n), item);
      for (int p = 0; p < n; ++p) {
        const std::size_t from = std::min(static_cast<std::size_t>(p) * part, len);
        const std::size_t size = std::min(part, len - from);
        if (p != me) copy(to + layout.part_at(me, p), in + (lo + from) * item, size * item);
      }
      break;
    }
    case Kind::reduce_scatter:
    case Kind::all_to_all:
    case Kind::scatter: {
      const std::size_t len = std::min(per_round_, r.count - lo);
      for (int p = 0; p < n; ++p) {
        const auto part = static_cast<std::size_t>(p);
        if (p != me) copy(to + layout.part_at(me, p), in + (part * r.count + lo) * item, len * item);
      }
      break;
    }
    case Kind::all_to_all_v:
      for (int p = 0; p < n; ++p) {
        const auto part = static_cast<std::size_t>(p);
        if (p == me || lo >= r.send_bytes[part]) continue;
        copy(to + layout.part_at(me, p), in + r.send_offsets[part] + lo, std::min(per_round_, r.send_bytes[part] - lo));
      }
      break;
    case Kind::all_gather: {
      const std::size_t bytes = std::min(per_round_, r.count - lo) * item;
      copy(to, in + lo * item, bytes);
      if (headers_ok_) {  // my own piece of the result too, while the input is in the caches
        char* own = static_cast<char*>(r.out) + (static_cast<std::size_t>(me) * r.count + lo) * item;
        (streams_ ? &stream : &axo::copy)(own, in + lo * item, bytes);
      } else {  // the result is not written before all agree that there is one
        placed_ = round + 1;
      }
      break;
    }
    default:  // gather, broadcast
      copy(to, in + lo * item, std::min(per_round_, r.count - lo) * item);
      break;
  }
}

// out = the reduction, in rank order, of my own input and of every peer's stage (or of my part of it), `at` bytes in.
void Rounds::reduce_stages(std::size_t at, const char* own, char* out, std::size_t count, std::uint64_t round) const {
  const Layout& layout = core_.layout();
  const int me = core_.rank();
  const bool parts = combines_ || work_->request.kind == Kind::reduce_scatter;
  std::array<const void*, kMaxRanks> inputs{};
  for (int p = 0; p < core_.size(); ++p) {
    const char* const stage = stage_of(p, round) + at;
    inputs[static_cast<std::size_t>(p)] = p == me ? own : parts ? stage + layout.part_at(p, me) : stage;
  }
  reduce(inputs.data(), core_.size(), out, count, work_->request.dtype, work_->request.op);
}

// The same into the user's memory: around the caches where the whole does not fit.
void Rounds::reduce_out(const char* own, char* out, std::size_t count, std::uint64_t round) const {
  if (!streams_) return reduce_stages(0, own, out, count, round);
  const std::size_t item = item_size(work_->request.dtype);
  alignas(64) char hot[kHot];
  for (std::size_t done = 0; done < count; done += kHot / item) {
    const std::size_t some = std::min(kHot / item, count - done);
    reduce_stages(done * item, own + done * item, hot, some, round);
    stream(out + done * item, hot, some * item);
  }
}

void Rounds::combine(std::uint64_t round) {
  const Request& r = work_->request;
  const std::size_t item = item_size(r.dtype), me = static_cast<std::size_t>(core_.rank());
  const std::size_t lo = (round - base_) * per_round_;
  const std::size_t len = std::min(per_round_, r.count - lo);
  const std::size_t part = part_of(len, static_cast<std::size_t>(core_.size()), item);
  const std::size_t from = std::min(me * part, len), size = std::min(part, len - from);
  char* result = result_of(core_.rank(), round);
  const auto write = around_ ? &stream : &copy;
  alignas(64) char hot[kHot];
  for (std::size_t done = 0; done < size; done += kHot / item) {
    const std::size_t element = lo + from + done, count = std::min(kHot / item, size - done);
    const char* own = static_cast<const char*>(r.in) + element * item;
    // Into my own memory first: a line of `result` that the peers have read is mine again only when they have given it
    // up, and copy() waits for that far less than a reduction, which asks for a few lines at a time.
    char* out = reads_ ? static_cast<char*>(r.out) + element * item : hot;
    char* mine = streams_ ? hot : out;
    reduce_stages(done * item, own, mine, count, round);
    write(result + done * item, mine, count * item);
    if (mine != out) stream(out, mine, count * item);
  }
}

void Rounds::consume(std::uint64_t round) {
  const Request& r = work_->request;
  const Layout& layout = core_.layout();
  const int n = core_.size(), me = core_.rank();
  const auto self = static_cast<std::size_t>(me);
  const std::size_t item = item_size(r.dtype);
  const char* in = static_cast<const char*>(r.in);
  char* out = static_cast<char*>(r.out);
  const std::size_t lo = (round - base_) * per_round_;
  const std::size_t len = r.kind == Kind::all_to_all_v ? 0 : std::min(per_round_, r.count - lo);
  const auto write = streams_ ? &stream : &copy;
  switch (r.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      if (!reads_) break;
      if (!combines_) {
        reduce_out(in + lo * item, out + lo * item, len, round);
        break;
      }
      const std::size_t part = part_of(len, static_cast<std::size_t>(n), item);
      for (int p = 0; p < n; ++p) {
        const std::size_t from = std::min(static_cast<std::size_t>(p) * part, len);
        if (p != me) write(out + (lo + from) * item, result_of(p, round), std::min(part, len - from) * item);
      }
      break;
    }
    case Kind::reduce_scatter:
      reduce_out(in + (self * r.count + lo) * item, out + lo * item, len, round);
      break;
    case Kind::all_gather:
    case Kind::gather:
      if (!reads_) break;
      for (int p = 0; p < n; ++p) {
        if (p == me && r.kind == Kind::all_gather && round >= placed_) continue;
        char* to = out + (static_cast<std::size_t>(p) * r.count + lo) * item;
        write(to, p == me ? in + lo * item : stage_of(p, round), len * item);
      }
      break;
    case Kind::broadcast:
      if (reads_) write(out + lo * item, stage_of(r.root, round), len * item);
      break;
    case Kind::scatter:
      write(out + lo * item,
            reads_ ? stage_of(r.root, round) + layout.part_at(r.root, me) : in + (self * r.count + lo) * item,
            len * item);
      break;
    case Kind::all_to_all:
      for (int p = 0; p < n; ++p) {
        const std::size_t at = (static_cast<std::size_t>(p) * r.count + lo) * item;
        write(out + at, p == me ? in + at : stage_of(p, round) + layout.part_at(p, me), len * item);
      }
      break;
    case Kind::all_to_all_v:
      for (int p = 0; p < n; ++p) {
        const auto part = static_cast<std::size_t>(p);
        if (lo >= r.recv_bytes[part]) continue;
        const char* from = p == me ? in + r.send_offsets[part] + lo : stage_of(p, round) + layout.part_at(p, me);
        write(out + r.recv_offsets[part] + lo, from, std::min(per_round_, r.recv_bytes[part] - lo));
      }
      break;
    default:
      break;
  }
}

}  // namespace axo::host

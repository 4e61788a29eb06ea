// The steps of a composed collective; see base/composition.h.
#include "base/composition.h"

namespace axo {
namespace {

// A collective of the same dtype and reduction on other memory.
Request part_of(const Request& whole, Kind kind, const void* in, void* out, std::size_t count, int root = -1) {
  Request part = whole;
  part.kind = kind;
  part.in = in;
  part.out = out;
  part.count = count;
  part.root = root;
  return part;
}

bool has_parts(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}

}  // namespace

bool Composition::composes(const Operation& o) {
  const bool whole = o.dtype >= DType::int64 && o.dtype <= DType::boolean;
  if (o.scale != 1 || o.count == 0 || (o.reduces() && o.op == ReduceOp::avg && whole)) return false;
  return o.kind == Kind::all_reduce || o.kind == Kind::broadcast || has_parts(o.kind);
}

std::size_t Composition::bytes(const Operation& o) const {
  return o.bytes() * static_cast<std::size_t>(has_parts(o.kind) ? hosts_ * local_ : 1);
}

std::size_t Composition::scratch_bytes(const Request& r) const {
  if (!has_parts(r.kind)) return 0;
  return r.bytes() * static_cast<std::size_t>(r.kind == Kind::all_to_all ? hosts_ * local_ : hosts_);
}

std::vector<Composition::Step> Composition::steps(const Request& r, void* scratch) const {
  const auto local = static_cast<std::size_t>(local_), hosts = static_cast<std::size_t>(hosts_);
  const std::size_t item = item_size(r.dtype), n = r.count;
  const auto in = [&](std::size_t element) { return static_cast<const char*>(r.in) + element * item; };
  const auto out = [&](std::size_t element) { return static_cast<char*>(r.out) + element * item; };
  const auto space = [&](std::size_t element) { return static_cast<char*>(scratch) + element * item; };
  Step first{true, {}}, between{false, {}}, last{true, {}};
  // Of what is cut into as many slices as a host has ranks, for all_reduce and broadcast; `rest` begins behind them.
  const std::size_t slice = n / local, own = slice * static_cast<std::size_t>(place_), rest = slice * local;
  const auto add = [&](Step& step, Kind kind, const void* from, void* to, std::size_t count, int root = -1) {
    if (count > 0) step.requests.push_back(part_of(r, kind, from, to, count, root));
  };
  const auto gather_slices = [&] {
    add(last, Kind::all_gather, out(own), out(0), slice);
    add(last, Kind::broadcast, out(rest), out(rest), n - rest, 0);
  };
  switch (r.kind) {
    case Kind::all_reduce:
      add(first, Kind::reduce_scatter, in(0), out(own), slice);
      add(first, Kind::reduce, in(rest), out(rest), n - rest, 0);
      add(between, Kind::all_reduce, out(own), out(own), slice);
      if (place_ == 0) add(between, Kind::all_reduce, out(rest), out(rest), n - rest);
      gather_slices();
      break;
    case Kind::broadcast: {
      const int root_host = r.root / local_;
      if (host_ == root_host) add(first, Kind::broadcast, out(0), out(0), n, r.root % local_);
      add(between, Kind::broadcast, out(own), out(own), slice, root_host);
      if (place_ == 0) add(between, Kind::broadcast, out(rest), out(rest), n - rest, root_host);
      if (host_ != root_host) gather_slices();
      break;
    }
    case Kind::reduce_scatter:
      for (std::size_t h = 0; h < hosts; ++h) add(first, r.kind, in(h * local * n), space(h * n), n);
      add(between, r.kind, scratch, r.out, n);
      break;
    case Kind::all_gather:
      add(between, r.kind, r.in, scratch, n);
      for (std::size_t h = 0; h < hosts; ++h) add(last, r.kind, space(h * n), out(h * local * n), n);
      break;
    default:  // all_to_all
      for (std::size_t h = 0; h < hosts; ++h) add(first, r.kind, in(h * local * n), space(h * local * n), n);
      add(between, r.kind, scratch, r.out, local * n);
  }
  return {first, between, last};
}

}  // namespace axo

// Operations in words; see base/operation.h.
#include "base/operation.h"

#include <algorithm>
#include <cstdio>

namespace axo {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[kKindCount] = {"barrier",    "all_reduce",   "all_gather", "reduce_scatter",
                                                     "broadcast",  "reduce",       "gather",     "scatter",
                                                     "all_to_all", "all_to_all_v", "send",       "recv"};
  const auto i = static_cast<std::uint32_t>(kind);
  return i < kKindCount ? kNames[i] : "unknown operation";
}

std::string words(const Operation& o) {
  std::string text = name_of(o.kind);
  if (o.kind == Kind::barrier) return text;
  text += std::string("(") + name_of(o.dtype);
  if (o.kind != Kind::all_to_all_v) text += "[" + std::to_string(o.count) + "]";
  if (o.reduces()) text += std::string(", ") + name_of(o.op);
  if (o.scale != 1) {
    char scale[32];
    std::snprintf(scale, sizeof(scale), ", scaled by %g", o.scale);
    text += scale;
  }
  if (o.point_to_point()) {
    text += o.kind == Kind::send ? ", to " : ", from ";
    text += o.root < 0 ? "any rank" : "rank " + std::to_string(o.root);
    text += ", tag " + std::to_string(o.tag);
  } else if (o.root >= 0) {
    text += ", root " + std::to_string(o.root);
  }
  return text + ")";
}

std::size_t Request::sent_bytes() const {
  std::size_t bytes = 0;
  for (std::size_t p = 0; p < send_bytes.size(); ++p) bytes = std::max(bytes, send_offsets[p] + send_bytes[p]);
  return bytes;
}

Request by_rank(Request r, int rank, int size) {
  if (r.kind == Kind::all_to_all_v) return r;
  const bool gather = r.kind == Kind::gather, scatter = r.kind == Kind::scatter;
  for (int p = 0; p < size; ++p) {
    const std::size_t at = static_cast<std::size_t>(p) * r.bytes();
    const bool sends = gather ? p == r.root : rank == r.root || !scatter;
    const bool receives = scatter ? p == r.root : rank == r.root || !gather;
    r.send_bytes.push_back(sends ? r.bytes() : 0);
    r.send_offsets.push_back(gather ? 0 : at);
    r.recv_bytes.push_back(receives ? r.bytes() : 0);
    r.recv_offsets.push_back(scatter ? 0 : at);
  }
  return r;
}

std::string Member::words() const {
  return "'" + name + "' (rank " + std::to_string(rank) + " of " + std::to_string(size) + ")";
}

}  // namespace axo

// Arguments of the collectives, checked before anything is sent, and turned into requests; see base/communicator.h.
#include "base/communicator.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/group.h"

namespace axo {
namespace {

// Whether this operation reads `in` and writes `out` at a rank; `at_root`: it is the root.
bool needs_in(Kind kind, bool at_root) { return kind != Kind::recv && (kind != Kind::scatter || at_root); }
bool needs_out(Kind kind, bool at_root) {
  return kind != Kind::send && ((kind != Kind::gather && kind != Kind::reduce) || at_root);
}

}  // namespace

Request Communicator::request(Kind kind, const void* in, void* out, std::size_t count, DType dtype,
                              std::optional<int> root) const {
  AXO_CHECK(static_cast<int>(dtype) < kDTypeCount, name_of(kind), static_cast<int>(dtype), "a dtype");
  const std::size_t most =
      std::numeric_limits<std::size_t>::max() / item_size(dtype) / static_cast<std::size_t>(size()) / 2;
  AXO_CHECK(count <= most, name_of(kind), count, "a count of at most " + std::to_string(most));
  Request r;
  r.kind = kind;
  r.in = in;
  r.out = out;
  r.count = count;
  r.dtype = dtype;
  const std::string name = name_of(kind);
  if (root) {
    AXO_CHECK((*root >= 0 && *root < size()) || (kind == Kind::recv && *root == kAnyPeer),
              (name + (r.point_to_point() ? ": peer" : ": root")).c_str(), *root,
              "a rank from 0 to " + std::to_string(size() - 1));
    r.root = *root;
  }
  const bool at_root = root == rank();
  if (count > 0 && in == nullptr && needs_in(kind, at_root)) throw Error(name + ": in: got null, expected a pointer");
  if (count > 0 && out == nullptr && needs_out(kind, at_root)) {
    throw Error(name + ": out: got null, expected a pointer");
  }
  return r;
}

Request Communicator::reduction(Kind kind, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                std::optional<int> root) const {
  Request r = request(kind, in, out, count, dtype, root);
  AXO_CHECK(static_cast<int>(op) < kReduceOpCount, name_of(kind), static_cast<int>(op), "a reduce op");
  if (!can_reduce(dtype, op)) {
    throw Error(std::string(name_of(kind)) + ": " + name_of(op) + " is not defined on " + name_of(dtype));
  }
  r.op = op;
  return r;
}

std::vector<std::size_t> Communicator::to_bytes(const char* what, const std::vector<std::size_t>& counts,
                                                DType dtype) const {
  AXO_CHECK(counts.size() == static_cast<std::size_t>(size()), what, counts.size(),
            std::to_string(size()) + " entries, one a rank");
  std::vector<std::size_t> bytes;
  const std::size_t most = std::numeric_limits<std::size_t>::max() / item_size(dtype) / 2;
  for (std::size_t c : counts) {
    AXO_CHECK(c <= most, what, c, "at most " + std::to_string(most));
    bytes.push_back(c * item_size(dtype));
  }
  return bytes;
}

WorkPtr Communicator::all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                 const CallOptions& options) {
  return issue(reduction(Kind::all_reduce, in, out, count, dtype, op), options);
}

WorkPtr Communicator::all_gather(const void* in, void* out, std::size_t count, DType dtype,
                                 const CallOptions& options) {
  return issue(request(Kind::all_gather, in, out, count, dtype), options);
}

WorkPtr Communicator::reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                     const CallOptions& options) {
  return issue(reduction(Kind::reduce_scatter, in, out, count, dtype, op), options);
}

WorkPtr Communicator::broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) {
  return issue(request(Kind::broadcast, data, data, count, dtype, root), options);
}

WorkPtr Communicator::reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op, int root,
                             const CallOptions& options) {
  return issue(reduction(Kind::reduce, in, out, count, dtype, op, root), options);
}

WorkPtr Communicator::gather(const void* in, void* out, std::size_t count, DType dtype, int root,
                             const CallOptions& options) {
  return issue(request(Kind::gather, in, out, count, dtype, root), options);
}

WorkPtr Communicator::scatter(const void* in, void* out, std::size_t count, DType dtype, int root,
                              const CallOptions& options) {
  return issue(request(Kind::scatter, in, out, count, dtype, root), options);
}

WorkPtr Communicator::all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                                 const CallOptions& options) {
  return issue(request(Kind::all_to_all, in, out, count, dtype), options);
}

WorkPtr Communicator::all_to_all_v(const void* in, const std::vector<std::size_t>& send_counts,
                                   const std::vector<std::size_t>& send_offsets, void* out,
                                   const std::vector<std::size_t>& recv_counts,
                                   const std::vector<std::size_t>& recv_offsets, DType dtype,
                                   const CallOptions& options) {
  Request r = request(Kind::all_to_all_v, in, out, 0, dtype);
  r.send_bytes = to_bytes("all_to_all_v: send_counts", send_counts, dtype);
  r.send_offsets = to_bytes("all_to_all_v: send_offsets", send_offsets, dtype);
  r.recv_bytes = to_bytes("all_to_all_v: recv_counts", recv_counts, dtype);
  r.recv_offsets = to_bytes("all_to_all_v: recv_offsets", recv_offsets, dtype);
  for (std::size_t p = 0; p < static_cast<std::size_t>(size()); ++p) {
    if (in == nullptr && r.send_bytes[p] > 0) throw Error("all_to_all_v: in: got null, expected a pointer");
    if (out == nullptr && r.recv_bytes[p] > 0) throw Error("all_to_all_v: out: got null, expected a pointer");
  }
  return issue(std::move(r), options);
}

WorkPtr Communicator::send(const void* data, std::size_t count, DType dtype, int peer, int tag,
                           const CallOptions& options) {
  Request r = request(Kind::send, data, nullptr, count, dtype, peer);
  r.tag = tag;
  return issue(std::move(r), options);
}

WorkPtr Communicator::recv(void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options) {
  Request r = request(Kind::recv, nullptr, data, count, dtype, peer);
  r.tag = tag;
  return issue(std::move(r), options);
}

WorkPtr Communicator::barrier(const CallOptions& options) {
  return issue(request(Kind::barrier, nullptr, nullptr, 0, DType::uint8), options);
}

void Communicator::check_group(const Request& r, const CallOptions& options) {
  if (options.blocking && inside_group()) {
    throw Error(std::string(name_of(r.kind)) + ": got a blocking call inside a group, expected a non-blocking one");
  }
}

std::string Communicator::gather_bytes(const std::string& mine) {
  std::string all(mine.size() * static_cast<std::size_t>(size()), '\0');
  CallOptions options;
  options.blocking = true;
  all_gather(mine.data(), all.data(), mine.size(), DType::uint8, options);
  return all;
}

std::vector<int> Communicator::split_members(int color, int key) {
  if (inside_group()) throw Error("split: got a call inside a group, expected one outside");
  struct Choice {
    std::int32_t color, key;
  };
  const Choice mine{color, key};
  const std::string choices = gather_bytes(std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)));
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int p = 0; p < size(); ++p) {
    Choice c;
    std::memcpy(&c, choices.data() + static_cast<std::size_t>(p) * sizeof(c), sizeof(c));
    if (c.color == color) members.emplace_back(c.key, p);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& member : members) ranks.push_back(member.second);
  return ranks;
}

}  // namespace axo

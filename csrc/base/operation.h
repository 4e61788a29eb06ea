// One operation as it was asked for: what ranks compare, what the flight recorder keeps and what every message shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace axo {

enum class Kind : std::uint32_t {
  barrier,
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  all_to_all_v,
  send,
  recv,
};
inline constexpr int kKindCount = 12;
const char* name_of(Kind kind);

// Two ranks ask for the same collective where their Operations are equal. Of fixed size and without padding, so it also
// lies in shared memory and goes over a wire; from there any field may hold any value.
struct Operation {
  std::uint64_t count = 0;  // elements, of one part where the operation has parts; 0 for all_to_all_v
  double scale = 1;         // of the inputs of a reduction
  Kind kind = Kind::barrier;
  std::int32_t root = -1;  // the peer of send and recv; -1: none, of a recv kAnyPeer
  std::int32_t tag = 0;    // send and recv
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;  // sum where nothing is reduced
  std::uint16_t reserved = 0;

  std::size_t bytes() const { return count * item_size(dtype); }
  bool point_to_point() const { return kind == Kind::send || kind == Kind::recv; }
  bool reduces() const { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }
  bool operator==(const Operation& o) const {
    return count == o.count && scale == o.scale && kind == o.kind && root == o.root && tag == o.tag &&
           dtype == o.dtype && op == o.op;
  }
  bool operator!=(const Operation& o) const { return !(*this == o); }
};
static_assert(sizeof(Operation) == 32 && std::is_trivially_copyable_v<Operation>);

// The operation in words: "all_reduce(float32[1024], sum)", "broadcast(int8[4], root 1)", "send(float32[8], to rank 2,
// tag 5)", "barrier".
std::string words(const Operation& operation);

// One rank of a communicator, for messages.
struct Member {
  std::string name;  // of the communicator
  int rank = 0;
  int size = 1;
  std::string words() const;  // "'world' (rank 0 of 2)"
};

// An operation with its buffers.
struct Request : Operation {
  const void* in = nullptr;
  void* out = nullptr;
  // What goes to and comes from each rank, in bytes: of all_to_all_v, and of what by_rank() returns.
  std::vector<std::size_t> send_bytes, send_offsets, recv_bytes, recv_offsets;

  // From `in` to the end of the last part that goes to a rank.
  std::size_t sent_bytes() const;
};

// gather, scatter or all_to_all(_v), as `rank` of `size` asks for it, with its parts by rank.
Request by_rank(Request request, int rank, int size);

}  // namespace axo

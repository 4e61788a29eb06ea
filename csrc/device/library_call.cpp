// The library's calls by kind of operation; see device/library_call.h.
#include "device/library_call.h"

#include <algorithm>

#include "device/core.h"

namespace axo {
namespace {

void* at(void* data, std::size_t bytes) { return static_cast<char*>(data) + bytes; }
const void* at(const void* data, std::size_t bytes) { return static_cast<const char*>(data) + bytes; }

}  // namespace

LibraryCall::LibraryCall(const DeviceCore& core, const Request& request)
    : core_(core), r_(request), api_(core.nccl().table()), part_(request.bytes()), in_(request.in) {
  elements_ = nccl_moved(r_.dtype, r_.count);
  if (r_.reduces()) {
    elements_ = {nccl_reduced(name_of(r_.kind), r_.dtype, r_.op), r_.count};
    op_ = nccl_op(r_.dtype, r_.op);
  }
  const bool in_place = r_.in == r_.out;
  switch (r_.kind) {
    case Kind::gather:
      several_ = api_.Gather == nullptr;
      break;
    case Kind::scatter:
      several_ = api_.Scatter == nullptr;
      break;
    case Kind::all_to_all:
      several_ = api_.AlltoAll == nullptr;
      if (in_place) copied_bytes_ = part_ * static_cast<std::size_t>(core.size());
      break;
    case Kind::all_to_all_v:
      several_ = true;
      for (std::size_t p = 0; in_place && p < r_.send_bytes.size(); ++p) {
        copied_bytes_ = std::max(copied_bytes_, r_.send_offsets[p] + r_.send_bytes[p]);
      }
      break;
    default:
      break;
  }
}

void LibraryCall::before(GpuStream stream) {
  const std::size_t own = part_ * static_cast<std::size_t>(core_.rank());
  if (copied_bytes_ > 0) {
    void* copy = core_.gpu().allocate(copied_bytes_, stream);
    core_.gpu().copy(copy, r_.in, copied_bytes_, stream);
    in_ = copy;
  } else if (several_ && core_.rank() == r_.root) {  // the root's own part
    if (r_.kind == Kind::gather) core_.gpu().copy(at(r_.out, own), r_.in, part_, stream);
    if (r_.kind == Kind::scatter) core_.gpu().copy(r_.out, at(r_.in, own), part_, stream);
  }
  if (r_.scale != 1) {
    NcclScalar scale(r_.dtype, r_.scale);
    const int result =
        api_.RedOpCreatePreMulSum(&op_, scale.bytes, elements_.type, kNcclScalarHostImmediate, core_.comm());
    core_.nccl().check(result, "ncclRedOpCreatePreMulSum", core_.comm());
  }
}

void LibraryCall::after(GpuStream stream) {
  if (copied_bytes_ > 0) core_.gpu().release(const_cast<void*>(in_), stream);
  if (r_.scale != 1) core_.nccl().check(api_.RedOpDestroy(op_, core_.comm()), "ncclRedOpDestroy");
}

// Calls `one(rank)` for ranks in order until one fails.
template <class One>
int LibraryCall::for_ranks(const One& one) const {
  int result = kNcclSuccess;
  for (int p = 0; p < core_.size() && result == kNcclSuccess; ++p) result = one(p);
  return result;
}

// Sends a peer its part of the input and receives its part of the output.
int LibraryCall::exchange(int peer, GpuStream stream) const {
  const auto p = static_cast<std::size_t>(peer);
  const bool varied = r_.kind == Kind::all_to_all_v;
  const std::size_t item = item_size(r_.dtype);
  const NcclElements sent = varied ? nccl_moved(r_.dtype, r_.send_bytes[p] / item) : elements_;
  const NcclElements received = varied ? nccl_moved(r_.dtype, r_.recv_bytes[p] / item) : elements_;
  const void* from = at(in_, varied ? r_.send_offsets[p] : p * part_);
  void* to = at(r_.out, varied ? r_.recv_offsets[p] : p * part_);
  int result = kNcclSuccess;
  if (!varied || sent.count > 0) result = api_.Send(from, sent.count, sent.type, peer, core_.comm(), stream);
  if (result != kNcclSuccess || (varied && received.count == 0)) return result;
  return api_.Recv(to, received.count, received.type, peer, core_.comm(), stream);
}

int LibraryCall::call(GpuStream stream) const {
  const auto [type, count] = elements_;
  const NcclComm comm = core_.comm();
  const int root = r_.root, me = core_.rank();
  switch (r_.kind) {
    case Kind::barrier:  // of one word that is zero on all ranks
      return api_.AllReduce(core_.scratch(), core_.scratch(), 1, kNcclInt32, kNcclMax, comm, stream);
    case Kind::all_reduce:
      return api_.AllReduce(in_, r_.out, count, type, op_, comm, stream);
    case Kind::all_gather:
      return api_.AllGather(in_, r_.out, count, type, comm, stream);
    case Kind::reduce_scatter:
      return api_.ReduceScatter(in_, r_.out, count, type, op_, comm, stream);
    case Kind::broadcast:
      return api_.Broadcast(in_, r_.out, count, type, root, comm, stream);
    case Kind::reduce:
      return api_.Reduce(in_, r_.out, count, type, op_, root, comm, stream);
    case Kind::gather:
      if (api_.Gather) return api_.Gather(in_, r_.out, count, type, root, comm, stream);
      if (me != root) return api_.Send(in_, count, type, root, comm, stream);
      return for_ranks([&, n = count, t = type](int p) {
        const std::size_t to = static_cast<std::size_t>(p) * part_;
        return p == me ? kNcclSuccess : api_.Recv(at(r_.out, to), n, t, p, comm, stream);
      });
    case Kind::scatter:
      if (api_.Scatter) return api_.Scatter(in_, r_.out, count, type, root, comm, stream);
      if (me != root) return api_.Recv(r_.out, count, type, root, comm, stream);
      return for_ranks([&, n = count, t = type](int p) {
        const std::size_t from = static_cast<std::size_t>(p) * part_;
        return p == me ? kNcclSuccess : api_.Send(at(in_, from), n, t, p, comm, stream);
      });
    case Kind::all_to_all:
      if (api_.AlltoAll) return api_.AlltoAll(in_, r_.out, count, type, comm, stream);
      return for_ranks([&](int p) { return exchange(p, stream); });
    case Kind::all_to_all_v:
      return for_ranks([&](int p) { return exchange(p, stream); });
    case Kind::send:
      return api_.Send(in_, count, type, root, comm, stream);
    case Kind::recv:
      return api_.Recv(r_.out, count, type, root, comm, stream);
  }
  return kNcclInternalError;
}

}  // namespace axo

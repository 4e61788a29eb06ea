// The library's calls by kind of operation; see device/library_call.h.
#include "device/library_call.h"

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
  const bool exchanges = r_.kind == Kind::all_to_all || r_.kind == Kind::all_to_all_v;
  alone_ = core.size() == 1 && (exchanges || r_.kind == Kind::gather || r_.kind == Kind::scatter);
  several_ = !alone_ && (r_.kind == Kind::all_to_all_v || (r_.kind == Kind::gather && api_.Gather == nullptr) ||
                         (r_.kind == Kind::scatter && api_.Scatter == nullptr) ||
                         (r_.kind == Kind::all_to_all && api_.AlltoAll == nullptr));
  const bool in_place = r_.in == r_.out && exchanges;
  if (several_ || alone_ || in_place) by_rank_ = by_rank(r_, core.rank(), core.size());
  if (in_place) copied_bytes_ = by_rank_.sent_bytes();
}

void LibraryCall::before(GpuStream stream) {
  const std::size_t own = part_ * static_cast<std::size_t>(core_.rank());
  if (copied_bytes_ > 0) {
    void* copy = core_.gpu().allocate(copied_bytes_, stream);
    core_.gpu().copy(copy, r_.in, copied_bytes_, stream);
    in_ = copy;
  }
  if (alone_) {
    core_.gpu().copy(at(r_.out, by_rank_.recv_offsets[0]), at(in_, by_rank_.send_offsets[0]), by_rank_.send_bytes[0],
                     stream);
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

// Sends a peer its part of the input and receives its part of the output. The root's own part was copied before.
int LibraryCall::exchange(int peer, GpuStream stream) const {
  if (peer == core_.rank() && peer == r_.root) return kNcclSuccess;
  const auto p = static_cast<std::size_t>(peer);
  const std::size_t item = item_size(r_.dtype);
  const NcclElements sent = nccl_moved(r_.dtype, by_rank_.send_bytes[p] / item);
  const NcclElements received = nccl_moved(r_.dtype, by_rank_.recv_bytes[p] / item);
  int result = kNcclSuccess;
  if (sent.count > 0) {
    result = api_.Send(at(in_, by_rank_.send_offsets[p]), sent.count, sent.type, peer, core_.comm(), stream);
  }
  if (result != kNcclSuccess || received.count == 0) return result;
  return api_.Recv(at(r_.out, by_rank_.recv_offsets[p]), received.count, received.type, peer, core_.comm(), stream);
}

int LibraryCall::call(GpuStream stream) const {
  const auto [type, count] = elements_;
  const NcclComm comm = core_.comm();
  const int root = r_.root;
  int result = kNcclSuccess;
  for (int p = 0; several_ && p < core_.size() && result == kNcclSuccess; ++p) result = exchange(p, stream);
  if (several_ || alone_) return result;
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
      return api_.Gather(in_, r_.out, count, type, root, comm, stream);
    case Kind::scatter:
      return api_.Scatter(in_, r_.out, count, type, root, comm, stream);
    case Kind::all_to_all:
      return api_.AlltoAll(in_, r_.out, count, type, comm, stream);
    case Kind::send:
      return api_.Send(in_, count, type, root, comm, stream);
    case Kind::recv:
      return api_.Recv(r_.out, count, type, root, comm, stream);
    default:
      return kNcclInternalError;
  }
}

}  // namespace axo

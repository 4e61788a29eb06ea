// What an operation asks of NCCL or RCCL: the calls that it is made of, and what must come before and after them.
//
// An operation that the library has is one call. gather, scatter and all_to_all of older versions, and all_to_all_v,
// are sends and receives in one group. In-place exchanges read a copy, since the library cannot exchange parts in
// place. Of one rank they are a copy, and no call: RCCL 2.27 and 2.28 hang in an exchange (known issue of ROCm 7.2).
// A scaled sum makes an operator of the library's for itself.
#pragma once

#include "base/operation.h"
#include "device/nccl_api.h"

namespace axo {

class DeviceCore;

class LibraryCall {
 public:
  // Throws Error where the library cannot reduce what is asked for. `request` must live as long as this.
  LibraryCall(const DeviceCore& core, const Request& request);

  // In this order, on the launching thread, all on one stream.
  void before(GpuStream stream);
  int call(GpuStream stream) const;  // library calls only; returns the last NcclResult
  void after(GpuStream stream);
  bool several() const { return several_; }  // `call` needs a group of its own

 private:
  int exchange(int peer, GpuStream stream) const;

  const DeviceCore& core_;
  const Request& r_;
  Request by_rank_;  // where it is several calls, or an exchange in place
  const NcclApi::Table& api_;
  NcclElements elements_{};  // of one part
  std::size_t part_;         // bytes of one part
  int op_ = 0;
  const void* in_;                // the request's, or a copy of it on loan from the stream's memory
  std::size_t copied_bytes_ = 0;  // of that copy; 0: none is needed
  bool several_ = false;          // one call for each peer and direction
  bool alone_ = false;            // parts of one rank
};

}  // namespace axo

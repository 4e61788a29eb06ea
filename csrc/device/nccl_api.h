// NCCL and RCCL as one table of functions opened at run time, with their types declared here.
//
// The two share names, enum values and the 128-byte unique id that travels by value. What the running version lacks is
// null in the table (registration, windows, all_to_all as one call, ...), and `has_*` says so.
// AXO_NCCL_LIBRARY names the library to open; a copy beside the one that torch has loaded is refused.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "device/dynamic_library.h"
#include "device/gpu_runtime.h"

namespace axo {

using NcclComm = void*;
using NcclWindow = void*;

struct NcclUniqueId {
  char bytes[128];
};

enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledGpuError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
  kNcclTimeout = 8,
};

enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

inline constexpr int kNcclUndefined = INT_MIN;
inline constexpr int kNcclNoColor = -1;
inline constexpr int kNcclWindowSymmetric = 1;
inline constexpr int kNcclPolicyZeroCta = 2;
// MAXCHANNELS. RCCL's has been 128 and is 256: it takes more than it has for what it has.
inline constexpr int kNcclMostCtas = 64, kRcclMostCtas = 256;
inline constexpr int kNcclScalarHostImmediate = 1;
inline constexpr int kNcclOldest = 21800;       // ncclCommSplit
inline constexpr int kNcclNewestKnown = 23203;  // the last version whose configuration is declared below

// ncclConfig_t: append-only, so that a prefix of it is what an older library knows. Fields that Axo never sets stay
// undefined, and a library newer than kNcclNewestKnown takes its defaults for those that are missing here.
struct NcclConfig {
  std::size_t size = 0;
  unsigned magic = 0xcafebeef;
  unsigned version = 0;
  int blocking = kNcclUndefined;        // 2.14
  int cgaClusterSize = kNcclUndefined;  // 2.17
  int minCTAs = kNcclUndefined;
  int maxCTAs = kNcclUndefined;
  const char* netName = nullptr;
  int splitShare = kNcclUndefined;    // 2.18
  int trafficClass = kNcclUndefined;  // 2.26
  const char* commName = nullptr;     // 2.27
  int collnetEnable = kNcclUndefined;
  int CTAPolicy = kNcclUndefined;
  int shrinkShare = kNcclUndefined;
  int nvlsCTAs = kNcclUndefined;
  int nChannelsPerNetPeer = kNcclUndefined;  // 2.28
  int nvlinkCentricSched = kNcclUndefined;
  int graphUsageMode = kNcclUndefined;  // 2.29
  int numRmaCtx = kNcclUndefined;
  int maxP2pPeers = kNcclUndefined;          // 2.30
  int graphStreamOrdering = kNcclUndefined;  // 2.30.5, in what was padding
  int launchOrderImplicit = kNcclUndefined;  // 2.31
  int numRmaSig = kNcclUndefined;
  int rmaEagerInit = kNcclUndefined;
  int hostCftMode = kNcclUndefined;
  int nvlsHostMode = kNcclUndefined;  // 2.32
};

// `size` and `version` are those that a library of `running_version` takes.
NcclConfig make_nccl_config(int running_version);

#define AXO_NCCL_REQUIRED(X)                                                                                         \
  X(GetUniqueId, (NcclUniqueId * id))                                                                                \
  X(CommInitRankConfig, (NcclComm * comm, int size, NcclUniqueId id, int rank, NcclConfig* config))                  \
  X(CommSplit, (NcclComm comm, int color, int key, NcclComm* out, NcclConfig* config))                               \
  X(CommFinalize, (NcclComm comm))                                                                                   \
  X(CommDestroy, (NcclComm comm))                                                                                    \
  X(CommAbort, (NcclComm comm))                                                                                      \
  X(CommGetAsyncError, (NcclComm comm, int* result))                                                                 \
  X(CommCount, (NcclComm comm, int* count))                                                                          \
  X(CommUserRank, (NcclComm comm, int* rank))                                                                        \
  X(AllReduce, (const void* in, void* out, std::size_t count, int type, int op, NcclComm comm, void* stream))        \
  X(AllGather, (const void* in, void* out, std::size_t count, int type, NcclComm comm, void* stream))                \
  X(ReduceScatter, (const void* in, void* out, std::size_t count, int type, int op, NcclComm comm, void* stream))    \
  X(Broadcast, (const void* in, void* out, std::size_t count, int type, int root, NcclComm comm, void* stream))      \
  X(Reduce, (const void* in, void* out, std::size_t count, int type, int op, int root, NcclComm comm, void* stream)) \
  X(Send, (const void* data, std::size_t count, int type, int peer, NcclComm comm, void* stream))                    \
  X(Recv, (void* data, std::size_t count, int type, int peer, NcclComm comm, void* stream))                          \
  X(GroupStart, ())                                                                                                  \
  X(GroupEnd, ())                                                                                                    \
  X(RedOpCreatePreMulSum, (int* op, void* scalar, int type, int residence, NcclComm comm))                           \
  X(RedOpDestroy, (int op, NcclComm comm))

#define AXO_NCCL_OPTIONAL(X)                                                                                  \
  X(AlltoAll, (const void* in, void* out, std::size_t count, int type, NcclComm comm, void* stream))          \
  X(Gather, (const void* in, void* out, std::size_t count, int type, int root, NcclComm comm, void* stream))  \
  X(Scatter, (const void* in, void* out, std::size_t count, int type, int root, NcclComm comm, void* stream)) \
  X(CommRegister, (NcclComm comm, void* data, std::size_t bytes, void** handle))                              \
  X(CommDeregister, (NcclComm comm, void* handle))                                                            \
  X(CommWindowRegister, (NcclComm comm, void* data, std::size_t bytes, NcclWindow* window, int flags))        \
  X(CommWindowDeregister, (NcclComm comm, NcclWindow window))                                                 \
  X(MemAlloc, (void** data, std::size_t bytes))                                                               \
  X(MemFree, (void* data))

class NcclApi {
 public:
  // Opens the library that goes with `vendor`'s runtime. NCCL 2.26 to 2.30 take the launch order from the environment,
  // which they read once, at the first communicator of the process: so NCCL_LAUNCH_ORDER_IMPLICIT=1 is set here where
  // nobody can have made one, since the library was not loaded, and the variable is not set. RCCL 2.22's MSCCL may
  // crash in ncclCommSplit (known issue of ROCm 6.4): RCCL_MSCCL_ENABLE=0 is set where that variable is not.
  static std::shared_ptr<const NcclApi> open(GpuVendor vendor, const std::vector<std::string>& folders = {});

  struct Table {
#define AXO_NCCL_FIELD(name, arguments) int(*name) arguments = nullptr;
    AXO_NCCL_REQUIRED(AXO_NCCL_FIELD)
    AXO_NCCL_OPTIONAL(AXO_NCCL_FIELD)
#undef AXO_NCCL_FIELD
    int (*GetVersion)(int*) = nullptr;
    const char* (*GetErrorString)(int) = nullptr;
    const char* (*GetLastError)(NcclComm) = nullptr;  // optional
  };
  const Table* operator->() const { return &fn_; }
  const Table& table() const { return fn_; }

  const std::string& path() const { return library_.path(); }
  const char* transport() const { return vendor_ == GpuVendor::cuda ? "nccl" : "rccl"; }
  int version() const { return version_; }  // 23203 is 2.32.3
  int most_ctas() const { return vendor_ == GpuVendor::cuda ? kNcclMostCtas : kRcclMostCtas; }
  std::string version_text() const;
  bool has_registration() const { return fn_.CommRegister && fn_.CommDeregister; }
  bool has_windows() const { return fn_.CommWindowRegister && fn_.CommWindowDeregister && fn_.MemAlloc && fn_.MemFree; }
  // Whether an operation takes no more thread blocks than maxCTAs says. RCCL before 2.30.7 fills its channels up again
  // behind the limit (ncclTopoPostset), and its direct collectives of eight ranks, from 2.30.4 on, do not ask for it.
  bool keeps_caps() const { return vendor_ == GpuVendor::cuda; }
  // Copy-engine collectives, which take no SM. RCCL's, from 2.28.3 on, hang where a graph is replayed, before 2.31.
  bool has_zero_cta() const { return vendor_ == GpuVendor::cuda && version_ >= 22800; }
  // Whether kernels of different communicators begin in the order of their launches. Never on AMD: there "implicit"
  // means one after the other, from 2.28.3 on, without the direct collectives, and three communicators are reported to
  // hang with it (2.30.4).
  bool orders_launches() const { return orders_launches_; }

  // "ncclAllReduce: remote process exited or there was a network error (6): <the library's last message>".
  std::string error_text(const char* function, int result, NcclComm comm = nullptr) const;
  // Throws Error unless `result` is success.
  void check(int result, const char* function, NcclComm comm = nullptr) const;

 private:
  NcclApi(GpuVendor vendor, DynamicLibrary library);

  GpuVendor vendor_;
  DynamicLibrary library_;
  Table fn_;
  int version_ = 0;
  bool orders_launches_ = false;
};

// How a dtype travels: as itself where the library has the type, else (int16, fp8, complex) as bytes.
struct NcclElements {
  NcclType type;
  std::size_t count;
};
NcclElements nccl_moved(DType dtype, std::size_t count);
// Throws Error that names `what` when the library cannot reduce `dtype` by `op` (int16, bit operations on numbers).
NcclType nccl_reduced(const char* what, DType dtype, ReduceOp op);
NcclOp nccl_op(DType dtype, ReduceOp op);

// A factor in the form that ncclRedOpCreatePreMulSum wants: one element of the dtype. Throws Error for integers.
struct NcclScalar {
  NcclScalar(DType dtype, double value);
  alignas(8) char bytes[8] = {};
};

}  // namespace axo

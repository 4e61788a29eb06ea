// The communicator of GPUs: NCCL or RCCL, opened at run time, each on a stream of its own.
//
// Order. All communicators of a rank issue from one queue (device/launch_queue.h), so ranks that issue in one order
//   launch in one order. A non-blocking call runs on the communicator's stream; a blocking one on the caller's.
//   Operations of one communicator stay in issue order whatever stream they are on. Kernels must also begin in the
//   order of their launches. Where the library does not see to that (AMD, NCCL before 2.26, or a variable that it may
//   have read too early: device/nccl_api.h), all communicators of a rank share one stream, and each operation, on
//   whatever stream, comes after the one issued before it, of whatever communicator: at most one is on the device.
// Work. wait() makes the caller's stream wait, wait_on(stream) another one; synchronize() holds the host. A work keeps
//   its tensors until it is waited for on the stream that it was called from, or until it is complete and dropped: then
//   they are let go on the thread of the watchdog, unlike those of the host (base/work.h).
// Graphs. Calls on a stream that is capturing become part of its graph, with any number of communicators in one graph.
//   wait() for the works of the call before the capture ends (it joins the streams again), and for those from before
//   the capture before it begins. Replays of two graphs that hold the same communicator must not overlap. shutdown()
//   throws, and changes nothing, while a graph lives that captured it; a communicator that is dropped then stays.
// Narrower than the contract: send and recv match in issue order only (tags are compared under AXO_CHECK=1, and else
//   ignored), and they are ordered against the collectives of the same communicator. Opposite transfers between two
//   ranks belong in one group. int16, and bit operations on numbers, are moved but not reduced.
// Errors. A failed or aborted communicator throws from every later call. A peer of this host that dies is named within
//   a fifth of a second (device/peers.h); of another host only the library can tell, late: PeerLost::peer() is then -1.
//   The library's communicators block: a call returns when it is done, and makes no thread. One that hangs, in a first
//   connection say, is ended by the watchdog, at its time limit, a death or an abort, by ncclCommAbort.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "base/store.h"

namespace axo {

class DeviceContext;

enum class StreamPolicy { automatic, own, shared };  // automatic: own where the library orders launches, else shared

// A collective of so many hosts of so many neighbours each is composed of those inside hosts and those between them
// (base/composition.h) from so many bytes on: as somebody has measured.
struct Composed {
  int hosts, local;
  Kind kind;
  std::size_t least;
};

struct DeviceOptions {
  std::string name = "world";
  Milliseconds timeout{600000};  // of operations; also of the rendezvous
  int device = 0;                // index, as the runtime counts
  // Thread blocks that one operation may use, 0: the library's choice. The sum of `max_ctas` over the communicators of
  // a rank, each rounded up to a power of two, which transfers take, is what computation must leave free for all to be
  // resident at once (reserved_ctas()).
  int min_ctas = 0;
  int max_ctas = 0;
  int cga_cluster_size = -1;  // -1: none where max_ctas or a cap is given, else the library's choice
  // Copy-engine collectives where the library has them (2.28; gather-like operations on window memory): they take no
  // SM.
  bool zero_cta = false;
  bool high_priority = true;
  bool timing = false;       // Work::seconds() is measured; costs two timing events an operation
  bool split_share = false;  // sub-communicators share the parent's buffers; they must then not overlap with it
  StreamPolicy streams = StreamPolicy::automatic;
  // Compare every operation and its place in the order with the peers' through the store before it is launched. Slow.
  // -1: as AXO_CHECK=1 says.
  int check = -1;
  std::vector<Composed> composed = {};  // equal on all ranks; not together with split_share
  // Set, from any thread, it ends the making of this communicator with Aborted.
  std::shared_ptr<const std::atomic<bool>> cancelled = {};
  // Shared by the communicators of one rank. Null: the one that this process has for `device`. Ranks as threads of one
  // process make one each (device/context.h).
  std::shared_ptr<DeviceContext> context = {};
};

class DeviceCommunicator : public Communicator {
 public:
  // all_reduce and reduce_scatter of scale * in, in one operation.
  virtual WorkPtr all_reduce_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                                    const CallOptions& options) = 0;
  virtual WorkPtr reduce_scatter_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                                        const CallOptions& options) = 0;

  // Device memory that peers can reach directly, for register_buffer(symmetric). Freed with the last reference.
  // Throws Error where the library has none (before 2.27).
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  // Lets collectives use [data, data + bytes) without staging, until the result is dropped or the communicator ends.
  // symmetric: a window; collective, `data` from allocate(), equal bytes on all ranks. Null where the library cannot.
  virtual std::shared_ptr<void> register_buffer(void* data, std::size_t bytes, bool symmetric) = 0;

  // Chunk signalling for fused kernels, on this communicator's stream.
  //   follow(s)            the stream goes on after what is on `s` now;
  //   wait_flag(a, v)      ... when the 4-byte word at device address `a` has reached `v` (int32(*a - v) >= 0);
  //   write_flag(a, v)     ... after writing `v` to `a`.
  // A producer on `s` that raises flags while it runs:
  //   follow(s); <launch the producer on s>; for each chunk: wait_flag(...), all_reduce(..., after_caller = false).
  virtual void follow(void* stream) = 0;
  virtual void wait_flag(const void* address, std::uint32_t value) = 0;
  virtual void write_flag(void* address, std::uint32_t value) = 0;

  // The same ranks as a communicator of its own whose operations take `max_ctas` thread blocks at most: for products
  // that leave just as many multiprocessors free. 0: none where both buffers are windows and the operation is a gather
  // (DeviceOptions::zero_cta); any number elsewhere. Collective. reserved_ctas() does not count it. Throws Error where
  // split_share is on, since both run at once, and on AMD, whose library keeps to no cap.
  virtual std::shared_ptr<DeviceCommunicator> capped(int max_ctas, const std::string& name) = 0;

  virtual int device() const = 0;
  virtual void* stream() const = 0;
  // Sum of max_ctas, as powers of two, over the live communicators of this rank and device; 0 on AMD.
  virtual int reserved_ctas() const = 0;
  virtual bool shares_buffers() const = 0;  // split_share
  virtual int library_version() const = 0;  // 23203 is 2.32.3
  // What is composed here, by collective: the least bytes.
  virtual std::map<std::string, std::size_t> composed() const = 0;
};

// Collective over `size` ranks that share `store`. `key` must be equal on all ranks and unused in this store before.
// The store is kept: for the reports of a timeout, to pass an abort on, and for AXO_CHECK. It may be null when size
// is 1. Throws Error on every rank when libraries differ between ranks or two ranks name one GPU that cannot be shared.
std::shared_ptr<DeviceCommunicator> create_device_communicator(std::shared_ptr<Store> store, const std::string& key,
                                                               int rank, int size, const DeviceOptions& options);

}  // namespace axo

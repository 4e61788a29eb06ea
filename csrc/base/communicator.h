// The contract of a communicator: the collectives, their order, their threads and their errors.
//
// Ordering. Operations on one communicator match by issue order: the n-th call on one rank meets the n-th call on every
//   other, and they complete in that order. send and recv match by (peer, tag) in issue order and are not ordered
//   against collectives. A recv from kAnyPeer takes the first message of its tag that no recv issued before it takes.
//   Operations on different communicators are independent.
//     right:  every rank: a.all_reduce(s); a.broadcast(t);
//     wrong:  rank 0: a.all_reduce(s); a.broadcast(t);   rank 1: a.broadcast(t); a.all_reduce(s);   -> Mismatch on all
//     right:  rank 0: w = a.all_reduce(s); b.barrier(); w.wait();   rank 1: b.barrier(); a.all_reduce(s).wait();
//     wrong:  the same with two blocking calls: each waits for the other's second -> told on stderr, then Timeout
// Threads. Calls on one communicator from several threads are safe, but then the program must order them itself: the
//   order in which two threads come to it must be the same on every rank.
//     right:  one thread issues, any thread waits.
//     wrong:  two threads of each rank issue on one communicator without a common order   -> Mismatch, or wrong pairs
// In place. `in == out` is allowed where the two have the same size; all_gather also takes in == out + rank * count,
//   reduce_scatter out == in + rank * count, gather / scatter the same at the root. Any other overlap is undefined.
//     right:  all_reduce(t, t, n, ...);   all_gather(out + rank * n, out, n, ...);
//     wrong:  all_reduce(t, t + 1, n, ...);   all_gather(out, out, n, ...) at a rank above 0
// Units. `count` is in elements, of one rank's part where the operation has parts. count == 0 is valid and still an
//   operation that all ranks must issue. Timeouts are in milliseconds.
//     right:  reduce_scatter(in, out, n, float32, ...) with size() * n floats in `in` and n in `out`
//     wrong:  the same with count = size() * n (that reads past `in`), or with n * sizeof(float)
// Blocking. With CallOptions::blocking the call returns when the operation is complete, with a completed Work.
// Errors. A wrong argument throws Error before anything is sent; the communicator stays usable. What goes wrong later
//   (PeerLost, Timeout, Mismatch, Aborted) is thrown by the blocking call or by Work::wait, on every rank that took
//   part, and leaves the communicator aborted: later calls throw Aborted with the first reason. Each text names the
//   operation, its sequence number, the communicator, the rank, what happened at which rank, and how long this one
//   waited. Other communicators are not affected, unless they need a rank that is lost too.
//     right:  on PeerLost: drop this communicator, save or report, end the program or connect anew with those who live
//     wrong:  on PeerLost: try the same communicator again -> Aborted
// Lifetimes. Buffers must stay as they are until the operation is complete (base/work.h). A communicator that goes away
//   while operations are pending lets them finish first, then leaves. After fork the child must not use its parent's.
//     right:  comm->shutdown(); comm.reset();     right: comm.reset() alone
//     wrong:  a rank returns from main while a peer still needs it -> that peer's PeerLost says "left" or "died"
// Devices. A GPU communicator has a stream of its own, ordered after CallOptions::stream (the caller's, at the call).
//   "Complete" is meant in the order of streams: a blocking call is launched on the caller's stream itself and returns
//   without holding the host (barrier does hold it), and what the caller enqueues next sees the result.
// Numbers. Sums of bf16 and fp16 accumulate in fp32 in rank order, so the same inputs give the same bits on every rank
//   and in every run. avg = sum / size, rounded once.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/operation.h"
#include "base/types.h"
#include "base/work.h"

namespace axo {

// The peer of a recv that takes a message from whichever rank sends one; Work::source() then says who it was.
inline constexpr int kAnyPeer = -1;

struct CallOptions {
  bool blocking = false;
  Milliseconds timeout = kNoTimeout;      // kNoTimeout: the communicator's own
  std::shared_ptr<void> keep_alive = {};  // held until the operation is complete and its Work waited for or dropped
  // GPUs only: the caller's current stream, null for the default stream.
  void* stream = nullptr;
  // GPUs only. False: the operation is ordered by wait_flag (device/communicator.h), not after what is on `stream`.
  bool after_caller = true;
};

// Transports derive from it and take, in issue(), the requests that its collectives become.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // "shared-memory", "nccl", "rccl": what moves the bytes.
  virtual const char* transport() const = 0;

  // out[i] = op over ranks of in[i].
  WorkPtr all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                     const CallOptions& options);
  // out holds size() parts of `count` elements in rank order.
  WorkPtr all_gather(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options);
  // in holds size() parts of `count` elements; this rank receives the reduction of part rank().
  WorkPtr reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                         const CallOptions& options);
  WorkPtr broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options);
  // `out` is read at the root only and may be null elsewhere.
  WorkPtr reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op, int root,
                 const CallOptions& options);
  WorkPtr gather(const void* in, void* out, std::size_t count, DType dtype, int root, const CallOptions& options);
  WorkPtr scatter(const void* in, void* out, std::size_t count, DType dtype, int root, const CallOptions& options);
  // Part p of `in` goes to rank p; part p of `out` came from rank p.
  WorkPtr all_to_all(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options);
  // The same with parts of any size. Counts and offsets are in elements, one entry a rank; send_counts[p] here must
  // equal recv_counts[rank()] at p.
  WorkPtr all_to_all_v(const void* in, const std::vector<std::size_t>& send_counts,
                       const std::vector<std::size_t>& send_offsets, void* out,
                       const std::vector<std::size_t>& recv_counts, const std::vector<std::size_t>& recv_offsets,
                       DType dtype, const CallOptions& options);
  WorkPtr send(const void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options);
  // peer may be kAnyPeer on the CPUs of one host. A rank that died ends such a recv with PeerLost, since the message
  // may have been its own; ranks that left do so once all others have.
  WorkPtr recv(void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options);
  virtual WorkPtr barrier(const CallOptions& options);

  // Collective. Ranks of equal `color` form a new communicator, ordered by (key, rank); color < 0 takes no part and
  // gets null.
  //   right:  every rank: part = c->split(c->rank() < 2 ? 0 : -1, c->rank(), "first two");
  //   wrong:  if (c->rank() < 2) part = c->split(0, c->rank(), "first two");   -> Mismatch with the others' next call
  virtual std::shared_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  // Ends every pending operation of this communicator on every rank with Aborted(reason), from any thread, also while
  // another one waits. Idempotent: the first reason stays. Never waits for a peer.
  virtual void abort(const std::string& reason) = 0;
  // The same, of a rank that an error of its own ends: its peers get PeerLost of this rank, and `error` ("raised
  // ValueError: bad batch") says what happened to it.
  virtual void give_up(const std::string& error) = 0;
  // After give_up(), before the process ends: waits until the peers know, at most so long. What a network has not
  // delivered by then may be lost.
  virtual void until_heard(Milliseconds) {}
  // Of operations that set none, and of splits, from here on; what is pending keeps the one it has. Returns the one
  // before.
  virtual Milliseconds set_timeout(Milliseconds timeout) = 0;
  // What ended this communicator, here or at a peer that has told, as a waiter was or would be told; null while it
  // takes operations, and after a shutdown in peace. For a thread that watches; never waits.
  virtual std::exception_ptr failure() = 0;
  // Waits for this rank's pending operations, says "left" to the peers and releases memory. Idempotent; later calls
  // throw Error ("is closed"). A peer that still needs this rank gets PeerLost ("left").
  virtual void shutdown() = 0;

 protected:
  // A checked request for an operation that reduces.
  Request reduction(Kind kind, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                    std::optional<int> root = {}) const;
  // Takes a checked request; refuses it when the communicator can take none.
  virtual WorkPtr issue(Request request, const CallOptions& options) = 0;
  // Throws Error for a blocking call inside a group.
  static void check_group(const Request& request, const CallOptions& options);
  // All-gathers `mine`, of equal length everywhere, over this communicator.
  std::string gather_bytes(const std::string& mine);
  // Of a split: the ranks that pass this rank's `color`, ordered by (key, rank). Every rank must call it, none in a
  // group.
  std::vector<int> split_members(int color, int key);

 private:
  // `root`: of an operation that has one, or the peer of a message.
  Request request(Kind kind, const void* in, void* out, std::size_t count, DType dtype,
                  std::optional<int> root = {}) const;
  std::vector<std::size_t> to_bytes(const char* what, const std::vector<std::size_t>& counts, DType dtype) const;
};

// Between group_start and group_end, of one thread, operations are recorded; group_end issues them as one launch, on
// whatever communicators they are. Groups nest; the outermost end issues. Blocking calls inside a group throw Error.
//     right:  group_start(); a = x.all_reduce(s); b = y.broadcast(t); group_end(); a->wait(); b->wait();
//     wrong:  group_start(); x.all_reduce(s)->wait(); ...   -> Error: nothing has been launched that could complete
void group_start();
void group_end();

}  // namespace axo

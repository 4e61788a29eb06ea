// Work: one pending operation, and the three ways to wait for it.
//
// wait()         orders the caller after the operation. On a GPU it makes the caller's current stream wait and returns
//                at once; on the host it blocks. Call it before you read a result or reuse an input.
// synchronize(t) blocks the host thread until the operation is complete, at most `t`.
// is_completed() never blocks.
//
// Any of them throws, or rethrows, the error that the operation ended with.
//
//   right:  auto work = comm.all_reduce(t, ...);  compute_on(other);  work->wait();  use(t);
//   wrong:  auto work = comm.all_reduce(t, ...);  use(t);  work->wait();     // t is being written
//   wrong:  comm.all_reduce(t, ...);  free(t);                               // still pending: it reads and writes t
//
// Lifetimes. A Work, and the operation behind it, hold CallOptions::keep_alive until the operation is complete *and* it
// has been waited for or dropped; they never rely on an allocator. Without keep_alive the memory is the caller's to
// keep. Dropping a Work does not cancel the operation; only an error, or abort(), ends it early. What was kept alive is
// destroyed on a thread of the program, never on the core's own (of a GPU: device/communicator.h).
// Time. Timeouts are in milliseconds, seconds() in seconds. An operation's own timeout (CallOptions::timeout) runs from
// its issue and ends the communicator; that of synchronize() ends the waiting only.
// Threads. All functions may be called from any thread, also from several at once.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>

namespace axo {

using Milliseconds = std::chrono::milliseconds;
inline constexpr Milliseconds kNoTimeout{-1};

class Work {
 public:
  virtual ~Work() = default;

  virtual void wait() = 0;
  // wait() for another stream than the one of the call (a GPU stream handle); on the host the same as wait().
  virtual void wait_on(void* stream) {
    (void)stream;
    wait();
  }
  // Keeps `object` until what `stream` holds now is complete: what copies there read, after the operation, was memory
  // of the caller's stream. On the host there is nothing to wait for.
  virtual void keep_until(void* stream, std::shared_ptr<void> object) {
    (void)stream;
    (void)object;
  }
  // Throws Timeout when the operation is still pending after `timeout`; the operation itself goes on.
  virtual void synchronize(Milliseconds timeout) = 0;
  virtual bool is_completed() const = 0;
  // The error that the operation ended with; null while it is pending or when it succeeded.
  virtual std::exception_ptr exception() const = 0;
  // Runs `callback` once when the operation is complete, with or without an error; at once when it already is.
  // It runs on the thread that completed the operation: it must be short and must not call into the communicator.
  virtual void on_completion(std::function<void()> callback) = 0;
  // From issue to completion, in seconds; negative while pending or when timing was not asked for.
  virtual double seconds() const = 0;
  // recv: the rank whose message it took. -1 before that, and for everything else.
  virtual int source() const { return -1; }
};

using WorkPtr = std::shared_ptr<Work>;

// `check` is called by a thread that blocks in the host transport: soon after a signal handler ran in it, and a few
// times a second. An exception that it throws ends the waiting, as a language's own interrupt does. A pending operation
// then stays pending and can be waited for again; an interrupted blocking call ends its operation by aborting the
// communicator, since its buffers are the caller's again. One check a process; null takes it away.
void set_interrupt_check(void (*check)());

}  // namespace axo

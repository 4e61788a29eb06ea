// What the works of all transports share: what was asked, how far it is, how it ended, and what it keeps alive.
//
// A work is recorded (inside a group), then issued, then complete. A transport derives from WorkState, says in
// wait_until() how a thread waits, and calls issued() and complete().
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "base/deadline.h"
#include "base/flight_recorder.h"
#include "base/operation.h"

namespace axo {

class WorkState : public Work {
 public:
  // `timeout`: the communicator's own, for a call that sets none. `on_device`: what was kept alive may be destroyed on
  // any thread, and after an error not before the work, since the device may still be writing to it.
  WorkState(Request request, const CallOptions& options, Milliseconds timeout, bool on_device = false);
  // The last reference may be that of a thread of the core's: memory of the host then goes to release_later().
  ~WorkState() override;

  void wait() override;
  void synchronize(Milliseconds timeout) override;
  bool is_completed() const override { return done_.load(std::memory_order_acquire); }
  std::exception_ptr exception() const override;
  void on_completion(std::function<void()> callback) override;
  double seconds() const override;

  // For the transport.
  // The clock of the timeout starts; `flight`, where there is one, takes note.
  void issued(std::uint64_t sequence, FlightRecorder* flight);
  // Ends the operation; null: well. True for the first end, which counts. Runs the callbacks; never throws.
  bool complete(std::exception_ptr error, Clock::time_point time = Clock::now()) noexcept;
  // The same in two steps: from the first on it is complete for everybody, and who has taken it takes the second.
  bool settle(std::exception_ptr error, Clock::time_point time) noexcept;
  void call_back() noexcept;
  // The operation could not be issued: it ends with `error`.
  void refuse(std::exception_ptr error);
  bool has_callbacks() const;
  std::string title() const;     // "all_reduce(float32[8], sum) #12"
  std::string describe() const;  // "all_reduce(float32[8], sum) #12 on 'world' (rank 0 of 2)"

  const Request request;
  std::uint64_t sequence() const { return sequence_; }
  std::uint64_t flight() const { return flight_; }  // its number in the flight recorder
  Clock::time_point issue_time() const { return issue_time_; }
  Clock::time_point deadline() const { return deadline_; }
  std::string timed_out() const;  // "timed out after 1.003 s (its timeout is 1.000 s)"

 protected:
  virtual const Member& member() const = 0;                // of the communicator
  virtual Operation operation() const { return request; }  // as far as it is known by now
  // Returns when the operation is complete, or at `deadline`. Called once it is issued.
  virtual void wait_until(Clock::time_point deadline) = 0;
  // Throws Error while the operation is recorded in a group.
  void check_issued() const;
  [[noreturn]] void throw_recorded() const;
  // After the waiting: lets go of what was kept alive and throws the operation's error.
  void finish_wait();
  // The caller's stream is ordered after the operation: what is kept alive goes now, or when the operation is complete.
  void waited_on_stream(bool now);

 private:
  const Milliseconds timeout_;
  const bool on_device_;
  std::uint64_t sequence_ = 0, flight_ = FlightRecorder::kNone;
  Clock::time_point issue_time_{}, end_time_{}, deadline_ = Clock::time_point::max();
  std::atomic<bool> issued_{false}, done_{false};
  mutable std::mutex mutex_;
  bool waited_ = false;
  std::exception_ptr error_;
  std::shared_ptr<void> keep_alive_;
  std::vector<std::function<void()>> callbacks_;
};

using WorkStatePtr = std::shared_ptr<WorkState>;

// What an operation kept alive must be destroyed on a thread of the program, never on one of the core's: it is put on a
// list of the process, which the next call of the program empties.
void release_later(std::shared_ptr<void> object);
void release_now();

// Calls what set_interrupt_check (base/work.h) was given, if anything.
void check_interrupt();

}  // namespace axo

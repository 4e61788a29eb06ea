// Who meets whom, from where, and what a rank says when the meeting fails: what a rendezvous needs besides its sockets.
#pragma once

#include <string>

#include "base/communicator.h"
#include "base/deadline.h"
#include "progress/engine.h"
#include "base/identity.h"
#include "host/layout.h"

namespace axo::host {

// Why there will be no communicator. Thrown inside a rendezvous only; raise() makes the error of it that a caller sees.
struct Refusal {
  FailureKind kind = FailureKind::aborted;
  int peer = -1;
  std::string text;  // without the words that each rank adds: where, and how long it waited
};

// One rank's part in one rendezvous.
struct Meeting {
  std::string what;  // "rendezvous of 'world'"
  int rank;
  int size;
  Clock::time_point deadline;
  Clock::time_point start = Clock::now();
  bool late() const { return Clock::now() >= deadline; }
  [[noreturn]] void raise(const Refusal& refusal) const;
};

// The thread of another rank that has come to meet, and does nothing else until it has met.
class Caller {
 public:
  Caller() = default;
  // `space` is process_space() of the rank that wrote the numbers: in another one they say nothing.
  Caller(int pid, int tid, const std::string& space);
  // Whether the thread, and so its rank, is no more. False when that cannot be told.
  bool gone() const;

 private:
  Fd pidfd_;
  int pid_ = 0, tid_ = 0;
};

}  // namespace axo::host

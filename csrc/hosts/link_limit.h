// A rate limit on what leaves a host, for tests, benches and the planner's validation.
//
// One word in the shared page of the process of a host's first rank says when the host's link is free again. Whoever
// sends reserves the time that its bytes take and waits until they would have left: T = latency + bytes / rate, over
// all ranks of a communicator that share a host, and all that are split from it. Only what goes to another rank over
// the wire counts, without the heads of frames.
#pragma once

#include <cstdint>
#include <memory>

#include "base/deadline.h"
#include "progress/process_life.h"

namespace axo::hosts {

inline constexpr std::size_t kMostPayload = std::size_t{4} << 20;  // of one frame, in bytes

// A link: bytes a second (0: no limit) and the seconds that a step takes beside its bytes.
struct Link {
  double rate = 0;
  double latency = 0;
};

// What the communicators that this process makes from here on believe of their host's link. Throws Error for a rate
// below 1 byte a second or a latency of a minute and more.
void simulate_link(Link link);

class LinkLimit {
 public:
  // The link of simulate_link(). `keeper` has the word in its page.
  explicit LinkLimit(std::shared_ptr<Process> keeper);

  Clock::duration latency() const { return latency_; }
  // Bytes to send at a time: so few that several communicators take turns.
  std::size_t chunk() const { return chunk_; }
  // When the last of `bytes` will have left, once everything reserved before has: they were ready at `since`.
  Clock::time_point reserve(std::size_t bytes, Clock::time_point since) const;

 private:
  double rate_;
  Clock::duration latency_;
  std::size_t chunk_ = kMostPayload;
  std::shared_ptr<Process> keeper_;
};

}  // namespace axo::hosts

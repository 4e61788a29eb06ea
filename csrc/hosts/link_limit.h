// A rate limit on what leaves a host, for benches and for the planner's validation: AXO_LINK_LIMIT, AXO_LINK_LATENCY.
//
// One word in the shared page of one process of the host says when its link is free again; whoever sends reserves the
// time that its bytes take and sleeps until they would have left: T = latency + bytes / rate, over all ranks and all
// communicators of the host together. Only what goes to another host counts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "progress/engine.h"

namespace axo::span {

// What the environment asks of a link: bytes a second (0: no limit) and the time that a step takes beside its bytes.
struct LinkSettings {
  double rate = 0;
  Clock::duration latency{0};

  static LinkSettings from_environment();  // throws Error for a value that is not a rate or a time
};

class LinkLimit {
 public:
  // With LinkSettings::from_environment. `keeper` holds the word; the first one that a process names serves all its
  // communicators.
  static std::shared_ptr<const LinkLimit> from_environment(const std::shared_ptr<Process>& keeper);

  bool limited() const { return settings_.rate > 0; }
  Clock::duration latency() const { return settings_.latency; }
  // Bytes to send at a time: so few that several communicators take turns.
  std::size_t chunk() const { return chunk_; }
  // When the last of `bytes` will have left, once everything reserved before has.
  Clock::time_point reserve(std::size_t bytes) const;

 private:
  LinkSettings settings_;
  std::size_t chunk_ = 0;
  std::shared_ptr<Process> keeper_;
};

// "200M" -> 2e8, "1.5G" -> 1.5e9 (bytes a second); "50us" -> 5e-5, "2ms" -> 2e-3 (seconds). Throw Error otherwise.
double parse_rate(const std::string& text);
double parse_seconds(const std::string& text);

}  // namespace axo::span

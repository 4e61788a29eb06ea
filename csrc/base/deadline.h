// The clock, time limits as points in time, and how long ago one was.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>

#include "base/work.h"

namespace axo {

using Clock = std::chrono::steady_clock;

// Negative is "no limit": a year, as is all that is longer, since sums of clocks overflow after 292 of them.
inline Milliseconds limited(Milliseconds timeout) {
  constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);
  return timeout < Milliseconds::zero() ? kLongest : std::min(timeout, kLongest);
}

// When `timeout` will have passed since `start`.
inline Clock::time_point deadline_after(Milliseconds timeout, Clock::time_point start = Clock::now()) {
  return start + limited(timeout);
}

// "0.123 s", for errors that say how long somebody waited.
inline std::string seconds_text(Clock::duration time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f s", std::chrono::duration<double>(time).count());
  return text;
}
inline std::string seconds_since(Clock::time_point start) { return seconds_text(Clock::now() - start); }

}  // namespace axo

// How a rank should write what its peers will copy: through the caches, or around them?
//
// Cores that share a cache hand data over fastest inside it. Cores that do not (two sockets, two chiplets, a virtual
// machine whose hypervisor has moved them apart) fetch each line out of the other's cache, which can be slower than
// memory: 256 MiB were broadcast in 12 ms through the caches and 18 around them between near cores, in 17 and 10
// between far ones, on one machine within a minute. So large collectives try the other way now and then for a window of
// rounds and keep what is faster.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace axo::host {

class WriteMode {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // A window is this many rounds; the first of them, while the ring still holds what the other way has written, do not
  // count.
  static constexpr int kWindow = 24, kSettle = 8;
  // Windows between two trials: few after a change, then ever more.
  static constexpr int kSoon = 8, kSeldom = 128;

  // Whether the next round is written around the caches.
  bool around() const { return around_ != trying_; }

  // A new collective starts a new window. The pause between two collectives is not measured. Windows of collectives
  // with another `like`, whose rounds do other work, are not compared.
  void begin(int like = 0) {
    round_ = 0;
    if (like == like_) return;
    like_ = like;
    trying_ = false;
    left_ = std::max(left_, 2);
  }

  // A round is written.
  void staged(Time now) {
    ++round_;
    if (round_ == kSettle) start_ = now;
    if (round_ < kWindow) return;
    round_ = 0;
    took(now - start_);
  }

 private:
  using Duration = Time::duration;

  void took(Duration time) {
    if (!trying_) {
      before_ = usual_;
      usual_ = time;
      if (--left_ <= 0) trying_ = true;
      return;
    }
    trying_ = false;
    // The less of two windows, so that one that was interrupted decides nothing; a tenth, so that noise does not.
    const bool better = time < std::min(usual_, before_) * 9 / 10;
    around_ = around_ != better;
    between_ = better ? kSoon : std::min(2 * between_, kSeldom);
    left_ = between_;
  }

  int round_ = 0, like_ = 0;
  int left_ = 2, between_ = kSoon;
  bool around_ = false, trying_ = false;
  Time start_{};
  Duration usual_ = Duration::max(), before_ = Duration::max();
};

}  // namespace axo::host

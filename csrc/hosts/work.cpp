// Waiting for an operation of a communicator that spans hosts; see base/work.h.
#include <algorithm>

#include "hosts/core.h"

namespace axo::span {

SpanWork::SpanWork(std::shared_ptr<SpanCore> core, Request r, const CallOptions& options)
    : WorkState(std::move(r), options, core->parts().timeout), core_(std::move(core)) {}

const Member& SpanWork::member() const { return core_->member(); }

void SpanWork::end(std::exception_ptr error) {
  complete(std::move(error));
  {
    std::lock_guard<std::mutex> lock(mutex_);
  }  // who waits sleeps by now, or has yet to look
  changed_.notify_all();
}

void SpanWork::wait_until(Clock::time_point deadline) {
  constexpr auto kAskPeriod = std::chrono::milliseconds(250);
  for (;;) {
    core_->check_not_forked("wait");
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto until = std::min(deadline, Clock::now() + kAskPeriod);
      if (changed_.wait_until(lock, until, [this] { return is_completed(); })) return;
    }
    if (Clock::now() >= deadline) return;
    check_interrupt();
  }
}

void SpanWork::settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_completed(); });
}

}  // namespace axo::span

// One operation of a device communicator.
#pragma once

#include "base/work_state.h"
#include "device/context.h"
#include "device/levels.h"

namespace axo {

class DeviceWork final : public WorkState {
 public:
  DeviceWork(std::shared_ptr<DeviceCore> core, Request request, const CallOptions& options);

  void wait() override { wait_on(caller); }
  void wait_on(void* stream) override;
  void keep_until(void* stream, std::shared_ptr<void> object) override;
  void synchronize(Milliseconds timeout) override;
  bool is_completed() const override;
  std::exception_ptr exception() const override;
  void on_completion(std::function<void()> callback) override;
  double seconds() const override;
  int source() const override { return request.kind == Kind::recv ? request.root : -1; }

  // For the launch queue and the core.
  DeviceCore& core() const { return *core_; }
  const GpuStream caller;  // the stream of the call
  const GpuStream stream;  // where it runs
  const bool after_caller;
  LibraryCalls library_calls;
  void launched(EventPtr start, EventPtr done, bool captured);
  // Ends the operation; null: it is complete. The first end counts. Never throws.
  void finish(std::exception_ptr error) const noexcept;

 private:
  struct Launched {
    EventPtr start, done;  // `start` where timing is on
    bool captured = false;
  };
  const Member& member() const override;
  void wait_until(Clock::time_point deadline) override;
  Launched launched() const;  // throws the error that the operation ended with; `done` is null before the launch

  const std::shared_ptr<DeviceCore> core_;
  mutable std::mutex mutex_;
  Launched launched_;
};

using DeviceWorkPtr = std::shared_ptr<DeviceWork>;

}  // namespace axo

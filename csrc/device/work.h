// One operation of a device communicator: what was asked, how it is launched, and how it ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "device/context.h"

namespace axo {

using Clock = std::chrono::steady_clock;

// What was asked, in words: for messages and for the comparison between ranks.
struct Operation {
  const char* kind = "";
  DType dtype = DType::uint8;
  std::size_t count = 0;
  const char* reduce = nullptr;
  int root = -1;
  int peer = -1;  // send and recv
  int tag = 0;
  double scale = 1;
  bool point_to_point() const { return peer >= 0; }
  std::string text() const;  // "all_reduce of 1024 float32, sum"
};

// How it is launched. Each runs with its stream, on the launching thread; the first failure ends the operation.
struct Launch {
  std::function<void(GpuStream)> before = {};  // runtime calls that must come first (staging copies)
  std::function<int(GpuStream)> call;          // library calls only; returns the last NcclResult
  std::function<void(GpuStream)> after = {};
  bool several_calls = false;  // `call` needs a group of its own
};

class DeviceWork final : public Work {
 public:
  DeviceWork(std::shared_ptr<DeviceCore> core, Operation operation, Launch launch, const CallOptions& options);
  ~DeviceWork() override;

  void wait() override { wait_on(caller_); }
  void wait_on(void* stream) override;
  void synchronize(Milliseconds timeout) override;
  bool is_completed() const override;
  std::exception_ptr exception() const override;
  void on_completion(std::function<void()> callback) override;
  double seconds() const override;
  int source() const override;

  const Operation operation;
  const Launch launch;
  const bool after_caller;

  // For the launch queue and the core.
  DeviceCore& core() const { return *core_; }
  GpuStream caller() const { return caller_; }
  GpuStream stream() const { return stream_; }
  std::uint64_t sequence() const { return sequence_; }
  Clock::time_point deadline() const { return deadline_; }
  Clock::time_point issue_time() const { return issue_time_; }
  bool has_callbacks() const;
  void start_turn(std::uint64_t sequence);  // the clock of the timeout starts
  void launched(EventPtr start, EventPtr done, const Capture& capture);
  // Ends the operation; null: it is complete. The first end counts. Never throws.
  void finish(std::exception_ptr error) const noexcept;

 private:
  enum class Stage { recorded, launched, complete };
  struct Now {
    Stage stage;
    EventPtr done;
    bool captured;
  };
  Now now() const;  // throws the error that the operation ended with

  std::shared_ptr<DeviceCore> core_;
  GpuStream caller_, stream_;
  Milliseconds timeout_;
  std::uint64_t sequence_ = 0;
  std::uint64_t flight_ = 0;  // its number in the flight recorder
  Clock::time_point issue_time_{}, deadline_ = Clock::time_point::max();

  mutable std::mutex mutex_;
  mutable Stage stage_ = Stage::recorded;
  mutable std::exception_ptr error_;
  mutable std::vector<std::function<void()>> callbacks_;
  mutable std::shared_ptr<void> keep_alive_;
  EventPtr start_, done_;
  bool captured_ = false;
  bool waited_ = false;
};

}  // namespace axo

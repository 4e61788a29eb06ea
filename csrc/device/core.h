// The state of one device communicator: the library's handle, its stream, what is pending, and how it failed.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/flight_recorder.h"
#include "device/communicator.h"
#include "device/order_check.h"
#include "device/peers.h"
#include "device/work.h"

namespace axo {

class DeviceCore : public std::enable_shared_from_this<DeviceCore> {
 public:
  // Collective: initialises a communicator of the ranks that hold `id`.
  static std::shared_ptr<DeviceCore> create(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store,
                                            const std::string& key, const NcclUniqueId& id, int rank, int size,
                                            const DeviceOptions& options, std::shared_ptr<DevicePeers> peers);
  // Collective. Null for color < 0.
  std::shared_ptr<DeviceCore> split(int color, int key, const std::string& name);
  ~DeviceCore();

  int rank() const { return member_.rank; }
  int size() const { return member_.size; }
  const Member& member() const { return member_; }
  const std::string& key() const { return key_; }
  Milliseconds timeout() const { return options_.timeout; }
  bool timing() const { return options_.timing; }
  DeviceContext& context() const { return *context_; }
  const std::shared_ptr<DeviceContext>& shared_context() const { return context_; }
  const GpuRuntime& gpu() const { return context_->gpu(); }
  const NcclApi& nccl() const { return context_->nccl(); }
  GpuStream stream() const { return stream_; }
  void* scratch() const { return scratch_; }  // a zero word on the device, for barriers
  NcclComm comm() const { return comm_; }
  FlightRecorder& flight() const { return *flight_; }
  OrderCheck* order_check() const { return order_check_.get(); }

  // Throws when the communicator has failed, was aborted or shut down.
  void check_usable() const;

  // --- Within a turn of the launch queue. ---
  // Waits until the library is done with a call that said "in progress".
  void settle(int result, const char* function, Clock::time_point deadline);
  // Orders `stream` after `caller` and after this communicator's last operation.
  void order(GpuStream stream, GpuStream caller, bool after_caller, const Capture& capture);
  void launched(const DeviceWorkPtr& work, EventPtr start, EventPtr done, const Capture& capture);
  std::uint64_t next_sequence() { return ++issued_; }
  std::uint64_t issued() const { return issued_; }

  // The communicator has failed: every pending and later operation ends with `error`. The library's abort and the news
  // for other ranks follow on the watchdog's thread. The first error counts. Never blocks.
  void fail(std::exception_ptr error);
  std::exception_ptr failure() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // One look of the watchdog. Returns whether a callback waits.
  bool look();
  void shutdown();

  std::shared_ptr<void> register_buffer(void* data, std::size_t bytes, bool symmetric);

 private:
  DeviceCore(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store, std::string key, int rank, int size,
             DeviceOptions options);
  NcclConfig config() const;
  void start();  // the handle is there: stream, reservation, watchdog
  std::exception_ptr error_from(int result, const char* function) const;
  std::exception_ptr peer_lost(const std::string& where, int peer) const;
  void drop_finished();
  void check_library();
  void check_peers();
  std::string oldest_pending() const;
  void check_deadline();
  void hear_abort();
  bool adopt_failure();
  void clean_up_failure();
  void abort_library();
  void drop_registration(void* handle, bool symmetric);
  void drop_registrations();
  void close();
  std::string arrivals(std::uint64_t sequence);

  const std::shared_ptr<DeviceContext> context_;
  const std::shared_ptr<Store> store_;
  const std::string key_;
  Member member_;
  DeviceOptions options_;
  std::atomic<NcclComm> comm_{nullptr};
  GpuStream stream_ = nullptr;
  void* scratch_ = nullptr;
  bool owns_stream_ = false;
  bool started_ = false;
  std::shared_ptr<FlightRecorder> flight_;
  std::unique_ptr<OrderCheck> order_check_;
  std::shared_ptr<DevicePeers> peers_;  // from before the library connects
  std::atomic<std::uint64_t> issued_{0};
  int splits_ = 0;

  // The last operation: touched within a turn only.
  GpuStream last_stream_ = nullptr;
  EventPtr last_event_;
  Capture last_capture_;

  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  bool failure_cleaned_ = false;
  bool heard_ = false;  // another rank's abort, which needs no passing on
  std::atomic<bool> closed_{false};
  std::deque<DeviceWorkPtr> pending_;
  std::set<void*> registrations_, windows_;
  Clock::time_point next_hearing_{}, next_roll_{};
};

// create_device_communicator without its outer shell.
std::shared_ptr<DeviceCore> create_device_core(const std::shared_ptr<Store>& store, const std::string& key, int rank,
                                               int size, const DeviceOptions& options);

}  // namespace axo

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

// What a failed rank tells the others begins with one of these, the first with the rank that is lost.
inline constexpr const char* kToldLost = "lost:";
inline constexpr const char* kToldAborted = "aborted";

class DeviceCore : public std::enable_shared_from_this<DeviceCore> {
 public:
  // Collective: initialises a communicator of the ranks that hold `id`.
  static std::shared_ptr<DeviceCore> create(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store,
                                            const std::string& key, const NcclUniqueId& id, int rank, int size,
                                            const DeviceOptions& options, std::shared_ptr<DevicePeers> peers);
  // Collective. Null for color < 0. max_ctas: a cap of its own, which reserved_ctas() leaves out; 0: the parent's.
  std::shared_ptr<DeviceCore> split(int color, int key, const std::string& name, int max_ctas = 0);
  ~DeviceCore();
  // Collective, of a communicator that is new: makes its levels, where its ranks lie as a row of options.composed says.
  void compose();
  const Levels* levels() const { return levels_.get(); }

  int rank() const { return member_.rank; }
  int size() const { return member_.size; }
  const Member& member() const { return member_; }
  const std::string& key() const { return key_; }
  Milliseconds timeout() const { return timeout_.load(); }
  Milliseconds set_timeout(Milliseconds timeout) {
    if (order_check_) order_check_->set_timeout(timeout);
    return timeout_.exchange(timeout);
  }
  bool timing() const { return options_.timing; }
  bool shares_buffers() const { return options_.split_share; }
  DeviceContext& context() const { return *context_; }
  const std::shared_ptr<DeviceContext>& shared_context() const { return context_; }
  const GpuRuntime& gpu() const { return context_->gpu(); }
  const NcclApi& nccl() const { return context_->nccl(); }
  GpuStream stream() const { return stream_; }
  void* scratch() const { return scratch_; }  // the context's zero word
  NcclComm comm() const { return comm_; }
  FlightRecorder& flight() const { return *flight_; }
  OrderCheck* order_check() const { return order_check_.get(); }

  // Throws when the communicator has failed, was aborted or shut down.
  void check_usable() const;

  // --- Within a turn of the launch queue. ---
  // A call of the library's, which may wait inside it for peers: the watchdog then ends it at `deadline`, or when a
  // peer has died or the communicator is aborted. leave() throws what has happened, else Error unless `result` is
  // success.
  void enter(const char* function, Clock::time_point deadline);
  void leave(int result);
  [[noreturn]] void refuse_nonblocking(const std::string& why) const;
  // Orders `stream` after `caller` and after the last operation: of this communicator, or of all on the shared stream.
  void order(GpuStream stream, GpuStream caller, bool after_caller, const Capture& capture);
  void launched(const DeviceWorkPtr& work, EventPtr start, EventPtr done, const Capture& capture);
  bool captures() const;  // its last operation is part of a graph that is not complete
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
  int reserved_ctas() const;
  NcclConfig config(int cap) const;  // on thread blocks, 0: none
  void prepare();                    // what the watchdog needs
  void start();                      // the handle is there: stream, reservation
  // enter() and leave() around `library_call`, within the communicator's own timeout.
  template <class LibraryCall>
  void call(const char* function, const LibraryCall& library_call) {
    enter(function, deadline_after(timeout()));
    leave(library_call());
  }
  std::exception_ptr error_from(int result, const char* function) const;
  std::exception_ptr peer_lost(const std::string& where, int peer) const;
  void drop_finished();
  void check_library();
  void check_call();
  void check_peers();
  bool hangs() const;
  std::string oldest_pending() const;
  void check_deadline();
  void hear_abort();
  bool adopt_failure();
  void tell_failure();
  void clean_up_failure();
  void end_elsewhere();
  void end_library();
  NcclComm take_library();
  void drop_registration(void* handle, bool symmetric);
  void drop_registrations();
  void close();
  void check_graphs() const;
  std::string arrivals(std::uint64_t sequence);

  const std::shared_ptr<DeviceContext> context_;
  const std::shared_ptr<Store> store_;
  const std::string key_;
  Member member_;
  DeviceOptions options_;
  // The library writes the handle into `slot_`, also at the end of a call that has failed; `making_` while it may.
  NcclComm slot_ = nullptr;
  std::atomic<bool> making_{false};
  std::atomic<Milliseconds> timeout_;
  std::atomic<NcclComm> comm_{nullptr};
  GpuStream stream_ = nullptr;
  void* scratch_ = nullptr;
  bool owns_stream_ = false;
  std::atomic<bool> started_{false};
  std::shared_ptr<FlightRecorder> flight_;
  std::unique_ptr<OrderCheck> order_check_;
  std::shared_ptr<DevicePeers> peers_;  // from before the library connects
  std::atomic<std::uint64_t> issued_{0};
  int splits_ = 0;

  // Graphs that hold launches of it: their last references go on threads of the runtime's, perhaps after this.
  // Of a level: those of the communicator that it is of.
  std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);
  unsigned long long counted_capture_ = 0;

  LastLaunch own_last_;
  LastLaunch* last_ = &own_last_;

  mutable std::mutex mutex_;
  std::shared_ptr<const Levels> levels_;  // null: nothing is composed
  std::weak_ptr<DeviceCore> whole_;       // that this is a level of
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  bool failure_told_ = false;
  bool heard_ = false;  // another rank's abort, which needs no passing on
  std::atomic<bool> closed_{false};
  std::atomic<bool> ending_{false};  // a thread is aborting the library's communicator
  struct Inside {                    // a thread is inside the library
    const char* function = nullptr;
    Clock::time_point since{}, deadline{};
  };
  Inside inside_;
  std::deque<DeviceWorkPtr> pending_;
  std::set<void*> registrations_, windows_;
  Clock::time_point next_hearing_{}, next_roll_{};
};

// create_device_communicator without its outer shell.
std::shared_ptr<DeviceCore> create_device_core(const std::shared_ptr<Store>& store, const std::string& key, int rank,
                                               int size, const DeviceOptions& options);

}  // namespace axo

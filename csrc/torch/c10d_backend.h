// The torch.distributed backend `axo`: c10d::Backend over Communicators, for CPU tensors and for those of one GPU.
//
// Devices. The communicator of the host is made with the backend, that of a GPU with eager_connect_single_device
// (init_process_group(device_id=...)) or with the first collective on it; a send or recv before makes one for the pair.
// On a GPU a call is ordered after the current stream; wait() lets the current stream go on after the operation, and
// the host waits only when wait() has a timeout. A future is complete at once, in the order of streams, as NCCL's are.
//
// All collectives in their tensor, list, `_base` and coalesced forms; parts of unequal size where torch's API can state
// them (all_gather, gather, scatter, reduce_scatter, all_to_all). Any tensor may be non-contiguous: it then travels
// through a copy, and the result is exact. dtypes that cannot be reduced (fp8, complex, unsigned 16 to 64) still move,
// as bytes; complex sums and averages go as their real and imaginary parts. A receive from any source is for CPU
// tensors of ranks on one host.
//
// Sparse tensors (COO, on the CPU) can be summed and averaged: their elements are gathered, then added up by each rank.
//
// Completion. Some results need a step after the operation: lists and views are copied to where the caller wants them,
// sparse sums are added up. Whoever sees the operation complete makes the step: a wait or isCompleted, of this Work or
// a later one, a later blocking call, and else, for a handle that was dropped, the thread that completes futures
// (torch/future_thread.h). Never the core's own thread: a large copy there would hold up every other operation and
// start a pool of threads, and what it lets go of may want the GIL. On a device the steps follow in the order of
// streams, at once.
//
// Overlap. Input and output may share memory in any way: where it is not one that the core takes as "in place", the
// input is copied first. An output whose own elements share memory (expanded) is refused.
//
// Order. A hook of DistributedDataParallel issues collectives from callbacks of futures, which would run on another
// thread than the reducer's, beside its next hooks. So a future that Python asks for in backward is complete when it is
// given: callbacks run at once, and all ranks issue in one order.
#pragma once

#include <c10/core/Event.h>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/store.h"
#include "device/communicator.h"
#include "torch/c10d_versions.h"

namespace axo {

// axo::Store over a c10d::Store (TCPStore, FileStore, PrefixStore, or one written in Python).
class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override;
  bool has(const std::string& key) override;
  std::string get(const std::string& key, Milliseconds timeout) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

using Tensors = std::vector<at::Tensor>;

// What makes a result complete once its operations are: a copy to where the caller wants it, say.
using Step = std::function<void()>;

class C10dWork final : public WorkOfTorch {
 public:
  C10dWork(int rank, c10d::OpType op, const char* title, const Tensors& inputs, std::uint64_t sequence,
           std::chrono::milliseconds timeout);
  // May be called several times: a coalesced launch is one Work of many operations.
  void start(std::vector<WorkPtr> parts, Tensors outputs, std::vector<Step> last_steps, at::Device device);
  // The operations are issued and nobody has to wait: from here on the last steps are made whoever holds this.
  void launched();
  // Makes the last steps of all works whose operations are complete.
  static void deliver_completed();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  std::uint64_t getSequencenumber() const override { return sequence_; }
  std::chrono::milliseconds getTimeout() const override { return timeout_; }

 private:
  bool parts_completed() const;
  std::exception_ptr part_exception() const;
  void finish();
  void complete_future();
  // On a stream of its own, which comes after the operation and the last steps.
  void finish_in_order(const std::function<void()>& then);

  std::vector<WorkPtr> parts_;
  Tensors outputs_;
  std::vector<Step> last_steps_;
  std::optional<c10::Event> copied_;  // the end of the last steps on the device's stream that they ran on
  std::mutex finish_mutex_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  const std::uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> steps_left_{false};
  std::atomic<bool> step_failed_{false};
  std::exception_ptr step_exception_;  // written before step_failed_ is set
  at::Device device_{at::kCPU};
};

class C10dBackend final : public BackendOfTorch {
 public:
  // What split_group copies; it has nothing that torch's own has not.
  struct C10dOptions final : Options {
    using Options::Options;
  };
  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  C10dBackend(c10::intrusive_ptr<c10d::Store> store, std::string key, std::shared_ptr<Communicator> communicator,
              Milliseconds timeout);
  ~C10dBackend() override;

  const std::string getBackendName() const override { return "axo"; }
  // Copies: torch writes the name and the timeout of a part into them.
  c10::intrusive_ptr<Options> getBackendOptions() override { return options(); }
  c10::intrusive_ptr<C10dOptions> options() { return c10::make_intrusive<C10dOptions>(*options_); }
  // That of CPU tensors, for whoever wants to issue on it too.
  std::shared_ptr<Communicator> communicator() { return communicator_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  c10d::ErrorType getError() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void abort() override;
  void shutdown() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void eagerConnectSingleDevice(at::Device device) override { communicator_of(device); }
  void startCoalescing() override;
  WorkHandle endCoalescing() override;

  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkHandle allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkHandle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkHandle all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkHandle allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& opts) override;
  WorkHandle all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) override;
  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkHandle gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  WorkHandle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkHandle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ReduceScatterOptions& opts) override;
  WorkHandle reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override;
  WorkHandle reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& opts) override;
  WorkHandle all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkHandle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkHandle send(Tensors& tensors, int peer, int tag) override;
  WorkHandle recv(Tensors& tensors, int peer, int tag) override;
  WorkHandle recvAnysource(Tensors& tensors, int tag) override;
  WorkHandle barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  struct Launch;  // one call on its way: options, works, copies (torch/c10d_launch.h)

  void reduce_all(Launch& launch, const at::Tensor& t, const c10d::ReduceOp& op);
  void gather_into(Launch& launch, const at::Tensor& output, const at::Tensor& input);
  void gather_list(Launch& launch, const Tensors& outputs, const at::Tensor& input);
  void scatter_from(Launch& launch, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);

  // That of all ranks for tensors of `device`; made when it is not there, which all ranks then do.
  Communicator& communicator_of(at::Device device);
  // The same for a transfer with `peer`, whose rank there it becomes.
  Communicator& communicator_with(at::Device device, int& peer);
  std::shared_ptr<DeviceCommunicator> connect(const std::string& key, int rank, int size, at::Device device);
  // Puts a communicator that has just been made where abort() finds it.
  std::shared_ptr<DeviceCommunicator> made(std::shared_ptr<DeviceCommunicator>& place,
                                           std::shared_ptr<DeviceCommunicator> communicator);
  std::shared_ptr<DeviceCommunicator> device_communicator();
  std::vector<std::shared_ptr<Communicator>> communicators();  // the host's last

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  std::shared_ptr<Communicator> communicator_;
  std::mutex connect_mutex_;  // held while ranks meet: one communicator at a time is made
  std::mutex device_mutex_;   // of the communicators below; never held for long
  std::shared_ptr<DeviceCommunicator> device_communicator_;
  std::map<int, std::shared_ptr<DeviceCommunicator>> pairs_;  // by peer
  at::Device device_{at::kCPU};                               // under connect_mutex_
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  int splits_ = 0;
  c10::weak_intrusive_ptr<c10d::Store> split_store_{c10::intrusive_ptr<c10d::Store>()};     // of the last split
  c10::weak_intrusive_ptr<c10d::Backend> split_part_{c10::intrusive_ptr<c10d::Backend>()};  // and what it gave
  c10::intrusive_ptr<C10dOptions> options_;
  std::atomic<std::uint64_t> sequence_{0};
  // Non-null between startCoalescing and endCoalescing.
  c10::intrusive_ptr<C10dWork> coalesced_;
};

}  // namespace axo

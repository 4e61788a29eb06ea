// C10dBackend: see torch/c10d_backend.h. Its life, and the collectives without parts; the others are in torch/c10d_collectives.cpp.
// Each collective reads: checks, a Launch, buffers, one core call (or several as a group), end.
#include "torch/c10d_launch.h"

namespace axo {

C10dBackend::C10dBackend(c10::intrusive_ptr<c10d::Store> store, std::string key,
                         std::shared_ptr<Communicator> communicator, Milliseconds timeout)
    : c10d::Backend(communicator->rank(), communicator->size()),
      store_(std::move(store)),
      key_(std::move(key)),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<C10dOptions>("axo", timeout)) {
  init();
}

C10dBackend::~C10dBackend() = default;

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  const int color = mine == ranks.end() ? -1 : *std::min_element(ranks.begin(), ranks.end());
  const std::string name = options ? options->group_name : "split";
  const std::string key = key_ + "/split" + std::to_string(++splits_) + "/" + std::to_string(color);
  auto part = communicator_->split(color, int(mine - ranks.begin()), name);
  std::shared_ptr<Communicator> device_part;
  if (const auto there = device_communicator()) device_part = there->split(color, int(mine - ranks.begin()), name);
  if (!part) return nullptr;
  auto child = c10::make_intrusive<C10dBackend>(store ? store : store_, key, part,
                                                options ? options->timeout : options_->timeout);
  child->device_communicator_ = std::static_pointer_cast<DeviceCommunicator>(device_part);
  std::lock_guard<std::mutex> one(connect_mutex_);
  child->device_ = device_;
  return child;
}

void C10dBackend::startCoalescing() {
  TORCH_CHECK(!coalesced_, "axo: startCoalescing inside startCoalescing");
  coalesced_ =
      c10::make_intrusive<C10dWork>(getRank(), c10d::OpType::COALESCED, "axo:coalesced", Tensors{}, sequence_.load());
  group_start();
}

C10dBackend::WorkHandle C10dBackend::endCoalescing() {
  TORCH_CHECK(coalesced_, "axo: endCoalescing without startCoalescing");
  WorkHandle work = std::move(coalesced_);
  coalesced_ = nullptr;
  group_end();
  return work;
}

C10dBackend::WorkHandle C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& t = only("broadcast", tensors);
  Launch launch(*this, c10d::OpType::BROADCAST, "axo:broadcast", tensors, opts.timeout, opts.asyncOp);
  const auto [dtype, count] = moved(t);
  const at::Tensor buffer = launch.out(t, true);
  launch.parts.push_back(launch.core().broadcast(buffer.data_ptr(), count, dtype, int(opts.rootRank), launch.options));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& t = only("all_reduce", tensors);
  const ReduceOp op = op_of(opts.reduceOp);
  const auto [dtype, count] = reduced("all_reduce", t, op);
  Launch launch(*this, c10d::OpType::ALLREDUCE, "axo:all_reduce", tensors, opts.timeout, opts.asyncOp);
  const at::Tensor buffer = launch.out(t, true);
  const auto factor = device_factor(opts.reduceOp, t);
  const void* in = launch.in(factor ? buffer : premultiplied(buffer, opts.reduceOp));
  launch.parts.push_back(launch.all_reduce(in, buffer.data_ptr(), count, dtype, op, factor));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::allreduce_coalesced(Tensors& tensors,
                                                         const c10d::AllreduceCoalescedOptions& opts) {
  const ReduceOp op = op_of(opts.reduceOp);
  for (const at::Tensor& t : tensors) {
    check("all_reduce_coalesced", t);
    reduced("all_reduce_coalesced", t, op);
  }
  Launch launch(*this, c10d::OpType::ALLREDUCE_COALESCED, "axo:all_reduce_coalesced", tensors, opts.timeout,
                opts.asyncOp, Launch::grouped_launch);
  for (const at::Tensor& t : tensors) {
    const auto [dtype, count] = reduced("all_reduce_coalesced", t, op);
    const at::Tensor buffer = launch.out(t, true);
    const auto factor = device_factor(opts.reduceOp, t);
    const void* in = launch.in(factor ? buffer : premultiplied(buffer, opts.reduceOp));
    launch.parts.push_back(launch.all_reduce(in, buffer.data_ptr(), count, dtype, op, factor));
  }
  return launch.end(tensors);
}

C10dBackend::WorkHandle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& t = only("reduce", tensors);
  const ReduceOp op = op_of(opts.reduceOp);
  const auto [dtype, count] = reduced("reduce", t, op);
  Launch launch(*this, c10d::OpType::REDUCE, "axo:reduce", tensors, opts.timeout, opts.asyncOp);
  const void* in = launch.in(premultiplied(t, opts.reduceOp));
  void* out = opts.rootRank == getRank() ? launch.out(t).data_ptr() : nullptr;
  launch.parts.push_back(launch.core().reduce(in, out, count, dtype, op, int(opts.rootRank), launch.options));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::barrier(const c10d::BarrierOptions& opts) {
  at::Device device = opts.device && is_accelerator(*opts.device) ? *opts.device : at::Device(at::kCPU);
  if (!device.is_cpu() && !device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  Launch launch(*this, c10d::OpType::BARRIER, "axo:barrier", {}, opts.timeout, opts.asyncOp, Launch::single_launch,
                device);
  launch.parts.push_back(launch.core().barrier(launch.options));
  return launch.end({});
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  c10d::BarrierOptions blocking = opts;
  blocking.asyncOp = false;
  barrier(blocking);  // its Timeout names the ranks that have not arrived
}

C10dBackend::WorkHandle C10dBackend::send(Tensors& tensors, int peer, int tag) {
  const at::Tensor& t = only("send", tensors);
  Launch launch(*this, c10d::OpType::SEND, "axo:send", tensors, axo::kNoTimeout, true, Launch::single_launch,
                t.device(), &peer);
  const auto [dtype, count] = moved(t);
  launch.parts.push_back(launch.core().send(launch.in(t), count, dtype, peer, tag, launch.options));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::recv(Tensors& tensors, int peer, int tag) {
  const at::Tensor& t = only("recv", tensors);
  Launch launch(*this, c10d::OpType::RECV, "axo:recv", tensors, axo::kNoTimeout, true, Launch::single_launch,
                t.device(), &peer);
  const auto [dtype, count] = moved(t);
  launch.parts.push_back(launch.core().recv(launch.out(t).data_ptr(), count, dtype, peer, tag, launch.options));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& t = only("recv", tensors);
  TORCH_CHECK_VALUE(t.device().is_cpu(), "recv: a tensor on ", t.device(), " cannot be received from any rank, since ",
                    "NCCL and RCCL match messages by rank; pass src, or receive a CPU tensor");
  Launch launch(*this, c10d::OpType::RECVANYSOURCE, "axo:recv_anysource", tensors, axo::kNoTimeout, true);
  const auto [dtype, count] = moved(t);
  launch.parts.push_back(launch.core().recv(launch.out(t).data_ptr(), count, dtype, kAnyPeer, tag, launch.options));
  return launch.end({t});
}

}  // namespace axo

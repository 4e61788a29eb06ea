// C10dBackend's collectives, in their tensor, list and coalesced forms. Each reads: checks, a Launch, buffers, one core
// call (or several as a group), end. Unequal parts go as a group of broadcasts, a group of reduces, or all_to_all_v.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include "torch/c10d_launch.h"

namespace axo {

namespace {

void same_dtype(const char* what, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), what, ": dtypes differ: ", a.scalar_type(), " and ",
                    b.scalar_type());
  TORCH_CHECK_VALUE(a.device() == b.device(), what, ": tensors on ", a.device(), " and on ", b.device(),
                    "; those of one call are on one device");
}

void parts_of(const char* what, const at::Tensor& whole, const at::Tensor& part, int size) {
  check(what, whole);
  check(what, part);
  same_dtype(what, whole, part);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, what, ": a tensor of ", whole.numel(), " elements is not ",
                    size, " parts of ", part.numel());
}

bool same_sizes(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return t.numel() == tensors[0].numel(); });
}

// The list of one tensor a rank in `lists[0]`, all of the dtype of `like`.
const Tensors& only_list(const char* what, const std::vector<Tensors>& lists, const at::Tensor& like, int size) {
  TORCH_CHECK_VALUE(lists.size() == 1 && int(lists[0].size()) == size, what, ": expected one list of ", size,
                    " tensors, one a rank");
  for (const at::Tensor& t : lists[0]) {
    check(what, t);
    same_dtype(what, t, like);
  }
  return lists[0];
}

Sizes offsets_of(const Sizes& counts) {
  Sizes offsets(counts.size(), 0);
  std::partial_sum(counts.begin(), counts.end() - 1, offsets.begin() + 1);
  return offsets;
}

Sizes counts_of(const Tensors& tensors) {
  Sizes counts;
  for (const at::Tensor& t : tensors) counts.push_back(moved(t).count);
  return counts;
}

// Elements that go to (come from) each rank when `t` is cut by rows of dim 0.
Sizes cut(const char* what, const at::Tensor& t, const std::vector<int64_t>& splits, int size) {
  const std::size_t total = moved(t).count;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(t.dim() > 0 && t.size(0) % size == 0, what, ": dim 0 of a tensor of shape ", t.sizes(),
                      " does not divide over ", size, " ranks; give split sizes");
    return Sizes(size, total / size);
  }
  const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  const bool negative = std::any_of(splits.begin(), splits.end(), [](int64_t split) { return split < 0; });
  TORCH_CHECK_VALUE(int(splits.size()) == size && t.dim() > 0 && rows == t.size(0) && !negative, what, ": split sizes ",
                    splits, " do not cut dim 0 of a tensor of shape ", t.sizes(), " into ", size, " parts");
  Sizes counts;
  for (const int64_t split : splits) counts.push_back(rows == 0 ? 0 : total / rows * split);
  return counts;
}

Tensors of_all(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& t = only("broadcast", tensors);
  Launch launch(*this, c10d::OpType::BROADCAST, "axo:broadcast", tensors, opts);
  const auto [dtype, count] = moved(t);
  launch.issue(&Communicator::broadcast, launch.out(t, true).data_ptr(), count, dtype, int(opts.rootRank));
  return launch.end({t});
}

void C10dBackend::reduce_all(Launch& launch, const at::Tensor& t, const c10d::ReduceOp& reduce_op) {
  const ReduceOp op = op_of(reduce_op);
  const auto [dtype, count] = reduced("all_reduce", t, op);
  const at::Tensor buffer = launch.out(t, true);
  void* out = buffer.data_ptr();
  if (const auto factor = device_factor(reduce_op, t)) {
    launch.issue(&DeviceCommunicator::all_reduce_scaled, out, out, count, dtype, *factor);
  } else if (reduce_op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    launch.issue(&Communicator::all_reduce, launch.in(premultiplied(buffer, reduce_op)), out, count, dtype, op);
  } else {
    launch.issue(&Communicator::all_reduce, out, out, count, dtype, op);
  }
}

C10dBackend::WorkHandle C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  const at::Tensor& t = only("all_reduce", tensors);
  reduced("all_reduce", t, op_of(opts.reduceOp));
  Launch launch(*this, c10d::OpType::ALLREDUCE, "axo:all_reduce", tensors, opts);
  reduce_all(launch, t, opts.reduceOp);
  return launch.end({t});
}

// The shapes are exchanged at once, by a blocking collective; then the elements of all ranks, which wait() adds up in
// the order of ranks, so that all have the same bits.
C10dBackend::WorkHandle C10dBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& t = tensors[0];
  const ReduceOp op = op_of(opts.reduceOp);
  TORCH_CHECK_VALUE(t.device().is_cpu(), "all_reduce: a sparse tensor is on ", t.device(), "; reduce .to_dense()");
  TORCH_CHECK_VALUE(op == ReduceOp::sum || op == ReduceOp::avg, "all_reduce: ", name_of(op),
                    " is not defined on sparse tensors; use sum or avg, or reduce .to_dense()");
  TORCH_CHECK_VALUE(!coalesced_, "all_reduce: a sparse tensor cannot be part of coalesced operations");
  const at::Tensor mine = t.detach().coalesce();
  const at::Tensor values = premultiplied(mine.values(), opts.reduceOp).contiguous();
  const at::Tensor indices = mine.indices().contiguous();

  std::vector<int64_t> shape{indices.size(1), t.sparse_dim()};
  shape.insert(shape.end(), t.sizes().begin(), t.sizes().end());
  at::Tensor row = at::tensor(shape, at::kLong), table = at::empty({getSize(), row.numel()}, at::kLong);
  c10d::AllgatherOptions at_once;
  at_once.timeout = opts.timeout;
  at_once.asyncOp = false;
  all_gather_single(table, row, at_once);
  TORCH_CHECK_VALUE(table.slice(1, 1).eq(row.slice(0, 1)).all().item<bool>(),
                    "all_reduce: the ranks' sparse tensors have different shapes, or sparse dims; here ", t.sizes());

  Tensors all_indices, all_values;
  for (int rank = 0; rank < getSize(); ++rank) {
    const int64_t count = table[rank][0].item<int64_t>();
    std::vector<int64_t> part = values.sizes().vec();
    part[0] = count;
    all_indices.push_back(at::empty({indices.size(0), count}, indices.options()));
    all_values.push_back(at::empty(part, values.options()));
  }
  Launch launch(*this, c10d::OpType::ALLREDUCE, "axo:all_reduce", {indices, values}, opts, Launch::grouped_launch);
  gather_list(launch, all_indices, indices);
  gather_list(launch, all_values, values);
  launch.last_steps.push_back([t, all_indices, all_values, op, size = getSize()] {
    const c10::InferenceMode mode(t.is_inference());
    const at::NoGradGuard no_grad;
    at::Tensor sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values), t.sizes()).coalesce();
    if (op == ReduceOp::avg) sum.values().div_(size);
    t.copy_(sum);
  });
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::allreduce_coalesced(Tensors& tensors,
                                                         const c10d::AllreduceCoalescedOptions& opts) {
  for (const at::Tensor& t : tensors) {
    check("all_reduce_coalesced", t);
    reduced("all_reduce_coalesced", t, op_of(opts.reduceOp));
  }
  Launch launch(*this, c10d::OpType::ALLREDUCE_COALESCED, "axo:all_reduce_coalesced", tensors, opts,
                Launch::grouped_launch);
  for (const at::Tensor& t : tensors) reduce_all(launch, t, opts.reduceOp);
  return launch.end(tensors);
}

C10dBackend::WorkHandle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& t = only("reduce", tensors);
  const ReduceOp op = op_of(opts.reduceOp);
  const auto [dtype, count] = reduced("reduce", t, op);
  Launch launch(*this, c10d::OpType::REDUCE, "axo:reduce", tensors, opts);
  void* out = opts.rootRank == getRank() ? launch.out(t).data_ptr() : nullptr;
  const void* in = launch.in(premultiplied(t, opts.reduceOp), out);
  launch.issue(&Communicator::reduce, in, out, count, dtype, op, int(opts.rootRank));
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::barrier(const c10d::BarrierOptions& opts) {
  at::Device device = opts.device && is_accelerator(*opts.device) ? *opts.device : at::Device(at::kCPU);
  if (!device.is_cpu() && !device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  Launch launch(*this, c10d::OpType::BARRIER, "axo:barrier", {}, opts, Launch::single_launch, device);
  launch.issue(&Communicator::barrier);
  return launch.end({});
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  c10d::BarrierOptions blocking = opts;
  blocking.asyncOp = false;
  barrier(blocking);  // its Timeout names the ranks that have not arrived
}

C10dBackend::WorkHandle C10dBackend::send(Tensors& tensors, int peer, int tag) {
  const at::Tensor& t = only("send", tensors);
  Launch launch(*this, c10d::OpType::SEND, "axo:send", tensors, Pending(), Launch::single_launch, t.device(), &peer);
  const auto [dtype, count] = moved(t);
  launch.issue(&Communicator::send, launch.in(t), count, dtype, peer, tag);
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::recv(Tensors& tensors, int peer, int tag) {
  const at::Tensor& t = only("recv", tensors);
  Launch launch(*this, c10d::OpType::RECV, "axo:recv", tensors, Pending(), Launch::single_launch, t.device(), &peer);
  const auto [dtype, count] = moved(t);
  launch.issue(&Communicator::recv, launch.out(t).data_ptr(), count, dtype, peer, tag);
  return launch.end({t});
}

C10dBackend::WorkHandle C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& t = only("recv", tensors);
  TORCH_CHECK_VALUE(t.device().is_cpu(), "recv: a tensor on ", t.device(), " cannot be received from any rank, since ",
                    "NCCL and RCCL match messages by rank; pass src, or receive a CPU tensor");
  Launch launch(*this, c10d::OpType::RECVANYSOURCE, "axo:recv_anysource", tensors, Pending());
  const auto [dtype, count] = moved(t);
  launch.issue(&Communicator::recv, launch.out(t).data_ptr(), count, dtype, kAnyPeer, tag);
  return launch.end({t});
}

void C10dBackend::gather_into(Launch& launch, const at::Tensor& output, const at::Tensor& input) {
  const auto [dtype, count] = moved(input);
  char* out = static_cast<char*>(launch.out(output).data_ptr());
  const void* in = launch.in(input, out + input.nbytes() * getRank());
  launch.issue(&Communicator::all_gather, in, out, count, dtype);
}

void C10dBackend::gather_list(Launch& launch, const Tensors& outputs, const at::Tensor& input) {
  const auto [dtype, count] = moved(input);
  if (same_sizes(outputs)) {
    TORCH_CHECK_VALUE(outputs[0].numel() == input.numel(), "all_gather: outputs of ", outputs[0].numel(),
                      " elements for inputs of ", input.numel());
    char* out = static_cast<char*>(launch.out_flat(outputs));
    const void* in = launch.in(input, out + input.nbytes() * getRank());
    launch.issue(&Communicator::all_gather, in, out, count, dtype);
    return;
  }
  TORCH_CHECK_VALUE(outputs[getRank()].numel() == input.numel(), "all_gather: this rank's output has ",
                    outputs[getRank()].numel(), " elements, its input ", input.numel());
  const at::Tensor mine = input.is_alias_of(outputs[getRank()]) ? input.clone() : input;
  for (int root = 0; root < getSize(); ++root) {
    const at::Tensor buffer = launch.out(outputs[root]);
    if (root == getRank()) copy_now(buffer, mine.view_as(buffer));
    launch.issue(&Communicator::broadcast, buffer.data_ptr(), moved(buffer).count, dtype, root);
  }
}

void C10dBackend::scatter_from(Launch& launch, const at::Tensor& output, const at::Tensor& input,
                               const c10d::ReduceOp& reduce_op) {
  const ReduceOp op = op_of(reduce_op);
  const auto [dtype, count] = reduced("reduce_scatter", output, op);
  char* out = static_cast<char*>(launch.out(output).data_ptr());
  const char* place = out - output.nbytes() * getRank();
  if (const auto factor = device_factor(reduce_op, input)) {
    launch.issue(&DeviceCommunicator::reduce_scatter_scaled, launch.in(input, place), out, count, dtype, *factor);
  } else {
    const void* in = launch.in(premultiplied(input, reduce_op), place);
    launch.issue(&Communicator::reduce_scatter, in, out, count, dtype, op);
  }
}

C10dBackend::WorkHandle C10dBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& opts) {
  parts_of("all_gather_into_tensor", output, input, getSize());
  Launch launch(*this, c10d::OpType::_ALLGATHER_BASE, "axo:_all_gather_base", {input}, opts);
  gather_into(launch, output, input);
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    parts_of("all_gather_into_tensor_coalesced", outputs[i], inputs[i], getSize());
  }
  Launch launch(*this, c10d::OpType::COALESCED, "axo:all_gather_into_tensor_coalesced", inputs, opts,
                Launch::grouped_launch);
  for (std::size_t i = 0; i < inputs.size(); ++i) gather_into(launch, outputs[i], inputs[i]);
  return launch.end(outputs);
}

C10dBackend::WorkHandle C10dBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only("all_gather", inputs);
  const Tensors& parts = only_list("all_gather", outputs, input, getSize());
  Launch launch(*this, c10d::OpType::ALLGATHER, "axo:all_gather", inputs, opts,
                same_sizes(parts) ? Launch::single_launch : Launch::grouped_launch);
  gather_list(launch, parts, input);
  return launch.end(parts);
}

C10dBackend::WorkHandle C10dBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  // outputs[rank][i] is input i of that rank.
  TORCH_CHECK_VALUE(int(outputs.size()) == getSize(), "all_gather_coalesced: ", outputs.size(),
                    " output lists, expected one a rank: ", getSize());
  std::vector<Tensors> parts(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check("all_gather_coalesced", inputs[i]);
    for (const Tensors& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: an output list of ", list.size(),
                        " tensors for ", inputs.size(), " inputs");
      check("all_gather_coalesced", list[i]);
      same_dtype("all_gather_coalesced", list[i], inputs[i]);
      parts[i].push_back(list[i]);
    }
  }
  Launch launch(*this, c10d::OpType::ALLGATHER_COALESCED, "axo:all_gather_coalesced", inputs, opts,
                Launch::grouped_launch);
  for (std::size_t i = 0; i < inputs.size(); ++i) gather_list(launch, parts[i], inputs[i]);
  return launch.end(of_all(outputs));
}

C10dBackend::WorkHandle C10dBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::GatherOptions& opts) {
  const at::Tensor& input = only("gather", inputs);
  const int root = int(opts.rootRank);
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), "gather: root ", root, " is not one of ", getSize(), " ranks");
  const bool here = root == getRank();
  TORCH_CHECK_VALUE(here || outputs.empty(), "gather: outputs are given at the root only, and this is not the root");
  Tensors parts = here ? only_list("gather", outputs, input, getSize()) : Tensors{};
  Launch launch(*this, c10d::OpType::GATHER, "axo:gather", inputs, opts);
  const auto [dtype, count] = moved(input);
  Sizes sent(getSize(), 0);
  sent[root] = count;
  const Sizes received = here ? counts_of(parts) : Sizes(getSize(), 0);
  void* out = here ? launch.out_flat(parts) : nullptr;
  const void* in = launch.in(input);
  launch.issue(&Communicator::all_to_all_v, in, sent, Sizes(getSize(), 0), out, received, offsets_of(received), dtype);
  return launch.end(std::move(parts));
}

C10dBackend::WorkHandle C10dBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::GatherOptions& opts) {
  check("gather_single", input);
  const int root = int(opts.rootRank);
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), "gather_single: root ", root, " is not one of ", getSize(),
                    " ranks");
  const bool here = root == getRank();
  if (here) parts_of("gather_single", output, input, getSize());
  Launch launch(*this, c10d::OpType::GATHER, "axo:gather", {input}, opts);
  const auto [dtype, count] = moved(input);
  char* out = here ? static_cast<char*>(launch.out(output).data_ptr()) : nullptr;
  const void* in = launch.in(input, here ? out + input.nbytes() * root : nullptr);
  launch.issue(&Communicator::gather, in, out, count, dtype, root);
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only("scatter", outputs);
  const int root = int(opts.rootRank);
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), "scatter: root ", root, " is not one of ", getSize(), " ranks");
  const bool here = root == getRank();
  TORCH_CHECK_VALUE(here || inputs.empty(), "scatter: inputs are given at the root only, and this is not the root");
  const Tensors parts = here ? only_list("scatter", inputs, output, getSize()) : Tensors{};
  Launch launch(*this, c10d::OpType::SCATTER, "axo:scatter", parts, opts, Launch::single_launch, output.device());
  const auto [dtype, count] = moved(output);
  const Sizes sent = here ? counts_of(parts) : Sizes(getSize(), 0);
  Sizes received(getSize(), 0);
  received[root] = count;
  void* out = launch.out(output).data_ptr();
  const void* in = here ? launch.in_flat(parts) : nullptr;
  launch.issue(&Communicator::all_to_all_v, in, sent, offsets_of(sent), out, received, Sizes(getSize(), 0), dtype);
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                           const c10d::ReduceScatterOptions& opts) {
  parts_of("reduce_scatter_tensor", input, output, getSize());
  Launch launch(*this, c10d::OpType::_REDUCE_SCATTER_BASE, "axo:_reduce_scatter_base", {input}, opts);
  scatter_from(launch, output, input, opts.reduceOp);
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                                     const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    parts_of("reduce_scatter_tensor_coalesced", inputs[i], outputs[i], getSize());
  }
  Launch launch(*this, c10d::OpType::COALESCED, "axo:reduce_scatter_tensor_coalesced", inputs, opts,
                Launch::grouped_launch);
  for (std::size_t i = 0; i < inputs.size(); ++i) scatter_from(launch, outputs[i], inputs[i], opts.reduceOp);
  return launch.end(outputs);
}

C10dBackend::WorkHandle C10dBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& parts = only_list("reduce_scatter", inputs, output, getSize());
  TORCH_CHECK_VALUE(parts[getRank()].numel() == output.numel(), "reduce_scatter: this rank's input has ",
                    parts[getRank()].numel(), " elements, its output ", output.numel());
  const ReduceOp op = op_of(opts.reduceOp);
  const DType dtype = reduced("reduce_scatter", output, op).dtype;
  const bool even = same_sizes(parts);
  Launch launch(*this, c10d::OpType::REDUCE_SCATTER, "axo:reduce_scatter", parts, opts,
                even ? Launch::single_launch : Launch::grouped_launch);
  Tensors scaled;
  for (const at::Tensor& part : parts) scaled.push_back(premultiplied(part, opts.reduceOp));
  char* out = static_cast<char*>(launch.out(output).data_ptr());
  if (even) {
    const void* in = launch.in_flat(scaled, out - output.nbytes() * getRank());
    const std::size_t count = reduced("reduce_scatter", output, op).count;
    launch.issue(&Communicator::reduce_scatter, in, out, count, dtype, op);
  } else {
    for (int root = 0; root < getSize(); ++root) {
      const std::size_t count = reduced("reduce_scatter", parts[root], op).count;
      void* mine = root == getRank() ? out : nullptr;
      launch.issue(&Communicator::reduce, launch.in(scaled[root], mine), mine, count, dtype, op, root);
    }
  }
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                       std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits,
                                                       const c10d::AllToAllOptions& opts) {
  check("all_to_all_single", output);
  check("all_to_all_single", input);
  same_dtype("all_to_all_single", output, input);
  const Sizes sent = cut("all_to_all_single", input, input_splits, getSize());
  const Sizes received = cut("all_to_all_single", output, output_splits, getSize());
  Launch launch(*this, c10d::OpType::ALLTOALL_BASE, "axo:all_to_all", {input}, opts);
  void* out = launch.out(output).data_ptr();
  const void* in = launch.in(input);
  launch.issue(&Communicator::all_to_all_v, in, sent, offsets_of(sent), out, received, offsets_of(received),
               moved(input).dtype);
  return launch.end({output});
}

C10dBackend::WorkHandle C10dBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "all_to_all: no inputs");
  only_list("all_to_all", {inputs}, inputs[0], getSize());
  only_list("all_to_all", {outputs}, inputs[0], getSize());
  Launch launch(*this, c10d::OpType::ALLTOALL, "axo:all_to_all", inputs, opts);
  const Sizes sent = counts_of(inputs), received = counts_of(outputs);
  void* out = launch.out_flat(outputs);
  const void* in = launch.in_flat(inputs);
  launch.issue(&Communicator::all_to_all_v, in, sent, offsets_of(sent), out, received, offsets_of(received),
               moved(inputs[0]).dtype);
  return launch.end(outputs);
}

}  // namespace axo

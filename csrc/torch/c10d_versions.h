// The one place that knows which torch it is compiled with. The backend (torch/c10d_backend.h) overrides the names that
// the newest torch has; here they get their place in an older torch's virtual tables. A new minor: compile with its
// headers (tests/comm/test_torch_versions.py); each override that is gone is an error; add a row, and what the row
// needs.
//
// torch | what changed in c10d::Backend and c10d::Work            | what it needs
// ------|----------------------------------------------------------|------------------------------------------------------
// 2.11  | the oldest. splitGroup asks a backend once for each type | split() answers a second question with the first's
//       | of device, and writes group_name and timeout into the    | answer; options are given away as copies
//       | options that getBackendOptions() gives                   |
// 2.13  | + suspend, resume, getMemoryStats;                       | nothing; OpTypes of 2.11 only
//       | OpType REDUCE_SCATTER_TENSOR_COALESCED                   |
// 2.14  | all_gather_single, reduce_scatter_single, their          | the new names are overridden; for older
//       | _coalesced, all_to_all_single; the names of 2.13 are     | torches they stand below; the old names call them
//       | aliases, deprecated. + gather_single                     |
//       | + Work::getTimeout; Options::clone                       | getTimeout stands below; clone: copies need none
//       | torch.distributed.split_group works without a GPU        | nothing
// 2.15  | splitGroup asks a backend once for the ranks inside, but | as 2.11
//       | once for each type of device on the ranks outside, and   |
//       | keeps the order of its list                              |
//       | + isInitialized, supportsAbortHooks, completion hooks,   | nothing: no such offers
//       | time estimates, Work::getCompletionKey                   |
#pragma once

#include <torch/headeronly/version.h>

#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace axo {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14

class WorkOfTorch : public c10d::Work {
 public:
  using c10d::Work::Work;
  virtual std::chrono::milliseconds getTimeout() const = 0;
};

class BackendOfTorch : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  using Handle = c10::intrusive_ptr<c10d::Work>;
  using List = std::vector<at::Tensor>;
  using Splits = std::vector<int64_t>;

  virtual Handle all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) = 0;
  virtual Handle all_gather_single_coalesced(List& outputs, List& inputs, const c10d::AllgatherOptions& opts) = 0;
  virtual Handle gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) = 0;
  virtual Handle reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                       const c10d::ReduceScatterOptions& opts) = 0;
  virtual Handle reduce_scatter_single_coalesced(List& outputs, List& inputs,
                                                 const c10d::ReduceScatterOptions& opts) = 0;
  virtual Handle all_to_all_single(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                                   const c10d::AllToAllOptions& opts) = 0;

  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) final {
    return all_gather_single(output, input, opts);
  }
  Handle allgather_into_tensor_coalesced(List& outputs, List& inputs, const c10d::AllgatherOptions& opts) final {
    return all_gather_single_coalesced(outputs, inputs, opts);
  }
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) final {
    return reduce_scatter_single(output, input, opts);
  }
  Handle reduce_scatter_tensor_coalesced(List& outputs, List& inputs, const c10d::ReduceScatterOptions& opts) final {
    return reduce_scatter_single_coalesced(outputs, inputs, opts);
  }
  Handle alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                       const c10d::AllToAllOptions& opts) final {
    return all_to_all_single(output, input, output_splits, input_splits, opts);
  }
};

#else

using WorkOfTorch = c10d::Work;
using BackendOfTorch = c10d::Backend;

#endif

}  // namespace axo

// What every call of the c10d backend is made of: checks, what the core is told of a tensor, and Launch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include "base/error.h"
#include "torch/c10d_backend.h"
#include "torch/held.h"

namespace axo {

using Sizes = std::vector<std::size_t>;

// What the core is told of a tensor's elements.
struct Elements {
  DType dtype;
  std::size_t count;
};

inline std::optional<DType> dtype_of(at::ScalarType type) {
  static constexpr std::array kTypes{// by code
                                     at::kDouble,
                                     at::kFloat,
                                     at::kBFloat16,
                                     at::kHalf,
                                     at::kLong,
                                     at::kInt,
                                     at::kShort,
                                     at::kChar,
                                     at::kByte,
                                     at::kBool,
                                     at::kFloat8_e4m3fn,
                                     at::kFloat8_e5m2,
                                     at::kFloat8_e4m3fnuz,
                                     at::kFloat8_e5m2fnuz,
                                     at::kComplexFloat,
                                     at::kComplexDouble};
  static_assert(kTypes.size() == kDTypeCount);
  const auto found = std::find(kTypes.begin(), kTypes.end(), type);
  return found == kTypes.end() ? std::nullopt : std::optional(static_cast<DType>(found - kTypes.begin()));
}

inline Elements moved(const at::Tensor& t) {
  const auto dtype = dtype_of(t.scalar_type());
  if (dtype) return {*dtype, static_cast<std::size_t>(t.numel())};
  return {DType::uint8, static_cast<std::size_t>(t.nbytes())};
}

inline Elements reduced(const char* what, const at::Tensor& t, ReduceOp op) {
  const auto dtype = dtype_of(t.scalar_type());
  const auto count = static_cast<std::size_t>(t.numel());
  if (op == ReduceOp::sum || op == ReduceOp::avg) {
    if (dtype == DType::complex64) return {DType::float32, 2 * count};
    if (dtype == DType::complex128) return {DType::float64, 2 * count};
  }
  TORCH_CHECK(dtype && can_reduce(*dtype, op), what, ": ", name_of(op), " is not defined on ", t.scalar_type());
  return {*dtype, count};
}

inline ReduceOp op_of(const c10d::ReduceOp& op) {
  static_assert(
      int(c10d::ReduceOp::SUM) == int(ReduceOp::sum) && int(c10d::ReduceOp::AVG) == int(ReduceOp::avg) &&
      int(c10d::ReduceOp::PRODUCT) == int(ReduceOp::product) && int(c10d::ReduceOp::MIN) == int(ReduceOp::min) &&
      int(c10d::ReduceOp::MAX) == int(ReduceOp::max) && int(c10d::ReduceOp::BAND) == int(ReduceOp::bit_and) &&
      int(c10d::ReduceOp::BOR) == int(ReduceOp::bit_or) && int(c10d::ReduceOp::BXOR) == int(ReduceOp::bit_xor));
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return ReduceOp::sum;  // the factor is applied to the input
  TORCH_CHECK_VALUE(op.op_ < c10d::ReduceOp::PREMUL_SUM, "axo: unknown reduce operation ", int(op.op_));
  return static_cast<ReduceOp>(op.op_);
}

// The factor of a pre-multiplied sum of `t`, and null for other operations. `t` times it has to be of the dtype and the
// shape that the core is told of.
inline const c10d::NCCLPreMulSumSupplement* factor_of(const c10d::ReduceOp& op, const at::Tensor& t) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return nullptr;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor, "axo: PREMUL_SUM without its factor");
  TORCH_CHECK_VALUE(t.is_floating_point() || t.is_complex(), "axo: a pre-multiplied sum is of floating point, not of ",
                    t.scalar_type(), "; multiply first, then sum");
  const at::Tensor& tensor = factor->tensor_factor;
  TORCH_CHECK_VALUE(!tensor.defined() || !tensor.is_complex() || t.is_complex(),
                    "axo: a complex factor of a pre-multiplied sum of ", t.scalar_type());
  return factor;
}

inline at::Tensor premultiplied(const at::Tensor& t, const c10d::ReduceOp& op) {
  const auto* factor = factor_of(op, t);
  if (!factor) return t;
  if (!factor->tensor_factor.defined()) return t.mul(factor->double_factor);
  return t.mul(factor->tensor_factor.reshape({})).to(t.scalar_type());  // a wider factor widens some products
}

// The one kind of accelerator that this process has; its tensors go over NCCL or RCCL.
inline bool is_accelerator(at::Device device) {
  return device.is_cuda() || device.type() == at::DeviceType::PrivateUse1;
}

// The handle of the caller's current stream.
inline void* current_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

inline void check(const char* what, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.device().is_cpu() || is_accelerator(t.device()), what, ": a tensor is on ", t.device(),
                    "; backend axo moves CPU tensors and those of GPUs");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, what, ": a tensor is ", t.layout(), "; backend axo moves dense ones");
}

// The factor of a sum that the device multiplies with itself.
inline std::optional<double> device_factor(const c10d::ReduceOp& op, const at::Tensor& t) {
  if (t.device().is_cpu() || !t.is_floating_point()) return std::nullopt;
  const auto* factor = factor_of(op, t);
  if (!factor || factor->tensor_factor.defined()) return std::nullopt;
  return factor->double_factor;
}

inline const at::Tensor& only(const char* what, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": got ", tensors.size(), " tensors, expected one a process");
  check(what, tensors[0]);
  return tensors[0];
}

inline bool plain(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
}

// The memory of a plain tensor, or of several that lie one after the other.
struct Extent {
  const char* begin = nullptr;
  std::size_t bytes = 0;

  bool overlaps(const Extent& other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
};

inline Extent extent_of(const at::Tensor& t) { return {static_cast<const char*>(t.const_data_ptr()), t.nbytes()}; }

// Copies in the mode in which `to` may be written: one that was made in inference mode only there.
inline void copy_now(const at::Tensor& to, const at::Tensor& from) {
  const c10::InferenceMode mode(to.is_inference());
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

// Whether the tensors lie one after the other in memory, as the chunks of one tensor do.
inline bool consecutive(const Tensors& tensors) {
  const char* end = nullptr;
  for (const at::Tensor& t : tensors) {
    if (!plain(t) || t.scalar_type() != tensors[0].scalar_type()) return false;
    const char* begin = static_cast<const char*>(t.const_data_ptr());
    if (end != nullptr && begin != end) return false;
    end = begin + t.nbytes();
  }
  return true;
}

// The options of a transfer: torch's have none.
struct Pending {
  Milliseconds timeout = kNoTimeout;
  bool asyncOp = true;
};

// One call: buffers in and out as the core wants them (contiguous), and the works it becomes.
struct C10dBackend::Launch {
  enum Kind { single_launch, grouped_launch };

  template <class Options>
  Launch(C10dBackend& backend, c10d::OpType type, const char* title, const Tensors& inputs, const Options& opts,
         Kind kind = single_launch)
      : Launch(backend, type, title, inputs, opts, kind, inputs.empty() ? at::Device(at::kCPU) : inputs[0].device()) {}

  // peer: its rank, for a transfer; becomes its rank in `communicator`.
  template <class Options>
  Launch(C10dBackend& backend, c10d::OpType type, const char* title, const Tensors& inputs, const Options& opts,
         Kind kind, at::Device device, int* peer = nullptr)
      : backend(backend),
        title(title),
        device(device),
        communicator(peer ? backend.communicator_with(device, *peer) : backend.communicator_of(device)),
        grouped(kind == grouped_launch) {
    release_now();
    for (const at::Tensor& t : inputs) {
      TORCH_CHECK_VALUE(t.device() == device, title, ": tensors on ", device, " and on ", t.device(),
                        "; those of one call are on one device");
    }
    if (!c10d::isP2POp(type)) ++backend.sequence_;
    wait_here = !opts.asyncOp && !backend.coalesced_;
    options.blocking = wait_here && !grouped;
    options.timeout = opts.timeout < Milliseconds::zero() ? backend.options_->timeout : opts.timeout;
    // A Work costs as much as a small collective: none where the call is over when it returns, and nobody profiles.
    if (backend.coalesced_) {
      work = backend.coalesced_;
    } else if (!options.blocking || !device.is_cpu() || at::hasCallbacks()) {
      work = c10::make_intrusive<C10dWork>(backend.getRank(), type, title, inputs, backend.sequence_.load(),
                                           options.timeout);
    }
    if (work) options.keep_alive = by_program(held = std::make_shared<Tensors>());
    options.stream = current_stream(device);
    if (grouped) group_start();
  }
  ~Launch() {
    if (!grouped) return;
    try {
      group_end();
    } catch (...) {  // the exception that ends this launch is the one to show
    }
  }
  // Calls a collective of the communicator, here the one of the tensors' device.
  template <class C, class... Parameters, class... Arguments>
  void issue(WorkPtr (C::*method)(Parameters...), Arguments... arguments) {
    WorkPtr part = (static_cast<C&>(communicator).*method)(arguments..., options);
    if (work) parts.push_back(std::move(part));
  }

  // Buffers. Outputs come first: an input that overlaps with one is copied, unless it begins at `place`, which the core
  // takes as in place. `t` lives until the call returns.
  const void* in(const at::Tensor& t, const void* place = nullptr) {
    if (!plain(t)) return hold(copied(t)).const_data_ptr();
    if (overwritten(extent_of(t), place)) return hold(t.clone()).const_data_ptr();
    read.push_back(extent_of(t));
    return work ? hold(t).const_data_ptr() : t.const_data_ptr();
  }
  const void* in(at::Tensor&& t, const void* place = nullptr) {
    return in(static_cast<const at::Tensor&>(work ? t : hold(std::move(t))), place);
  }
  // Where the core writes what shall end up in `t`; holds the values of `t` when `filled`.
  at::Tensor out(const at::Tensor& t, bool filled = false) {
    if (plain(t) && !overlaps(extent_of(t))) {
      written.push_back(extent_of(t));
      return work ? hold(t) : t;
    }
    check_apart(t);
    const at::Tensor buffer = hold(at::empty(t.sizes(), t.options()));
    if (filled) buffer.copy_(t);
    copy(t, buffer);
    return buffer;
  }
  // The same for tensors that the core takes as one: themselves when they lie so, else a staging buffer.
  const void* in_flat(const Tensors& tensors, const void* place = nullptr) {
    if (consecutive(tensors) && !overwritten(extent_of_all(tensors), place)) {
      if (held) held->insert(held->end(), tensors.begin(), tensors.end());
      read.push_back(extent_of_all(tensors));
      return first_address(tensors);
    }
    Tensors rows;
    for (const at::Tensor& t : tensors) rows.push_back(t.reshape({-1}));
    return hold(at::cat(rows)).const_data_ptr();
  }
  void* out_flat(const Tensors& tensors) {
    if (consecutive(tensors) && !overlaps(extent_of_all(tensors))) {
      if (held) held->insert(held->end(), tensors.begin(), tensors.end());
      written.push_back(extent_of_all(tensors));
      return first_address(tensors);
    }
    int64_t total = 0;
    for (const at::Tensor& t : tensors) {
      check_apart(t);
      total += t.numel();
    }
    const at::Tensor flat = hold(at::empty({total}, tensors[0].options()));
    int64_t start = 0;
    for (const at::Tensor& t : tensors) {
      copy(t, flat.narrow(0, start, t.numel()).view(t.sizes()));
      start += t.numel();
    }
    return flat.data_ptr();
  }
  void copy(const at::Tensor& to, const at::Tensor& from) {
    last_steps.push_back([to, from] { copy_now(to, from); });
  }
  void check_apart(const at::Tensor& result) const {
    TORCH_CHECK_VALUE(at::has_internal_overlap(result) != at::MemOverlap::Yes, title,
                      ": elements of a result of shape ", result.sizes(), " and strides ", result.strides(),
                      " share memory; use .contiguous()");
  }
  bool overwritten(const Extent& in, const void* place) const {
    return in.begin != place &&
           std::any_of(written.begin(), written.end(), [&](auto& out) { return out.overlaps(in); });
  }
  // With what this call reads or writes besides.
  bool overlaps(const Extent& out) const {
    return std::any_of(read.begin(), read.end(), [&](auto& in) { return in.overlaps(out); }) ||
           std::any_of(written.begin(), written.end(), [&](auto& other) { return other.overlaps(out); });
  }
  WorkHandle end(at::TensorList outputs) {
    if (grouped) {
      grouped = false;
      group_end();
    }
    if (!work) {
      for (const Step& step : last_steps) step();
      C10dWork::deliver_completed();
      return nullptr;
    }
    work->start(std::move(parts), outputs.vec(), std::move(last_steps), device);
    if (wait_here) {
      work->wait(::kNoTimeout);
    } else if (work != backend.coalesced_) {
      work->launched();
    }
    return work;
  }

  // Keeps `t` with the Work, or, where there is none, until the call returns.
  const at::Tensor& hold(at::Tensor t) {
    Tensors& buffers = held ? *held : own_buffers;
    buffers.push_back(std::move(t));
    return buffers.back();
  }

  static void* first_address(const Tensors& tensors) {
    for (const at::Tensor& t : tensors) {
      if (t.numel() > 0) return t.data_ptr();
    }
    return nullptr;
  }
  static Extent extent_of_all(const Tensors& tensors) {
    Extent all{static_cast<const char*>(first_address(tensors)), 0};
    for (const at::Tensor& t : tensors) all.bytes += t.nbytes();
    return all;
  }
  static at::Tensor copied(const at::Tensor& t) {
    if (t._is_zerotensor()) return at::zeros(t.sizes(), t.options());
    return t.resolve_conj().resolve_neg().contiguous();
  }

  const at::NoGradGuard no_grad;  // copies are no part of anybody's graph
  C10dBackend& backend;
  const char* const title;
  at::Device device;
  Communicator& communicator;
  bool grouped;
  bool wait_here;
  CallOptions options;
  std::shared_ptr<Tensors> held;  // by the Work; null without one
  Tensors own_buffers;
  c10::SmallVector<Extent, 2> read, written;
  std::vector<WorkPtr> parts;
  std::vector<Step> last_steps;
  c10::intrusive_ptr<C10dWork> work;  // null: the call is complete when the core's returns
};

}  // namespace axo

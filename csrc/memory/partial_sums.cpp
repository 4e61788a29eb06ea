// Conversions and the last step of a reduction in two levels; see memory/partial_sums.h.
#include "memory/partial_sums.h"

#include <cstdint>
#include <cstring>

#include "memory/reduce.h"

namespace axo {
namespace {

#include "memory/number_formats.inc"

// Calls f with the format in which partial results of `dtype` are widened, divided and narrowed.
template <class F>
void with_format(DType dtype, const F& f) {
  switch (dtype) {
    case DType::bfloat16:
      return f(BFloat16{});
    case DType::float16:
      return f(Float16{});
    case DType::float32:
      return f(Plain<float, float>{});
    case DType::float64:
      return f(Plain<double, double>{});
    case DType::int64:
      return f(Plain<std::int64_t, std::int64_t>{});
    case DType::int32:
      return f(Plain<std::int32_t, std::int64_t>{});
    case DType::int16:
      return f(Plain<std::int16_t, std::int64_t>{});
    case DType::int8:
      return f(Plain<std::int8_t, std::int64_t>{});
    case DType::uint8:
      return f(Plain<std::uint8_t, std::int64_t>{});
    default:
      return;  // no average, and nothing to widen
  }
}

}  // namespace

PartialSums::PartialSums(DType dtype, ReduceOp reduce_op, int count, bool single)
    : own(dtype), sum(dtype), op(reduce_op), ranks(count) {
  if (single) return;
  const bool half = own == DType::bfloat16 || own == DType::float16;
  average = op == ReduceOp::avg;
  if (average) op = ReduceOp::sum;
  if (half && (op == ReduceOp::sum || op == ReduceOp::product)) sum = DType::float32;
  if (average && own >= DType::int64 && own <= DType::uint8) sum = DType::int64;
}

void PartialSums::widen(const char* in, char* to, std::size_t count) const {
  with_format(own, [&](auto format) {
    using Format = decltype(format);
    using Store = typename Format::Store;
    for (std::size_t i = 0; i < count; ++i) store_as(to, i, Format::widen(load_as<Store>(in, i)));
  });
}

void PartialSums::finish(const std::vector<const void*>& inputs, char* out, std::size_t count) const {
  std::vector<char> space(sum == own ? 0 : count * item());
  char* total = sum == own ? out : space.data();
  reduce(inputs.data(), static_cast<int>(inputs.size()), total, count, sum, op);
  if (sum == own && !average) return;
  with_format(own, [&](auto format) {
    using Format = decltype(format);
    using Acc = typename Format::Acc;
    const Acc by = static_cast<Acc>(average ? ranks : 1);
    for (std::size_t i = 0; i < count; ++i) {
      const Acc value = load_as<Acc>(total, i);
      store_as(out, i, Format::narrow(average ? static_cast<Acc>(value / by) : value));
    }
  });
}

}  // namespace axo

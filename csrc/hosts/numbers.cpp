// Conversions and the last step of a reduction over several hosts; see hosts/numbers.h.
#include "hosts/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "memory/reduce.h"

namespace axo::span {
namespace {

#include "memory/number_formats.inc"

template <class From, class To, class Convert>
void convert(const char* from, char* to, std::size_t count, const Convert& f) {
  for (std::size_t i = 0; i < count; ++i) store_as<To>(to, i, f(load_as<From>(from, i)));
}

template <class T>
T narrowed(std::int64_t v) {
  return static_cast<T>(v);
}

template <class T>
void divide(char* data, std::size_t count, T by) {
  convert<T, T>(data, data, count, [by](T v) { return static_cast<T>(v / by); });
}

}  // namespace

Numbers::Numbers(const Request& r, const Place& place) : own(r.dtype), sum(r.dtype), op(r.op), average(false) {
  ranks = static_cast<int>(place.wire.size());
  if (place.hosts.size() == place.wire.size()) return;  // one rank a host: a single reduction does it all
  const bool half = own == DType::bfloat16 || own == DType::float16;
  const bool adds = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::product;
  average = op == ReduceOp::avg;
  if (average) op = ReduceOp::sum;
  if (half && adds) sum = DType::float32;
  if (average && own >= DType::int64 && own <= DType::uint8) sum = DType::int64;
}

const char* Numbers::widen(const char* in, std::size_t count, Buffer* space) const {
  if (sum == own) return in;
  space->resize(count * item());
  char* to = space->data();
  switch (own) {
    case DType::bfloat16:
      convert<std::uint16_t, float>(in, to, count, BFloat16::widen);
      break;
    case DType::float16:
      convert<std::uint16_t, float>(in, to, count, Float16::widen);
      break;
    case DType::int32:
      convert<std::int32_t, std::int64_t>(in, to, count, [](std::int32_t v) { return std::int64_t{v}; });
      break;
    case DType::int16:
      convert<std::int16_t, std::int64_t>(in, to, count, [](std::int16_t v) { return std::int64_t{v}; });
      break;
    case DType::int8:
      convert<std::int8_t, std::int64_t>(in, to, count, [](std::int8_t v) { return std::int64_t{v}; });
      break;
    default:
      convert<std::uint8_t, std::int64_t>(in, to, count, [](std::uint8_t v) { return std::int64_t{v}; });
      break;
  }
  return to;
}

void Numbers::finish(const std::vector<const void*>& inputs, char* out, std::size_t count) const {
  Buffer space;
  char* total = out;
  if (sum != own) {
    space.resize(count * item());
    total = space.data();
  }
  reduce(inputs.data(), static_cast<int>(inputs.size()), total, count, sum, op);
  switch (average ? sum : DType::boolean) {
    case DType::float32:
      divide<float>(total, count, static_cast<float>(ranks));
      break;
    case DType::float64:
      divide<double>(total, count, static_cast<double>(ranks));
      break;
    case DType::int64:
      divide<std::int64_t>(total, count, ranks);
      break;
    default:
      break;
  }
  switch (sum == own ? DType::boolean : own) {
    case DType::bfloat16:
      convert<float, std::uint16_t>(total, out, count, BFloat16::narrow);
      break;
    case DType::float16:
      convert<float, std::uint16_t>(total, out, count, Float16::narrow);
      break;
    case DType::int32:
      convert<std::int64_t, std::int32_t>(total, out, count, narrowed<std::int32_t>);
      break;
    case DType::int16:
      convert<std::int64_t, std::int16_t>(total, out, count, narrowed<std::int16_t>);
      break;
    case DType::int8:
    case DType::uint8:
      convert<std::int64_t, std::int8_t>(total, out, count, narrowed<std::int8_t>);
      break;
    default:
      break;
  }
}

}  // namespace axo::span

// Tables behind base/types.h.
#include "base/types.h"

namespace axo {

std::size_t item_size(DType dtype) {
  switch (dtype) {
    case DType::complex128:
      return 16;
    case DType::float64:
    case DType::int64:
    case DType::complex64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::bfloat16:
    case DType::float16:
    case DType::int16:
      return 2;
    default:
      return 1;
  }
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[kDTypeCount] = {
      "float64",   "float32",   "bfloat16", "float16",       "int64",       "int32",           "int16",
      "int8",      "uint8",     "bool",     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
      "complex64", "complex128"};
  const int i = static_cast<int>(dtype);
  return i >= 0 && i < kDTypeCount ? kNames[i] : "unknown dtype";
}

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[kReduceOpCount] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  const int i = static_cast<int>(op);
  return i >= 0 && i < kReduceOpCount ? kNames[i] : "unknown op";
}

bool can_reduce(DType dtype, ReduceOp op) {
  if (static_cast<int>(dtype) >= static_cast<int>(DType::float8_e4m3fn)) return false;
  const bool bits = op == ReduceOp::bit_and || op == ReduceOp::bit_or || op == ReduceOp::bit_xor;
  switch (dtype) {
    case DType::float64:
    case DType::float32:
    case DType::bfloat16:
    case DType::float16:
      return !bits;
    case DType::boolean:
      return op != ReduceOp::avg;
    default:
      return true;
  }
}

}  // namespace axo

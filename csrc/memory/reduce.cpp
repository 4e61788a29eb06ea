// Chooses the reduction loop: AVX-512, AVX2 or baseline, by what the running machine has.
#include "memory/reduce.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "memory/copy.h"

namespace axo {
namespace {
namespace baseline {
#include "memory/reduce_loops.inc"
}  // namespace baseline

enum class Isa { baseline, avx2, avx512 };

Isa detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::baseline;
}

detail::ReduceFn find(DType dtype, ReduceOp op) {
  static const Isa isa = detect();
#if defined(__x86_64__)
  if (isa == Isa::avx512) return detail::reduce_avx512(dtype, op);
  if (isa == Isa::avx2) return detail::reduce_avx2(dtype, op);
#endif
  (void)isa;
  return detail::reduce_baseline(dtype, op);
}

}  // namespace

const char* reduce_instruction_set() {
  const Isa isa = detect();
  return isa == Isa::avx512 ? "AVX-512" : isa == Isa::avx2 ? "AVX2" : "baseline";
}

detail::ReduceFn detail::reduce_baseline(DType dtype, ReduceOp op) { return baseline::pick(dtype, op); }

void reduce(const void* const* inputs, int n, void* out, std::size_t count, DType dtype, ReduceOp op) {
  if (count == 0) return;
  const detail::ReduceFn fn = find(dtype, op);
  if (fn == nullptr) throw Error(std::string(name_of(op)) + " is not defined on " + name_of(dtype));
  fn(reinterpret_cast<const char* const*>(inputs), n, static_cast<char*>(out), count);
}

}  // namespace axo

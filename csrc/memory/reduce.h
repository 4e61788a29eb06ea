// Reductions over the parts of several ranks: out[i] = in[0][i] op in[1][i] op ... in exactly this order.
//
// bf16 and fp16 accumulate in fp32 and round once; integer sums and products wrap; integer avg sums exactly and divides
// towards zero; min and max return NaN when any input is NaN; bool reads sum and max as "or", product and min as "and".
// The loops are compiled for the baseline, AVX2 and AVX-512 and chosen at run time; the bits do not depend on the
// choice. Pointers need no alignment. `out` may equal one of the inputs; any other overlap is undefined.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace axo {

void reduce(const void* const* inputs, int n, void* out, std::size_t count, DType dtype, ReduceOp op);

// The instruction set whose loops this machine runs: "AVX-512", "AVX2" or "baseline".
const char* reduce_instruction_set();

namespace detail {
using ReduceFn = void (*)(const char* const* inputs, int n, char* out, std::size_t count);
// The loop for one instruction set, or null where the operation is not defined.
ReduceFn reduce_baseline(DType dtype, ReduceOp op);
#if defined(__x86_64__)
ReduceFn reduce_avx2(DType dtype, ReduceOp op);
ReduceFn reduce_avx512(DType dtype, ReduceOp op);
#endif
}  // namespace detail

}  // namespace axo

// Partial sums of a reduction that goes in two levels: ranks in order inside a host, then hosts in order.
//
// Partial sums of bf16 and fp16 stay in fp32 until the end and are rounded once; avg divides once, at the end; that of
// integers sums in 64 bits. Where one level does it all, it is memory/reduce.h's.
#pragma once

#include <vector>

#include "base/types.h"

namespace axo {

struct PartialSums {
  DType own, sum;        // of the tensors, of partial results
  ReduceOp op;           // of partial results
  bool average = false;  // divide the sum by the number of ranks
  int ranks;

  // `ranks` inputs in all; `single`: in one level.
  PartialSums(DType dtype, ReduceOp reduce_op, int count, bool single);
  std::size_t item() const { return item_size(sum); }

  // `count` elements of `own` as `sum`: in `to`.
  void widen(const char* in, char* to, std::size_t count) const;
  // out = op over `inputs` (partial results in order), divided and rounded. `out` may be one of the inputs if own ==
  // sum.
  void finish(const std::vector<const void*>& inputs, char* out, std::size_t count) const;
};

}  // namespace axo

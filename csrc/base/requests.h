// The part of a communicator that all transports share: arguments checked and turned into a Request.
#pragma once

#include <string>
#include <vector>

#include "base/communicator.h"
#include "base/operation.h"

namespace axo {

// The collectives of Communicator over one function, `issue`.
class RequestCommunicator : public Communicator {
 public:
  WorkPtr all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                     const CallOptions& options) override;
  WorkPtr all_gather(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override;
  WorkPtr reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                         const CallOptions& options) override;
  WorkPtr broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override;
  WorkPtr reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op, int root,
                 const CallOptions& options) override;
  WorkPtr gather(const void* in, void* out, std::size_t count, DType dtype, int root,
                 const CallOptions& options) override;
  WorkPtr scatter(const void* in, void* out, std::size_t count, DType dtype, int root,
                  const CallOptions& options) override;
  WorkPtr all_to_all(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override;
  WorkPtr all_to_all_v(const void* in, const std::vector<std::size_t>& send_counts,
                       const std::vector<std::size_t>& send_offsets, void* out,
                       const std::vector<std::size_t>& recv_counts, const std::vector<std::size_t>& recv_offsets,
                       DType dtype, const CallOptions& options) override;
  WorkPtr send(const void* data, std::size_t count, DType dtype, int peer, int tag,
               const CallOptions& options) override;
  WorkPtr recv(void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options) override;
  WorkPtr barrier(const CallOptions& options) override;

 protected:
  // A checked request for an operation that reduces, with `in` and `out`.
  Request reduction(Kind kind, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op) const;
  // Takes a checked request; refuses it when the communicator can take none.
  virtual WorkPtr issue(Request request, const CallOptions& options) = 0;
  // Throws Error for a blocking call inside a group.
  static void check_group(const Request& request, const CallOptions& options);
  // All-gathers `mine`, of equal length everywhere, over this communicator.
  std::string gather_bytes(const std::string& mine);
  // Of a split: the ranks that pass this rank's `color`, ordered by (key, rank). Every rank must call it, none in a
  // group.
  std::vector<int> split_members(int color, int key);

 private:
  Request request(Kind kind, const void* in, void* out, std::size_t count, DType dtype) const;
  void set_root(Request& r, int root) const;
  std::vector<std::size_t> to_bytes(const char* what, const std::vector<std::size_t>& counts, DType dtype) const;
};

}  // namespace axo

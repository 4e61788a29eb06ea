// A collective of ranks on several hosts as collectives inside the hosts and collectives between them.
//
// H hosts of K ranks each, rank r on host r / K; one communicator inside each host, and K between hosts, each of the
// ranks with one number in their hosts: so every rank sends, and what leaves a host is the least that can.
//   operation        inside                between                 inside          leaves a host, in bytes
//   all_reduce       reduce_scatter        all_reduce              all_gather      2 (H-1)/H N
//   reduce_scatter   H reduce_scatters     reduce_scatter                          (H-1) K n, n a rank's part
//   all_gather                             all_gather              H all_gathers   (H-1) K n
//   broadcast        broadcast (root's)    broadcast, a K-th each  all_gather      N from host to host
//   all_to_all       H all_to_alls         all_to_all                              what must
// Of what K does not divide, the first rank of a host takes the rest. Every other collective is not composed.
#pragma once

#include <vector>

#include "base/operation.h"

namespace axo {

class Composition {
 public:
  // What is issued at once; the next step takes its results.
  struct Step {
    bool inside;
    std::vector<Request> requests;  // of this rank; it may have none
  };

  // Of `rank` of hosts * local ranks.
  Composition(int rank, int hosts, int local)
      : hosts_(hosts), local_(local), host_(rank / local), place_(rank % local) {}

  // Whether there are steps for an operation. Sums of integers that are divided are not composed: they round once.
  static bool composes(const Operation& operation);
  // Of the whole message: what a least number of bytes is compared with.
  std::size_t bytes(const Operation& operation) const;
  // Memory that the steps need, beside the request's own.
  std::size_t scratch_bytes(const Request& request) const;
  // The same number of steps on every rank.
  std::vector<Step> steps(const Request& request, void* scratch) const;

 private:
  const int hosts_, local_, host_, place_;
};

}  // namespace axo

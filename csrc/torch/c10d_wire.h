// Wire over a c10d backend that sends and receives: torch's Gloo.
//
// Only tagged sends and receives are used: they need no caller to make progress, may be issued from any
// thread and ended from any other.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hosts/wire.h"

namespace axo {

class C10dWire final : public Wire {
 public:
  explicit C10dWire(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  void send(int to, int channel, const void* data, std::size_t bytes) override;
  void receive(int from, int channel, void* data, std::size_t bytes) override;
  void close(int peer) override;

 private:
  using Works = std::map<int, c10::intrusive_ptr<c10d::Work>>;  // by peer
  template <class Start>
  void run(Works* works, int peer, const char* what, bool keep, const Start& start);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  Works sending_, receiving_;
  std::set<int> closed_;  // peers
};

}  // namespace axo

// AXO_CHECK=1 on devices: every operation, and its place in the order of launches, is compared between ranks through
// the store before it is launched.
//
// Two things are compared. In each communicator, the n-th operation must be the same on all ranks (kind, dtype, count,
// op, root). Between communicators, two ranks that share A and B must launch them in one order: each rank states how
// many operations it has issued in its other communicators, and for a communicator that both know the numbers must be
// equal. A rank that waits longer than a quarter of a second also says in which operation. So two ranks that wait for
// each other find out without a timeout. The receiver compares send and recv, so the check adds no wait that the
// transfer lacks.
// It leaves one key an operation and rank in the store: for debugging, not for long runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/operation.h"
#include "base/store.h"

namespace axo {

class OrderCheck {
 public:
  OrderCheck(std::shared_ptr<Store> store, std::string key, std::string name, int rank, int size, Milliseconds timeout);

  // How far this rank is in its communicators: key -> collectives issued.
  using Positions = std::map<std::string, std::uint64_t>;
  // Another communicator of this rank, for the search of crossed waits.
  struct Neighbour {
    std::string key;
    std::string name;
    int rank;
    std::uint64_t issued;
  };

  // First of all operations of a launch. Returns the number of the operation.
  std::uint64_t publish(const std::string& text, const Positions& positions);
  // Then for each of them. Throws Mismatch, or Timeout that names the ranks that have not arrived; `cancelled` may
  // throw.
  void verify(std::uint64_t number, const std::string& text, const Positions& positions,
              const std::function<std::vector<Neighbour>()>& neighbours, const std::function<void()>& cancelled);
  void publish_send(const Operation& send);
  void verify_recv(const Operation& recv, const std::function<void()>& cancelled);
  std::uint64_t issued() const { return issued_; }
  void set_timeout(Milliseconds timeout) { timeout_.store(timeout); }

 private:
  std::string fetch(const std::string& key, int peer, const std::string& what, const std::string& text,
                    const std::function<void()>& cancelled, const std::function<void()>& while_waiting);
  void say_waiting(std::uint64_t number, const std::string& text, int peer, const std::vector<Neighbour>& neighbours);
  void find_crossing(std::uint64_t number, const std::string& text, int peer, const std::vector<Neighbour>& neighbours);

  std::shared_ptr<Store> store_;
  std::string key_, name_;
  int rank_, size_;
  std::atomic<Milliseconds> timeout_;
  std::uint64_t issued_ = 0;
  std::map<int, std::uint64_t> sent_, received_;
};

}  // namespace axo

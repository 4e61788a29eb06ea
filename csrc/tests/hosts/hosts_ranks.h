// Ranks on several hosts for tests: threads over a wire in memory, so that the sanitizers see all of them.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "hosts/communicator.h"
#include "hosts/mesh.h"
#include "tests/ranks.h"

namespace hosts_ranks {

using namespace axo;
using ranks::Comm;

// What lies between ranks, by (from, to).
class Net {
 public:
  void put(int from, int to, Bytes bytes) {
    while (mute == from) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (gone(from, to)) return;
      const char* p = static_cast<const char*>(bytes.data);
      queues_[{from, to}].emplace_back(p, p + bytes.size);
    }
    changed_.notify_all();
  }
  void take(int from, int to, void* data, std::size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& queue = queues_[{from, to}];
    changed_.wait(lock, [&] { return !queue.empty() || gone(from, to); });
    if (queue.empty()) throw Error("gone");
    CHECK_EQ(queue.front().size(), bytes);
    std::memcpy(data, queue.front().data(), bytes);
    queue.pop_front();
  }

  void await_reader(int from, int to) {
    if (deaf != to) return;
    ++held;
    while (deaf == to && !closed(from, to)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (closed(from, to)) throw Error("closed");
  }

  std::atomic<int> mute{-1};                 // a rank whose frames do not leave
  std::atomic<int> deaf{-1};                 // a rank that reads nothing: what is sent to it does not leave
  std::atomic<int> held{0};                  // how many sends have waited for such a rank
  std::atomic<int> dies_before_payload{-1};  // a rank that is cut off between a head and its payload
  std::atomic<int> silent{-1};               // a rank whose host answers nothing
  std::atomic<bool> noisy{false};
  std::function<void(int, char*, std::size_t)> noise;  // changes what a rank has received, once `noisy`

  void cut(int rank) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      gone_.insert(rank);
    }
    changed_.notify_all();
  }
  void close(int rank, int peer) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_.insert({rank, peer});
    }
    changed_.notify_all();
  }

 private:
  bool closed(int from, int to) {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_.count({from, to}) != 0;
  }
  bool gone(int from, int to) const {
    return gone_.count(from) + gone_.count(to) + closed_.count({from, to}) + closed_.count({to, from}) != 0;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> queues_;
  std::set<int> gone_;
  std::set<std::pair<int, int>> closed_;  // what a rank has closed to a peer
};

class MemoryWire final : public Wire {
 public:
  MemoryWire(std::shared_ptr<Net> net, int rank, int size) : net_(std::move(net)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void send(int to, Bytes head, Bytes payload) override {
    net_->put(rank_, to, head);
    if (payload.size != 0) {
      if (net_->dies_before_payload == rank_) return net_->cut(rank_);
      net_->await_reader(rank_, to);
      net_->put(rank_, to, payload);
    }
    net_->await_reader(rank_, to);
  }
  void receive(int from, void* data, std::size_t bytes) override {
    net_->take(from, rank_, data, bytes);
    if (net_->noisy && bytes == sizeof(hosts::Head)) net_->noise(rank_, static_cast<char*>(data), bytes);
  }
  void close(int peer) override { net_->close(rank_, peer); }
  bool silent(int peer) const override { return net_->silent == peer; }

 private:
  const std::shared_ptr<Net> net_;
  const int rank_, size_;
};

// Runs fn on ranks of hosts of these sizes.
inline void on_hosts(const std::vector<int>& sizes, const std::function<void(Comm, Net&)>& fn,
                     Milliseconds timeout = Milliseconds(60000),
                     std::function<void(int, char*, std::size_t)> noise = {}) {
  ranks::TableStore store;
  auto net = std::make_shared<Net>();
  net->noise = std::move(noise);
  std::vector<std::string> hosts;
  for (std::size_t h = 0; h < sizes.size(); ++h)
    hosts.insert(hosts.end(), static_cast<std::size_t>(sizes[h]), "host" + std::to_string(h));
  const int n = static_cast<int>(hosts.size());
  ranks::threads(n, [&](int r) {
    HostOptions options;
    options.timeout = timeout;
    const ranks::Meeting meeting(store, "world", r, n, Milliseconds(60000));
    int first = 0;
    while (hosts[static_cast<std::size_t>(first)] != hosts[static_cast<std::size_t>(r)]) ++first;
    Comm comm = create_hosts_communicator(meeting.leader(), meeting.address(first),
                                          std::make_unique<MemoryWire>(net, r, n), "world", hosts, options);
    fn(comm, *net);
    comm->shutdown();
  });
}

// The same on n ranks, `each` on a host.
inline void on_hosts(int n, int each, const std::function<void(Comm, Net&)>& fn,
                     Milliseconds timeout = Milliseconds(60000),
                     std::function<void(int, char*, std::size_t)> noise = {}) {
  std::vector<int> sizes;
  for (int r = 0; r < n; r += each) sizes.push_back(std::min(each, n - r));
  on_hosts(sizes, fn, timeout, std::move(noise));
}

}  // namespace hosts_ranks

// Wire over TCP connections that ranks have made and proved to each other (axo/comm/wire.py).
//
// Two kinds of connections. One to each peer carries its bytes. One to each other host carries nothing: the kernels of
// the two hosts ask each other once a second whether they are there, whatever their processes do, so a process that is
// stopped is late, a process that ends closes its connections, and a host that answers nothing for kSilence is lost
// with all its ranks. Bytes could not tell: a kernel tries for minutes to deliver them, and a rank that does not read
// stops them without being lost. Where the rank at the other end of a host's pulse has ended, and others of that host
// go on, each connection to those is asked for itself.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hosts/wire.h"

namespace axo::hosts {

// Between probes, a second apart: an outage that leaves one of the five seconds is none, and six seconds are never
// reached.
inline constexpr std::chrono::milliseconds kSilence{5400};

// A connected socket; a forked child closes its copy, so that a peer learns of its parent's end.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int descriptor() const { return descriptor_.load(std::memory_order_relaxed); }

 private:
  friend void close_sockets_of_parent();
  std::atomic<int> descriptor_{-1};
};

class SocketWire final : public Wire {
 public:
  // Takes over the descriptors. `data`: by rank, -1 at `rank` itself. `pulse`: by rank, the connection to its host,
  // held by one rank of it; -1 elsewhere. `hosts`: by rank, equal for ranks of one host.
  SocketWire(int rank, const std::vector<int>& data, const std::vector<int>& pulse, std::vector<std::string> hosts);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  void send(int to, Bytes head, Bytes payload) override;
  void receive(int from, void* data, std::size_t bytes) override;
  void close(int peer) override;
  bool silent(int peer) const override { return at(peer).silent.load(std::memory_order_acquire); }

 private:
  struct Peer {
    std::unique_ptr<Socket> data, pulse;
    std::atomic<bool> silent{false};
    std::chrono::steady_clock::time_point asked{};  // since when its own connection is kept alive; its reader's
  };
  const Peer& at(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }
  bool has_pulse(int from);
  void lose_host_of(int rank);

  const int rank_;
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  const std::vector<std::string> hosts_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace axo::hosts

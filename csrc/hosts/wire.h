// Wire: bytes between the ranks of several hosts. What a communicator that spans hosts wants of the network.
//
// Between two ranks and for one channel, what is sent arrives whole and in order, and a receive of n bytes meets a send
// of n bytes. For each peer one thread sends and one receives. Implemented over torch's Gloo (torch/c10d_wire.h), and
// over a map for ranks as threads (tests).
#pragma once

#include <cstddef>

namespace axo {

class Wire {
 public:
  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Blocks until the bytes have left; throws Error when the peer is gone, or after close(to).
  virtual void send(int to, int channel, const void* data, std::size_t bytes) = 0;
  // Blocks until the bytes have come; throws as send does.
  virtual void receive(int from, int channel, void* data, std::size_t bytes) = 0;
  // Ends every send to a peer and receive from it, of this and of later calls.
  virtual void close(int peer) = 0;
};

}  // namespace axo

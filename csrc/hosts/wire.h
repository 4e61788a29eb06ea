// Wire: bytes between the ranks of several hosts. What a communicator that spans hosts wants of the network.
//
// Between two ranks and for one channel, what is sent arrives whole and in order, and a receive of n bytes meets a send
// of n bytes. Implemented over torch's Gloo (torch/c10d_wire.h), and over a map for ranks as threads (tests).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

namespace axo {

class Wire {
 public:
  // A send under way. The bytes must stay until wait() has returned or thrown.
  class Sending {
   public:
    virtual ~Sending() = default;
    // Throws Error when the peer is gone or `deadline` passes; the wire may be unusable then.
    virtual void wait(std::chrono::steady_clock::time_point deadline) = 0;
  };

  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Never blocks.
  virtual std::unique_ptr<Sending> send(int to, int channel, const void* data, std::size_t bytes) = 0;
  // Blocks; throws Error when the peer is gone, or after close().
  virtual void receive(int from, int channel, void* data, std::size_t bytes) = 0;
  // Ends every receive, of this and of later calls.
  virtual void close() = 0;
};

}  // namespace axo

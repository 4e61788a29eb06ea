// Wire: bytes between the ranks of several hosts. What a communicator that spans hosts wants of the network.
//
// Between two ranks what is sent arrives whole and in order. For each peer one thread sends and one receives.
// Implemented over sockets (hosts/socket_wire.h), and over a map for ranks as threads (tests).
#pragma once

#include <cstddef>
#include <string>

namespace axo {

struct Bytes {
  const void* data = nullptr;
  std::size_t size = 0;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends a head and what follows it. Blocks until the bytes have left; throws Error when the peer is gone, or after
  // close(to).
  virtual void send(int to, Bytes head, Bytes payload) = 0;
  // Blocks until so many bytes have come; throws as send does.
  virtual void receive(int from, void* data, std::size_t bytes) = 0;
  // Ends every send to a peer and receive from it, of this and of later calls.
  virtual void close(int peer) = 0;
  // Whether a peer is gone because its host answers nothing any more: it has no power, or no cable.
  virtual bool silent(int peer) const = 0;
};

}  // namespace axo

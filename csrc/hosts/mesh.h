// Frames between the ranks of several hosts: one reader a peer, any number of communicators over one wire.
//
// A frame is a head of fixed size on channel 0 and, when it does not fit in there, a payload on channel 1. The reader
// of a peer always waits for its next head, so a peer that dies is noticed at once, whatever this rank does. A
// communicator is a Sink with a number that its ranks have agreed on; frames for a number that this rank does not know
// yet wait for it.
// What a head says comes from outside: it is checked before use, and a peer that sends nonsense counts as lost.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "base/operation.h"
#include "hosts/wire.h"

namespace axo::span {

enum class FrameKind : std::uint32_t {
  begin,    // this rank has come to collective `sequence`, with this signature
  data,     // bytes of a collective, in its order
  want,     // a receive of `bytes` with `tag` is posted
  message,  // bytes of a message with `tag`
  leave,    // this rank has closed the communicator
  abort,    // the communicator has failed: why
};

inline constexpr std::size_t kInline = 512;
inline constexpr std::size_t kMostPayload = std::size_t{4} << 20;  // of one frame, in bytes
struct Head {
  static constexpr std::uint64_t kMagic = 0x31656d617266'6f78ull;
  std::uint64_t magic = kMagic;
  std::uint64_t communicator = 0;
  FrameKind frame = FrameKind::begin;
  std::int32_t tag = 0;
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;  // of the payload that follows, or of what is wanted
  Operation operation;
  FailureKind failure = FailureKind::none;
  std::int32_t peer = -1;
  char text[kInline] = {};  // of an abort; or a small payload

  bool has_payload() const { return frame == FrameKind::data || frame == FrameKind::message; }
  bool apart() const { return has_payload() && bytes > kInline; }  // the payload follows on channel 1
};
static_assert(std::is_trivially_copyable_v<Head>);

// A communicator as the mesh sees it. Peers are ranks of the wire. Called on reader threads, which must not block.
class Sink {
 public:
  virtual ~Sink() = default;
  // Where the payload of `head` shall go. It is written, then arrived() is called.
  virtual char* place(int from, const Head& head) = 0;
  virtual void arrived(int from, const Head& head) = 0;
  virtual void lost(int from, const std::string& why) = 0;
};

class Mesh {
 public:
  explicit Mesh(std::unique_ptr<Wire> wire);
  ~Mesh();
  int rank() const;
  int size() const;

  void add(std::uint64_t communicator, const std::shared_ptr<Sink>& sink);
  void remove(std::uint64_t communicator);
  // Sends a frame without a payload of its own. Blocks only behind a hundred frames that a peer does not read. A peer
  // that is gone is no error here: its reader tells.
  void post(int to, const Head& head);
  // Sends a frame and waits until its payload has left. Throws Error when it cannot.
  void send(int to, Head head, const void* payload, std::size_t bytes, Clock::time_point deadline);
  // Ends all receives: the wire is of no use any more.
  void close();
  // Waits until everything posted has left, at most until `deadline`.
  void flush(Clock::time_point deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;  // the readers hold it too
};

}  // namespace axo::span

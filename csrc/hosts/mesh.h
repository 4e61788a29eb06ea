// Frames between the ranks of several hosts: a reader and a writer thread a peer, any number of communicators.
//
// A frame is a head of fixed size and, when it does not fit in there, a payload behind it. The reader of a peer always
// waits for its next head, so a peer that dies is noticed at once, whatever this rank does. The writer sends what tells
// something before what carries bytes, and lets transfers take turns, chunk by chunk; so nobody who sends or aborts
// waits for a peer, and no communicator for another's large message. A communicator is a Sink with a number that its
// ranks have agreed on. Frames for a number that this rank does not know are of one that it has closed: it drops them.
// What a head says comes from outside: it is checked before use, and a peer that sends nonsense counts as lost.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "base/operation.h"
#include "hosts/link_limit.h"
#include "hosts/wire.h"

namespace axo::hosts {

enum class FrameKind : std::uint32_t {
  begin,  // this rank has come to its next collective, with this operation
  want,   // a receive of `bytes` is posted on `stream`
  data,   // bytes of `stream`, in order
  leave,  // this rank has closed the communicator
  abort,  // the communicator has failed: why
};

// A stream carries a communicator's bytes from one rank to another: those of its collectives, or messages of one tag.
using Stream = std::int64_t;
inline constexpr Stream kCollectives = INT64_MIN;

inline constexpr std::size_t kInline = 512;
struct Head {
  static constexpr std::uint64_t kMagic = 0x32656d617266'6f78ull;
  std::uint64_t magic = kMagic;
  std::uint64_t communicator = 0;
  Stream stream = kCollectives;
  std::uint64_t bytes = 0;  // of the payload that follows, or of what is wanted
  std::uint64_t total = 0;  // of all payloads of this transfer
  Operation operation;
  FrameKind frame = FrameKind::begin;
  FailureKind failure = FailureKind::none;
  std::int32_t peer = -1;
  std::uint32_t unused = 0;
  char text[kInline] = {};  // of an abort; or a small payload

  bool apart() const { return frame == FrameKind::data && bytes > kInline; }  // the payload follows
};
static_assert(std::is_trivially_copyable_v<Head>);

// A communicator as the mesh sees it. Peers are ranks of the wire. Called on reader threads, which must not block.
class Sink {
 public:
  virtual ~Sink() = default;
  // Where the payload of `head` shall go; null: nowhere. It is written, then arrived() is called.
  virtual char* place(int from, const Head& head) = 0;
  virtual void arrived(int from, const Head& head) = 0;
};

class Mesh : public std::enable_shared_from_this<Mesh> {
 public:
  Mesh(std::unique_ptr<Wire> wire, LinkLimit limit)
      : wire_(std::move(wire)), limit_(std::move(limit)), peers_(static_cast<std::size_t>(wire_->size())) {}

  // The first communicator starts the threads; the wire is closed after the last one.
  void add(std::uint64_t communicator, const std::shared_ptr<Sink>& sink);
  void remove(std::uint64_t communicator);
  // Sends a frame without payload. Never blocks. A peer that is gone is no error here: its reader tells.
  void post(int to, const Head& head);
  // Sends `bytes` in frames like `head`, and calls `sent` on a thread of the mesh: with true when they have left, with
  // false when the peer is gone. Never blocks. The bytes must stay until then, or until drop() has returned. One
  // transfer of a stream to a rank at a time. False: nothing is sent, since the peer is gone or the communicator
  // dropped.
  bool send(int to, const Head& head, const char* data, std::size_t bytes, std::function<void(bool)> sent);
  // A communicator ends. Waits until what was posted for it has left, unless peers do not read; forgets what else waits
  // to be sent for it; and waits for payloads on their way, so that its memory is not touched any more. Its place()
  // must give none from here on.
  void drop(std::uint64_t communicator);
  // Whether nothing comes from a peer any more; what came before has arrived.
  bool gone(int rank);
  // Whether that is so because its host answers nothing.
  bool silent(int rank) const { return wire_->silent(rank); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Transfer {
    Head head;
    const char* data;
    std::size_t bytes;
    std::function<void(bool)> sent;
    Clock::time_point since;     // when the link may begin with the next chunk
    Clock::time_point leaves{};  // when that chunk will have left; zero: the link's time is not reserved yet
    std::size_t at = 0;
  };
  struct Peer {
    std::condition_variable changed;  // its writer has something to do
    std::deque<Head> posted;          // the first may be on its way
    std::deque<Transfer> transfers;
    std::uint64_t writing = 0, reading = 0;  // the communicator whose frame is on its way, or 0
    bool gone = false;
  };
  struct Line {
    std::weak_ptr<Sink> sink;
    bool dropped = false;
  };

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  void close(Lock& lock);
  void run_reader(int from);
  void read(int from);
  void run_writer(int to);
  void write_chunk(Lock& lock, int to);
  bool send_unlocked(Lock& lock, const std::function<void()>& send);
  Clock::time_point leaves(Transfer& transfer) const;

  const std::unique_ptr<Wire> wire_;
  const LinkLimit limit_;
  std::mutex mutex_;
  std::condition_variable idle_;  // something has left, or has been read
  std::vector<Peer> peers_;
  std::map<std::uint64_t, Line> lines_;
  bool started_ = false, closed_ = false;
};

}  // namespace axo::hosts

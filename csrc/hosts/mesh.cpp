// Readers and frames; see hosts/mesh.h.
#include "hosts/mesh.h"

#include <cstring>
#include <thread>

#include "base/error.h"

namespace axo::span {
namespace {

constexpr int kHeads = 0, kPayloads = 1;
constexpr std::size_t kMostPosted = 128;
constexpr std::size_t kMostBytes = std::size_t{1} << 40;

struct Posted {
  std::unique_ptr<Head> head;
  std::unique_ptr<Wire::Sending> sending;
};

struct Peer {
  std::mutex mutex;  // a head and its payload go out together
  std::deque<Posted> posted;
};

struct Stashed {
  int from;
  Head head;
  std::vector<char> payload;
};

struct Line {
  std::weak_ptr<Sink> sink;
  bool known = false;
  std::vector<Stashed> early;
};

void check(const Head& head) {
  const bool ok = head.magic == Head::kMagic && head.frame <= FrameKind::abort && head.bytes <= kMostBytes &&
                  (!head.has_payload() || head.bytes <= kMostPayload) && head.failure <= FailureKind::aborted;
  if (!ok) throw Error("a frame that is not one of Axo's");
}

// An empty payload may have no place.
void copy(char* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

void deliver(Sink& sink, int from, const Head& head, const char* payload) {
  if (head.has_payload()) copy(sink.place(from, head), payload, head.bytes);
  sink.arrived(from, head);
}

}  // namespace

struct Mesh::State {
  explicit State(std::unique_ptr<Wire> w) : wire(std::move(w)), peers(static_cast<std::size_t>(wire->size())) {}

  std::unique_ptr<Wire> wire;
  std::vector<Peer> peers;
  std::mutex mutex;
  std::map<std::uint64_t, Line> lines;
  std::set<std::uint64_t> closed;
  std::map<int, std::string> gone;

  Peer& peer(int rank) { return peers[static_cast<std::size_t>(rank)]; }

  std::shared_ptr<Sink> sink_of(std::uint64_t communicator) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto line = lines.find(communicator);
    return line == lines.end() ? nullptr : line->second.sink.lock();
  }

  void read(int from) {
    for (;;) {
      Head head;
      wire->receive(from, kHeads, &head, sizeof(head));
      check(head);
      const auto sink = sink_of(head.communicator);
      if (!sink) {
        stash(from, head);
        continue;
      }
      if (head.has_payload()) {
        char* to = sink->place(from, head);
        if (head.apart()) {
          wire->receive(from, kPayloads, to, head.bytes);
        } else {
          copy(to, head.text, head.bytes);
        }
      }
      sink->arrived(from, head);
    }
  }

  // For a communicator that this rank has not made yet, or has closed.
  void stash(int from, const Head& head) {
    std::vector<char> payload(head.has_payload() ? head.bytes : 0);
    if (head.apart()) {
      wire->receive(from, kPayloads, payload.data(), payload.size());
    } else if (head.has_payload()) {
      copy(payload.data(), head.text, head.bytes);
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (closed.count(head.communicator) != 0) return;
    Line& line = lines[head.communicator];
    if (const auto sink = line.sink.lock()) {
      deliver(*sink, from, head, payload.data());  // made meanwhile
    } else if (!line.known) {
      line.early.push_back({from, head, std::move(payload)});
    }
  }

  void run_reader(int from) {
    std::string why;
    try {
      read(from);
    } catch (const std::exception& e) {
      why = e.what();
    }
    std::vector<std::shared_ptr<Sink>> sinks;
    {
      std::lock_guard<std::mutex> lock(mutex);
      gone[from] = why;
      for (auto& [number, line] : lines) {
        if (auto sink = line.sink.lock()) sinks.push_back(std::move(sink));
      }
    }
    for (const auto& sink : sinks) sink->lost(from, why);
  }

  // Keeps a head until it has left. Under the peer's mutex.
  void keep(Peer& to, Posted posted) {
    to.posted.push_back(std::move(posted));
    while (to.posted.size() > kMostPosted) {
      const Posted oldest = std::move(to.posted.front());
      to.posted.pop_front();
      try {
        oldest.sending->wait(Clock::time_point::max());
      } catch (const std::exception&) {
        // The peer is gone.
      }
    }
  }

  Posted send_head(int to, const Head& head) {
    Posted posted{std::make_unique<Head>(head), nullptr};
    posted.sending = wire->send(to, kHeads, posted.head.get(), sizeof(Head));
    return posted;
  }
};

Mesh::Mesh(std::unique_ptr<Wire> wire) : state_(std::make_shared<State>(std::move(wire))) {
  for (int p = 0; p < size(); ++p) {
    if (p == rank()) continue;
    std::thread([state = state_, p] { state->run_reader(p); }).detach();
  }
}

// A reader may be who drops the last communicator, so nobody waits for the readers here.
Mesh::~Mesh() { state_->wire->close(); }

void Mesh::close() { state_->wire->close(); }

int Mesh::rank() const { return state_->wire->rank(); }
int Mesh::size() const { return state_->wire->size(); }

void Mesh::add(std::uint64_t communicator, const std::shared_ptr<Sink>& sink) {
  std::map<int, std::string> gone;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    Line& line = state_->lines[communicator];
    for (const Stashed& s : line.early) deliver(*sink, s.from, s.head, s.payload.data());
    line.early.clear();
    line.known = true;
    line.sink = sink;
    gone = state_->gone;
  }
  for (const auto& [from, why] : gone) sink->lost(from, why);
}

void Mesh::remove(std::uint64_t communicator) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->lines.erase(communicator);
  state_->closed.insert(communicator);
}

void Mesh::post(int to, const Head& head) {
  Peer& peer = state_->peer(to);
  std::lock_guard<std::mutex> lock(peer.mutex);
  try {
    state_->keep(peer, state_->send_head(to, head));
  } catch (const std::exception&) {
    // The peer is gone: its reader tells.
  }
}

void Mesh::send(int to, Head head, const void* payload, std::size_t bytes, Clock::time_point deadline) {
  Peer& peer = state_->peer(to);
  head.bytes = bytes;
  std::unique_ptr<Wire::Sending> sending;
  {
    std::lock_guard<std::mutex> lock(peer.mutex);
    if (!head.apart()) copy(head.text, payload, bytes);
    state_->keep(peer, state_->send_head(to, head));
    if (head.apart()) sending = state_->wire->send(to, kPayloads, payload, bytes);
  }
  if (sending) sending->wait(deadline);
}

void Mesh::flush(Clock::time_point deadline) {
  for (Peer& peer : state_->peers) {
    std::lock_guard<std::mutex> lock(peer.mutex);
    for (const Posted& posted : peer.posted) {
      try {
        posted.sending->wait(deadline);
      } catch (const std::exception&) {
        break;  // the peer is gone
      }
    }
    peer.posted.clear();
  }
}

}  // namespace axo::span

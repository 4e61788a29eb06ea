// Sends, receives and the pulse of hosts over sockets; see hosts/socket_wire.h.
#include "hosts/socket_wire.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "base/error.h"

namespace axo::hosts {
namespace {

constexpr timeval kLook{0, 200000};  // between looks at a pulse, while no bytes come
constexpr timeval kSeldom{1, 0};     // the same, for ranks whose host's pulse another rank's reader looks at

std::mutex g_mutex;
// Of this process; never destroyed, since threads may outlive main.
std::set<Socket*>& open_sockets() {
  static auto* const sockets = new std::set<Socket*>;
  return *sockets;
}

[[noreturn]] void fail(const char* what, const std::string& why) { throw Error(std::string(what) + ": " + why); }

void set_option(int descriptor, int level, int option, int value) {
  (void)::setsockopt(descriptor, level, option, &value, sizeof(value));  // what is no TCP socket has none of them
}

void keep_alive(int descriptor) {
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 60);  // has_pulse() comes first
}

// What the kernel knows of a connection; nothing of one that has ended.
bool established(int descriptor, tcp_info* info) {
  socklen_t size = sizeof(*info);
  return ::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, info, &size) == 0 && info->tcpi_state == TCP_ESTABLISHED;
}

}  // namespace

// In the child of a fork, where only its thread exists.
void close_sockets_of_parent() {
  for (Socket* s : open_sockets()) ::close(s->descriptor_.exchange(-1));
  open_sockets().clear();
  g_mutex.unlock();
}

Socket::Socket(int descriptor) : descriptor_(descriptor) {
  static const int registered =
      ::pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, &close_sockets_of_parent);
  (void)registered;
  std::lock_guard<std::mutex> lock(g_mutex);
  open_sockets().insert(this);
}

Socket::~Socket() {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (open_sockets().erase(this) != 0) ::close(descriptor());
}

SocketWire::SocketWire(int rank, const std::vector<int>& data, const std::vector<int>& pulse,
                       std::vector<std::string> hosts)
    : rank_(rank), hosts_(std::move(hosts)) {
  for (std::size_t p = 0; p < data.size(); ++p) {
    auto peer = std::make_unique<Peer>();
    if (data[p] >= 0) {
      peer->data = std::make_unique<Socket>(data[p]);
      set_option(data[p], IPPROTO_TCP, TCP_NODELAY, 1);
    }
    if (pulse[p] >= 0) {
      peer->pulse = std::make_unique<Socket>(pulse[p]);
      keep_alive(pulse[p]);
    }
    if (data[p] >= 0 && hosts_[p] != hosts_[static_cast<std::size_t>(rank)]) {
      const timeval& look = pulse[p] >= 0 ? kLook : kSeldom;
      ::setsockopt(data[p], SOL_SOCKET, SO_RCVTIMEO, &look, sizeof(look));
    }
    peers_.push_back(std::move(peer));
  }
}

void SocketWire::send(int to, Bytes head, Bytes payload) {
  iovec parts[2] = {{const_cast<void*>(head.data), head.size}, {const_cast<void*>(payload.data), payload.size}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  while (message.msg_iovlen != 0) {
    if (message.msg_iov->iov_len == 0) {
      ++message.msg_iov;
      --message.msg_iovlen;
      continue;
    }
    const ssize_t sent = ::sendmsg(at(to).data->descriptor(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      const std::string why = std::strerror(errno);
      close(to);  // half a frame may have left
      fail("send", why);
    }
    auto left = static_cast<std::size_t>(sent);
    for (std::size_t i = 0; i < message.msg_iovlen && left != 0; ++i) {
      iovec& part = message.msg_iov[i];
      const std::size_t gone = std::min(left, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + gone;
      part.iov_len -= gone;
      left -= gone;
    }
  }
}

void SocketWire::receive(int from, void* data, std::size_t bytes) {
  char* to = static_cast<char*>(data);
  const Peer& peer = at(from);
  while (bytes != 0) {
    const ssize_t came = ::recv(peer.data->descriptor(), to, bytes, MSG_WAITALL);
    if (came < 0 && errno == EAGAIN && !has_pulse(from)) {
      lose_host_of(from);
      fail("receive", "its host answers nothing");
    }
    if (came < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (came < 0) fail("receive", std::strerror(errno));
    if (came == 0) fail("receive", "the peer has closed the connection");
    to += came;
    bytes -= static_cast<std::size_t>(came);
  }
}

// Whether the kernel of a rank's host has answered lately. What came before this wire was made counts for nothing.
bool SocketWire::has_pulse(int from) {
  const auto now = std::chrono::steady_clock::now();
  if (now - since_ < kSilence) return true;
  const auto& host = hosts_[static_cast<std::size_t>(from)];
  tcp_info info{};
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    if (hosts_[p] != host || !peers_[p]->pulse || !established(peers_[p]->pulse->descriptor(), &info)) continue;
    return std::chrono::milliseconds(info.tcpi_last_ack_recv) < kSilence;
  }
  Peer& peer = *peers_[static_cast<std::size_t>(from)];
  if (peer.asked == std::chrono::steady_clock::time_point{}) {
    peer.asked = now;
    keep_alive(peer.data->descriptor());
  }
  if (now - peer.asked < kSilence || !established(peer.data->descriptor(), &info)) return true;
  const bool waits = info.tcpi_unacked != 0;  // then nobody asks, and bytes are sent again after ever longer pauses
  return std::chrono::milliseconds(info.tcpi_last_ack_recv) < (waits ? 3 * kSilence : kSilence);
}

void SocketWire::lose_host_of(int rank) {
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    if (hosts_[p] != hosts_[static_cast<std::size_t>(rank)]) continue;
    peers_[p]->silent.store(true, std::memory_order_release);
    close(static_cast<int>(p));
  }
}

void SocketWire::close(int peer) {
  const auto& socket = at(peer).data;
  if (socket) ::shutdown(socket->descriptor(), SHUT_RDWR);
}

}  // namespace axo::hosts

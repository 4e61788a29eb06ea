// Sockets, credentials and descriptors; see host/rendezvous.h.
#include "host/rendezvous.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <thread>

#include "base/identity.h"
#include "host/core.h"

namespace axo::host {
namespace {

constexpr std::uint64_t kHelloMagic = 0x6f6c6c6568'6f7861ull;
constexpr int kPollMs = 10;
constexpr std::size_t kFdsPerMessage = 64;

struct Hello {
  std::uint64_t magic;
  std::int32_t rank;
  std::int32_t size;
  char token[40];
};

struct Reply {
  std::uint64_t magic;
  FailureKind failure;  // none: descriptors follow in this and the next messages
  std::int32_t peer;
  std::uint32_t descriptors;  // in this message
  char text[512];
};

[[noreturn]] void fail(const std::string& what) { throw Error("rendezvous: " + what + ": " + std::strerror(errno)); }

void set_text(char* to, std::size_t size, const std::string& text) {
  const std::string part = clipped(text, size - 1);
  std::memcpy(to, part.data(), part.size());
  std::memset(to + part.size(), 0, size - part.size());
}

bool send_message(int socket, const void* data, std::size_t bytes, const std::vector<int>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsPerMessage)] = {};
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(head), fds.data(), sizeof(int) * fds.size());
  }
  for (int tries = 0; tries < 2000; ++tries) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(bytes)) return true;
    if (sent < 0 && (errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    return false;
  }
  return false;
}

enum class Read { nothing, message, cut, closed };

// One message of exactly `bytes`; anything else counts as a closed socket. `cut`: not all of its descriptors have come.
Read read_message(int socket, void* data, std::size_t bytes, std::vector<Fd>* fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsPerMessage)] = {};
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Read::nothing;
  for (cmsghdr* head = got < 0 ? nullptr : CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
  if (got != static_cast<ssize_t>(bytes) || (message.msg_flags & MSG_TRUNC) != 0) return Read::closed;
  if ((message.msg_flags & MSG_CTRUNC) != 0) return Read::cut;
  return Read::message;
}

sockaddr_un socket_address(const char* name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t n = ::strnlen(name, sizeof(Address::socket));
  std::memcpy(address.sun_path + 1, name, n);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

bool same_user(int socket, int* pid) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  *pid = credentials.pid;
  return credentials.uid == ::geteuid();
}

// Equal, in a time that does not depend on where they differ.
bool same_token(const char* a, const char* b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < sizeof(Address::token); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

void send_failure(int socket, const Failure& failure) {
  Reply reply{};
  reply.magic = kHelloMagic;
  reply.failure = failure.kind;
  reply.peer = failure.peer;
  set_text(reply.text, sizeof(reply.text), failure.text);
  send_message(socket, &reply, sizeof(reply), {});
}

Failure failure_in(const Reply& reply) {  // its peer may be a rank of more than those that meet
  return {reply.failure, reply.peer, std::string(reply.text, ::strnlen(reply.text, sizeof(reply.text)))};
}

const Failure kLeaderLost{FailureKind::peer_lost, 0, "rank 0 died"};

[[noreturn]] void refuse(const std::string& text) { throw Failure{FailureKind::aborted, -1, text}; }

// What the leader sends over `socket`. Throws Failure.
Joined receive_segment(int socket, const Meeting& meeting, bool pages, const Watch& watch) {
  const int size = meeting.size;
  const std::size_t expected = 1 + (pages ? 2 * static_cast<std::size_t>(size) : 0);
  std::vector<Fd> fds;
  while (fds.size() < expected) {
    Reply reply{};
    const Read read = read_message(socket, &reply, sizeof(reply), &fds);
    if (read == Read::closed) throw kLeaderLost;
    if (read == Read::cut) {
      throw ResourceError(meeting.what + ": this process may not open the " + std::to_string(expected) +
                          " files that its peers share (ulimit -n)");
    }
    if (read == Read::message) {
      if (reply.magic != kHelloMagic) refuse(meeting.what + ": rank 0 runs another version of Axo");
      if (reply.failure != FailureKind::none) throw failure_in(reply);
      continue;
    }
    watch();
    if (meeting.late()) throw Failure{FailureKind::timeout, -1, "timed out; rank 0 has not answered"};
    pollfd polls{socket, POLLIN, 0};
    ::poll(&polls, 1, kPollMs);
  }
  if (fds.size() != expected) {
    refuse(meeting.what + ": rank 0 sent " + std::to_string(fds.size()) + " descriptors, expected " +
           std::to_string(expected));
  }
  Joined joined;
  joined.segment = std::move(fds[0]);
  for (std::size_t i = 1; i < fds.size(); ++i) {
    (i <= static_cast<std::size_t>(size) ? joined.pages : joined.heaps).push_back(std::move(fds[i]));
  }
  return joined;
}

}  // namespace

void Meeting::raise(const Failure& failure) const {
  const std::string text = what + " (rank " + std::to_string(rank) + " of " + std::to_string(size) +
                           "): " + failure.text + "; waited " + seconds_since(start);
  if (failure.kind == FailureKind::peer_lost) throw PeerLost(text, failure.peer);
  if (failure.kind == FailureKind::timeout) throw Timeout(text);
  throw Error(failure.text);
}

std::string random_hex() {
  unsigned char bytes[16];
  std::size_t have = 0;
  while (have < sizeof(bytes)) {
    const ssize_t n = ::getrandom(bytes + have, sizeof(bytes) - have, 0);
    if (n < 0 && errno != EINTR) fail("getrandom");
    if (n > 0) have += static_cast<std::size_t>(n);
  }
  return hex_digits(bytes, sizeof bytes);
}

std::shared_ptr<Mapping> make_segment(int size, Fd* fd) {
  const Layout layout(size);
  *fd = create_segment("axo-communicator", layout.bytes());
  auto mapping = map_segment(fd->get(), layout.bytes());
  auto* header = layout.header(mapping->base());
  header->version = SegmentHeader::kVersion;
  header->ranks = size;
  header->bytes = layout.bytes();
  header->id = std::stoull(random_hex().substr(0, 16), nullptr, 16);
  header->magic = SegmentHeader::kMagic;
  return mapping;
}

std::shared_ptr<Mapping> check_segment(const Fd& fd, int size) {
  const Layout layout(size);
  auto mapping = map_segment(fd.get(), layout.bytes());
  const auto* header = layout.header(mapping->base());
  const bool ok = header->magic == SegmentHeader::kMagic && header->version == SegmentHeader::kVersion &&
                  header->ranks == size && header->bytes == layout.bytes();
  if (!ok) throw Error("rendezvous: the leader's segment is of another version of Axo");
  return mapping;
}

Address Address::parse(const std::string& text) {
  Address address{};
  const auto space = std::min(text.find(' '), text.size());
  const std::string name = text.substr(0, space), token = text.substr(std::min(space + 1, text.size()));
  if (name.empty() || name.size() >= sizeof(socket) || token.empty() || token.size() >= sizeof(address.token)) {
    throw Error("rendezvous: the address of rank 0 is not one of Axo's");
  }
  set_text(address.socket, sizeof(address.socket), name);
  set_text(address.token, sizeof(address.token), token);
  return address;
}

Leader::Leader() {
  set_text(address_.socket, sizeof(address_.socket), "axo-" + random_hex());
  set_text(address_.token, sizeof(address_.token), random_hex());
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) fail("socket");
  socklen_t length = 0;
  const sockaddr_un address = socket_address(address_.socket, &length);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("bind");
  if (::listen(listener_.get(), kMaxRanks) != 0) fail("listen");
}

void Leader::accept_some() {
  while (members_.size() < 2 * kMaxRanks) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    Member member;
    if (!same_user(socket.get(), &member.pid)) continue;
    member.socket = std::move(socket);
    members_.push_back(std::move(member));
  }
}

void Leader::read_hello(Member& member, int size, bool pages) {
  Hello hello{};
  std::vector<Fd> fds;
  const Read read = read_message(member.socket.get(), &hello, sizeof(hello), &fds);
  if (read == Read::nothing) return;
  const bool ok = read == Read::message && hello.magic == kHelloMagic && same_token(hello.token, address_.token) &&
                  hello.rank > 0 && hello.rank < size && hello.size == size && fds.size() == (pages ? 2u : 0u) &&
                  std::none_of(members_.begin(), members_.end(), [&](const Member& m) { return m.rank == hello.rank; });
  if (ok && pages) {
    member.page = std::move(fds[0]);
    member.heap = std::move(fds[1]);
    member.process = std::make_shared<Process>(member.page.get(), member.heap.get());
  }
  if (ok) {
    member.rank = hello.rank;
  } else {
    member.socket = Fd();  // a stranger
  }
}

std::string Leader::missing(int size) const {
  std::string text;
  for (int p = 1; p < size; ++p) {
    const bool here = std::any_of(members_.begin(), members_.end(), [&](const Member& m) { return m.rank == p; });
    if (!here) text += (text.empty() ? "; not arrived: " : ", ") + std::to_string(p);
  }
  return text;
}

void Leader::look_at(Member& member, int size, const Watch& watch) const {
  const std::string who = "rank " + std::to_string(member.rank) + " (process " + std::to_string(member.pid) + ")";
  Reply reply{};
  std::vector<Fd> fds;
  const Read read = read_message(member.socket.get(), &reply, sizeof(reply), &fds);
  if (read == Read::message) {
    const Failure failure = failure_in(reply);
    if (failure.kind == FailureKind::peer_lost) throw failure;  // another one
    const std::string text = who + " gave up: " + failure.text;
    if (failure.kind == FailureKind::timeout) throw Failure{FailureKind::timeout, -1, text + missing(size)};
    throw Failure{FailureKind::peer_lost, member.rank, text};
  }
  if (read == Read::nothing && !(member.process && member.process->dead())) return;
  watch();  // it may have given up because of another, which this names
  throw Failure{FailureKind::peer_lost, member.rank, who + " died"};
}

void Leader::serve(const Meeting& meeting, int segment, bool pages, const Watch& watch,
                   std::vector<std::shared_ptr<Process>>* processes) {
  const int size = meeting.size;
  for (;;) {
    accept_some();
    int ready = 0;
    for (auto& member : members_) {
      if (member.rank < 0) read_hello(member, size, pages);
      if (member.rank < 0) continue;
      ++ready;
      look_at(member, size, watch);
    }
    members_.erase(std::remove_if(members_.begin(), members_.end(), [](const Member& m) { return !m.socket; }),
                   members_.end());
    if (ready == size - 1) break;
    try {
      watch();
    } catch (const Failure& heard) {  // that a member's time is over may come this way before the member's own message
      if (heard.kind != FailureKind::timeout) throw;
      throw Failure{FailureKind::timeout, -1, heard.text + missing(size)};
    }
    if (meeting.late()) throw Failure{FailureKind::timeout, -1, "rank 0 timed out" + missing(size)};
    std::vector<pollfd> polls{{listener_.get(), POLLIN, 0}};
    for (const auto& m : members_) polls.push_back({m.socket.get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), kPollMs);
  }
  std::vector<int> fds{segment};
  if (pages) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<int> by_rank(n, ProgressEngine::get().page_fd());
    by_rank.resize(2 * n, ProgressEngine::get().heap().fd());
    processes->assign(static_cast<std::size_t>(size), ProgressEngine::get().self());
    for (const auto& m : members_) {
      if (m.rank < 0) continue;
      by_rank[static_cast<std::size_t>(m.rank)] = m.page.get();
      by_rank[n + static_cast<std::size_t>(m.rank)] = m.heap.get();
      (*processes)[static_cast<std::size_t>(m.rank)] = m.process;
    }
    fds.insert(fds.end(), by_rank.begin(), by_rank.end());
  }
  for (const auto& m : members_) {
    if (m.rank < 0) continue;
    for (std::size_t at = 0; at < fds.size(); at += kFdsPerMessage) {
      const std::size_t n = std::min(kFdsPerMessage, fds.size() - at);
      Reply reply{};
      reply.magic = kHelloMagic;
      reply.descriptors = static_cast<std::uint32_t>(n);
      // A member that is gone by now is noticed at the first operation.
      send_message(m.socket.get(), &reply, sizeof(reply),
                   std::vector<int>(fds.begin() + static_cast<long>(at), fds.begin() + static_cast<long>(at + n)));
    }
  }
}

void Leader::refuse(const Failure& refusal) {
  accept_some();
  for (const auto& m : members_) {
    if (m.socket) send_failure(m.socket.get(), refusal);
  }
}

Joined join(const Address& address, const Meeting& meeting, bool pages, const Watch& watch) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail("socket");
  socklen_t length = 0;
  const sockaddr_un to = socket_address(address.socket, &length);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), length) != 0) {
    if (errno != EAGAIN && errno != EINTR) throw kLeaderLost;
    watch();
    if (meeting.late()) throw Failure{FailureKind::timeout, -1, "timed out; rank 0 does not accept"};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  int pid = 0;
  if (!same_user(socket.get(), &pid)) refuse(meeting.what + ": the leader's socket belongs to another user");

  Hello hello{};
  hello.magic = kHelloMagic;
  hello.rank = meeting.rank;
  hello.size = meeting.size;
  std::memcpy(hello.token, address.token, sizeof(hello.token));
  std::vector<int> page;
  if (pages) page = {ProgressEngine::get().page_fd(), ProgressEngine::get().heap().fd()};
  if (!send_message(socket.get(), &hello, sizeof(hello), page)) throw kLeaderLost;

  try {
    return receive_segment(socket.get(), meeting, pages, watch);
  } catch (const Failure& failure) {
    send_failure(socket.get(), failure);  // a leader that heard nothing would take this rank for dead
    throw;
  } catch (...) {
    send_failure(socket.get(), failure_of(std::current_exception()));
    throw;
  }
}

}  // namespace axo::host

// The wire over sockets: whole messages, the end of a peer, and what a forked child keeps.
#include <sys/socket.h>
#include <unistd.h>

#include "hosts/socket_wire.h"
#include "tests/ranks.h"

using axo::Error;
using axo::hosts::SocketWire;

namespace {

using WirePtr = std::unique_ptr<SocketWire>;

// Two ranks on a host each.
std::pair<WirePtr, WirePtr> two_ranks() {
  int data[2], pulse[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, data), 0);
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pulse), 0);
  const std::vector<std::string> hosts{"a", "b"};
  return {std::make_unique<SocketWire>(0, std::vector<int>{-1, data[0]}, std::vector<int>{-1, pulse[0]}, hosts),
          std::make_unique<SocketWire>(1, std::vector<int>{data[1], -1}, std::vector<int>{pulse[1], -1}, hosts)};
}

}  // namespace

TEST(socket_wire_moves_whole_messages) {
  const auto [zero, one] = two_ranks();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{3'000'001}}) {
    const std::string head = "head";
    std::string payload(bytes, '\0');
    for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<char>(i * 31);
    std::thread sender([&, &wire = *zero] { wire.send(1, {head.data(), 4}, {payload.data(), bytes}); });
    std::string head_came(4, ' '), came(bytes, ' ');
    one->receive(0, head_came.data(), 4);
    one->receive(0, came.data(), bytes);
    sender.join();
    CHECK_EQ(head_came, head);
    CHECK(came == payload);
  }
}

TEST(socket_wire_ends_with_its_peer) {
  auto [zero, one] = two_ranks();
  std::thread waits([&, &wire = *zero] {
    char byte;
    CHECK_THROWS(Error, "the peer has closed the connection", wire.receive(1, &byte, 1));
  });
  one.reset();
  waits.join();
  const std::vector<char> much(1 << 20);
  CHECK_THROWS(Error, "send", zero->send(1, {much.data(), much.size()}, {}));
  CHECK(!zero->silent(1));  // it has said so: its host is there
}

TEST(socket_wire_close_ends_what_waits) {
  const auto [zero, one] = two_ranks();
  std::thread reads([&, &wire = *zero] {
    char byte;
    CHECK_THROWS(Error, "", wire.receive(1, &byte, 1));
  });
  std::thread writes([&, &wire = *zero] {
    const std::vector<char> much(64 << 20);
    CHECK_THROWS(Error, "", wire.send(1, {much.data(), much.size()}, {}));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  zero->close(1);
  reads.join();
  writes.join();
}

// The child's copies of sockets would keep the connection open after its parent's death.
PROCESS_TEST(socket_wire_is_closed_in_a_forked_child) {
  auto [zero, one] = two_ranks();
  int hold[2];
  CHECK_EQ(::pipe(hold), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(hold[1]);
    (void)!::read(hold[0], &byte, 1);  // until the parent has seen it
    ::_exit(0);
  }
  ::close(hold[0]);
  one.reset();
  char byte;
  CHECK_THROWS(Error, "the peer has closed the connection", zero->receive(1, &byte, 1));
  ::close(hold[1]);
  CHECK_EQ(ranks::reap({child})[0], 0);
}

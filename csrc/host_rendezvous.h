// How the ranks of one host get hold of one segment.
//
// The leader listens on an abstract unix socket with a random name, members connect, and descriptors travel over
// SCM_RIGHTS. Both sides check the other's user (SO_PEERCRED); a member shows the token that came with the socket's
// name over a trusted way (the store, or the parent communicator). Whatever else connects is turned away. Sockets are
// closed when the rendezvous ends; a rank that dies in its course is noticed by its socket, its pidfd or its life word,
// and the leader tells the others.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "host_core.h"
#include "store.h"

namespace axo::host {

// Where and how to reach a leader: what is published about it.
struct Address {
  char socket[40];  // the abstract name, without its leading zero
  char token[40];
};

// Called every few milliseconds by whoever waits; throws to give up.
using Watch = std::function<void()>;

class Leader {
 public:
  Leader();
  const Address& address() const { return address_; }
  // Waits until members 1..size-1 have come, then gives them `segment` and, with `pages`, the page and the heap of
  // every process.
  void serve(int size, const std::string& name, int segment, bool pages, Clock::time_point deadline, const Watch& watch,
             std::vector<std::shared_ptr<Process>>* processes);
  // Tells all members that have connected, or still do, why there will be no communicator.
  void refuse(FailureKind kind, int peer, const std::string& text);

 private:
  struct Member {
    Fd socket;
    Fd page, heap;
    std::shared_ptr<Process> process;
    int pid = 0;
    int rank = -1;
  };
  void accept_some();
  void read_hello(Member& member, int size, bool pages);

  Address address_{};
  Fd listener_;
  std::vector<Member> members_;
};

struct Joined {
  Fd segment;
  std::vector<Fd> pages, heaps;
};

// A member's side. PeerLost names rank 0 of the new communicator.
Joined join(const Address& address, int rank, int size, const std::string& name, bool pages, Clock::time_point deadline,
            const Watch& watch);

// Fills the header of a fresh segment, and checks a received one.
std::shared_ptr<Mapping> make_segment(int size, Fd* fd);
std::shared_ptr<Mapping> check_segment(const Fd& fd, int size);

// hostname, boot id, network and user namespace: two ranks that differ in it are not on one host.
std::string host_identity();
std::string process_space();  // the namespace of process ids, never empty
std::string random_hex();

}  // namespace axo::host

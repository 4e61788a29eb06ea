// How the ranks of one host get hold of one segment.
//
// The leader listens on an abstract unix socket with a random name, members connect, and descriptors travel over
// SCM_RIGHTS. Both sides check the other's user (SO_PEERCRED); a member shows the token that came with the socket's
// name over a trusted way (the store, or the parent communicator). Whatever else connects is turned away. Sockets are
// closed when the rendezvous ends.
//
// The leader notices a rank that dies meanwhile, and tells the others; a rank that gives up tells the leader why. The
// leader looks at a rank's life word once its page is there, which shows the death before the kernel has freed the dead
// process's memory; a socket shows it only afterwards. Before that the caller's watch looks (axo.comm.rendezvous, at
// what /proc says of the thread that came to meet).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "memory/segment.h"
#include "progress/process_life.h"

namespace axo::host {

// Where and how to reach a leader: what is published about it.
struct Address {
  char socket[40];  // the abstract name, without its leading zero
  char token[40];
  std::string text() const { return std::string(socket) + " " + token; }
  static Address parse(const std::string& text);  // throws Error
};

// One rank's part in one rendezvous. Inside it a Failure is thrown, which says why there will be no communicator.
struct Meeting {
  std::string what;  // "rendezvous of 'world'"
  int rank;
  int size;
  Clock::time_point deadline;
  Clock::time_point start = Clock::now();
  bool late() const { return Clock::now() >= deadline; }
  // Throws the error that a caller sees.
  [[noreturn]] void raise(const Failure& failure) const;
};

// Called every few milliseconds by whoever waits; throws to give up.
using Watch = std::function<void()>;

class Leader {
 public:
  Leader();
  const Address& address() const { return address_; }
  void close() { listener_ = Fd(); }  // another rank leads
  // Waits until members 1..size-1 have come, then gives them `segment` and, with `pages`, the page and the heap of
  // every process. Throws Failure.
  void serve(const Meeting& meeting, int segment, bool pages, const Watch& watch,
             std::vector<std::shared_ptr<Process>>* processes);
  // Tells all members that have connected, or still do, why there will be no communicator.
  void refuse(const Failure& refusal);

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
  // Throws Failure where a member that has come is gone, or has told why it goes.
  void look_at(Member& member, int size, const Watch& watch) const;
  std::string missing(int size) const;  // "; not arrived: 1, 3"

  Address address_{};
  Fd listener_;
  std::vector<Member> members_;
};

struct Joined {
  Fd segment;
  std::vector<Fd> pages, heaps;
};

// A member's side. Throws Failure: the leader's, or its own, which names rank 0.
Joined join(const Address& address, const Meeting& meeting, bool pages, const Watch& watch);

// Fills the header of a fresh segment, and checks a received one.
std::shared_ptr<Mapping> make_segment(int size, Fd* fd);
std::shared_ptr<Mapping> check_segment(const Fd& fd, int size);

std::string random_hex();

}  // namespace axo::host

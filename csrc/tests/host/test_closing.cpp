// Operations that meet the end of their communicator: another thread shuts it down while they are issued. Each must
// end, well or with an error, on one host and on several.
#include <future>

#include "tests/hosts/hosts_ranks.h"

using namespace axo;
using ranks::Comm;

namespace {

// Issues until the communicator is closed, then waits for all.
void issue_until_closed(const Comm& c, float* x, bool messages) {
  std::vector<WorkPtr> works;
  const int peer = 1 - c->rank();
  CallOptions brief;  // a send may be the last that was let in, on both ranks, and its recv be refused
  brief.timeout = Milliseconds(200);
  try {
    for (;;) {
      if (messages) {
        works.push_back(c->send(x, 1, DType::float32, peer, 0, brief));
        works.push_back(c->recv(x + 1, 1, DType::float32, peer, 0, brief));
      } else {
        works.push_back(c->all_reduce(x, x, 1, DType::float32, ReduceOp::sum, {}));
      }
      if (works.size() % 64 == 0) std::this_thread::yield();
    }
  } catch (const Error&) {  // closed, or a peer was first
  }
  for (const WorkPtr& work : works) {
    try {
      work->synchronize(Milliseconds(20000));
      work->wait();
    } catch (const Error&) {  // a peer was first
    }
    CHECK(work->is_completed());
  }
}

void close_while_issuing(const Comm& world) {
  for (int round = 0; round < 24; ++round) {
    Comm c = world->split(0, world->rank(), "closing");
    float x[2] = {0, 0};
    auto issuer = std::async(std::launch::async, [&] { issue_until_closed(c, x, round % 2 != 0); });
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    c->shutdown();
    issuer.get();
    CHECK_THROWS(Error, "", c->barrier(ranks::blocking()));
    world->barrier(ranks::blocking());
  }
}

}  // namespace

TEST(operations_meet_a_shutdown) {
  ranks::with_threads(2, [](Comm c) { close_while_issuing(c); });
}
TEST(hosts_operations_meet_a_shutdown) {
  hosts_ranks::on_hosts(2, 1, [](Comm c, hosts_ranks::Net&) { close_while_issuing(c); });
}
TEST(a_group_that_ends_after_the_shutdown) {
  ranks::with_threads(2, [](Comm world) {
    Comm c = world->split(0, world->rank(), "grouped");
    group_start();
    auto work = c->barrier({});
    c->shutdown();
    group_end();
    CHECK_THROWS(Error, "closed", work->wait());
  });
}

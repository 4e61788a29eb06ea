// Communicators that span hosts, over a wire in memory: ranks are threads, so the sanitizers see all of them.
// Oracle: sums of whole numbers in closed form.
#include <cmath>
#include <random>

#include "base/composition.h"
#include "hosts/link_limit.h"
#include "tests/hosts/hosts_ranks.h"

using namespace axo;
using hosts_ranks::Net;
using hosts_ranks::on_hosts;
using ranks::blocking;
using ranks::Comm;

namespace {

void check_all(const std::vector<float>& x, float value) {
  for (float v : x) CHECK_EQ(v, value);
}

void collectives(Comm c, Net&) {
  const int n = c->size(), me = c->rank();
  const float total = static_cast<float>(n * (n + 1) / 2), mine = static_cast<float>(me + 1);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{40001}}) {
    const std::size_t all = count * static_cast<std::size_t>(n);
    std::vector<float> x(count, mine), whole(all, mine), part(count);
    c->all_reduce(x.data(), x.data(), count, DType::float32, ReduceOp::sum, blocking());
    check_all(x, total);
    c->reduce_scatter(whole.data(), part.data(), count, DType::float32, ReduceOp::avg, blocking());
    check_all(part, total / static_cast<float>(n));
    part.assign(count, mine);
    c->all_gather(part.data(), whole.data(), count, DType::float32, blocking());
    for (std::size_t i = 0; i < all; ++i) CHECK_EQ(whole[i], static_cast<float>(i / count + 1));
    part.assign(count, mine);
    c->broadcast(part.data(), count, DType::float32, n - 1, blocking());
    check_all(part, static_cast<float>(n));
    x.assign(count, mine);
    c->reduce(x.data(), x.data(), count, DType::float32, ReduceOp::max, 1, blocking());
    if (me == 1) check_all(x, static_cast<float>(n));
    whole.assign(all, mine);
    std::vector<float> got(all);
    c->all_to_all(whole.data(), got.data(), count, DType::float32, blocking());
    for (std::size_t i = 0; i < all; ++i) CHECK_EQ(got[i], static_cast<float>(i / count + 1));
    c->barrier(blocking());
  }
}

// Two communicators that keep the contract, composed (base/composition.h): here of CPU ranks, by blocking calls.
class Composed final : public Communicator {
 public:
  Composed(Comm whole, int local)
      : whole_(whole),
        inside_(whole->split(whole->rank() / local, whole->rank(), "inside")),
        between_(whole->split(whole->rank() % local, whole->rank(), "between")),
        composition_(whole->rank(), whole->size() / local, local) {}
  int rank() const override { return whole_->rank(); }
  int size() const override { return whole_->size(); }
  const std::string& name() const override { return whole_->name(); }
  const char* transport() const override { return whole_->transport(); }
  Comm split(int color, int key, const std::string& name) override { return whole_->split(color, key, name); }
  void abort(const std::string& reason) override { whole_->abort(reason); }
  void give_up(const std::string& error) override { whole_->give_up(error); }
  Milliseconds set_timeout(Milliseconds timeout) override { return whole_->set_timeout(timeout); }
  std::exception_ptr failure() override { return whole_->failure(); }
  void shutdown() override {}

 private:
  WorkPtr issue(Request r, const CallOptions& o) override {
    if (!Composition::composes(r)) return call(*whole_, r, o);
    WorkPtr last;
    std::vector<char> scratch(composition_.scratch_bytes(r));
    for (const auto& step : composition_.steps(r, scratch.data())) {
      for (const Request& part : step.requests) last = call(step.inside ? *inside_ : *between_, part, o);
    }
    return last;
  }
  static WorkPtr call(Communicator& c, const Request& r, const CallOptions& o) {
    switch (r.kind) {
      case Kind::all_reduce:
        return c.all_reduce(r.in, r.out, r.count, r.dtype, r.op, o);
      case Kind::reduce_scatter:
        return c.reduce_scatter(r.in, r.out, r.count, r.dtype, r.op, o);
      case Kind::all_gather:
        return c.all_gather(r.in, r.out, r.count, r.dtype, o);
      case Kind::broadcast:
        return c.broadcast(r.out, r.count, r.dtype, r.root, o);
      case Kind::reduce:
        return c.reduce(r.in, r.out, r.count, r.dtype, r.op, r.root, o);
      case Kind::all_to_all:
        return c.all_to_all(r.in, r.out, r.count, r.dtype, o);
      default:
        return c.barrier(o);
    }
  }

  const Comm whole_, inside_, between_;
  const Composition composition_;
};

}  // namespace

TEST(hosts_collectives_composed_of_two_communicators) {
  for (const auto& [hosts, local] : {std::pair{2, 2}, std::pair{2, 3}, std::pair{3, 2}}) {
    on_hosts(hosts * local, local,
             [local = local](const Comm& c, Net& net) { collectives(std::make_shared<Composed>(c, local), net); });
  }
}
TEST(hosts_collectives_on_two_hosts_of_two) { on_hosts(4, 2, collectives); }
TEST(hosts_collectives_on_three_hosts_of_one) { on_hosts(3, 1, collectives); }
TEST(hosts_collectives_on_uneven_hosts) { on_hosts(5, 3, collectives); }
TEST(hosts_collectives_on_three_uneven_hosts) {
  for (const std::vector<int>& sizes : {std::vector<int>{1, 3, 2}, std::vector<int>{3, 1, 2}}) {
    on_hosts(sizes, collectives);
    hosts::simulate_link({2e8, 0});
    const auto reset = std::shared_ptr<void>(nullptr, [](void*) { hosts::simulate_link({}); });
    on_hosts(sizes, collectives);
  }
}

TEST(hosts_what_was_kept_alive_dies_on_a_thread_of_the_program) {
  on_hosts(2, 1, [](Comm c, Net&) {
    float x = 1.0f;
    static thread_local bool of_the_program = false;
    of_the_program = true;
    std::atomic<int> died{0}, wrong{0};
    CallOptions options;
    options.keep_alive = std::shared_ptr<void>(&x, [&](void*) {
      wrong += of_the_program ? 0 : 1;
      ++died;
    });
    std::weak_ptr<Work> watch = c->all_reduce(&x, &x, 1, DType::float32, ReduceOp::sum, options);  // dropped at once
    options.keep_alive.reset();
    while (!watch.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    c->barrier(blocking());
    c->barrier(blocking());
    CHECK_EQ(wrong.load(), 0);
    while (died == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // perhaps on the other rank's thread
  });
}

TEST(hosts_pending_operations_of_several_communicators) {
  on_hosts(4, 2, [](Comm c, Net&) {
    Comm across = c->split(c->rank() % 2, c->rank(), "across");
    Comm inside = c->split(c->rank() / 2, c->rank(), "inside");
    CHECK_EQ(std::string(inside->transport()), "shared-memory");
    CHECK_EQ(std::string(across->transport()), "2 hosts over tcp");
    std::vector<std::vector<float>> data(30, std::vector<float>(500, 1.0f));
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < data.size(); ++i) {
      Comm& on = i % 3 == 0 ? c : i % 3 == 1 ? across : inside;
      works.push_back(on->all_reduce(data[i].data(), data[i].data(), 500, DType::float32, ReduceOp::sum, {}));
    }
    std::vector<float> theirs(3000), mine(3000, static_cast<float>(c->rank()));
    const int peer = (c->rank() + 2) % 4;
    WorkPtr got = c->recv(theirs.data(), 3000, DType::float32, peer, 3, {});
    WorkPtr sent = c->send(mine.data(), 3000, DType::float32, peer, 3, {});
    for (auto it = works.rbegin(); it != works.rend(); ++it) (*it)->wait();
    for (std::size_t i = 0; i < data.size(); ++i) check_all(data[i], i % 3 == 0 ? 4.0f : 2.0f);
    got->wait();
    sent->wait();
    check_all(theirs, static_cast<float>(peer));
    inside->shutdown();
    across->shutdown();
  });
}

TEST(hosts_a_rank_that_is_cut_off_is_lost) {
  std::atomic<int> through{0};
  on_hosts(4, 2, [&](Comm c, Net& net) {
    c->barrier(blocking());
    ++through;
    std::vector<float> x(1000);
    if (c->rank() == 3) {
      // What a rank says of the dead one may overtake what another said before: the barrier would fail too.
      while (through.load() < 4) std::this_thread::yield();
      net.cut(3);
      CHECK_THROWS(Error, "", c->all_reduce(x.data(), x.data(), 1000, DType::float32, ReduceOp::sum, blocking()));
      return;
    }
    CHECK_THROWS(PeerLost, "rank 3 (host host1)",
                 c->all_reduce(x.data(), x.data(), 1000, DType::float32, ReduceOp::sum, blocking()));
    CHECK_THROWS(Aborted, "rank 3", c->barrier(blocking()));
  });
}

// The receiver has the head of a message, and what follows never comes.
TEST(hosts_a_rank_that_dies_inside_a_message) {
  on_hosts(2, 1, [](Comm c, Net& net) {
    std::vector<float> x(5000, 1.0f);
    c->barrier(blocking());
    if (c->rank() == 1) {
      net.dies_before_payload = 1;
      try {
        c->send(x.data(), x.size(), DType::float32, 0, 4, blocking());
      } catch (const Error&) {
        // It is cut off too, before or after what it sent had left.
      }
      return;
    }
    CHECK_THROWS(PeerLost, "recv(float32[5000], from rank 1, tag 4)",
                 c->recv(x.data(), x.size(), DType::float32, 1, 4, blocking()));
    CHECK_THROWS(Aborted, "rank 1", c->barrier(blocking()));
  });
}

TEST(hosts_receives_from_any_rank_are_of_one_host) {
  on_hosts(4, 2, [](Comm c, Net&) {
    float x = static_cast<float>(c->rank());
    CHECK_THROWS(Error, "name the peer", c->recv(&x, 1, DType::float32, kAnyPeer, 0, blocking()));
    Comm inside = c->split(c->rank() / 2, c->rank(), "inside");
    if (inside->rank() == 0) {
      inside->recv(&x, 1, DType::float32, kAnyPeer, 0, blocking());
      CHECK_EQ(x, static_cast<float>(c->rank() + 1));
    } else {
      inside->send(&x, 1, DType::float32, 0, 0, blocking());
    }
    inside->shutdown();
  });
}

// What comes over the network is checked: every call ends well, or with an error, whatever arrives.
TEST(fuzz_hosts_frames) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(check::fuzz_seconds());
  for (std::uint64_t seed = 1; std::chrono::steady_clock::now() < end; ++seed) {
    struct Source {
      std::mutex mutex;
      std::vector<std::mt19937_64> randoms;
    };
    const auto source = std::make_shared<Source>();  // readers may outlive the round
    for (std::uint64_t r = 0; r < 3; ++r) source->randoms.emplace_back(seed * 7 + r);
    const auto noise = [source](int rank, char* data, std::size_t bytes) {
      std::lock_guard<std::mutex> lock(source->mutex);
      auto& random = source->randoms[static_cast<std::size_t>(rank)];
      if (random() % 8 != 0) return;
      for (auto n = 1 + random() % 3; n > 0; --n) {
        // Mostly the fields, seldom the text behind them; a small number as often as any.
        const std::size_t at = random() % (random() % 4 == 0 ? bytes : 88);
        data[at] = static_cast<char>(random() % 2 == 0 ? random() % 8 : random());
      }
    };
    on_hosts(
        3, 1,
        [&](Comm c, Net& net) {
          try {
            c->barrier(blocking());
            net.noisy = true;
            for (int i = 0; i < 12; ++i) {
              struct Buffers {
                std::vector<float> sent, got, all;
              };
              const std::size_t count = i % 3 == 0 ? 10 : 900;
              const auto buffers = std::make_shared<Buffers>(
                  Buffers{std::vector<float>(count), std::vector<float>(count), std::vector<float>(3 * count)});
              CallOptions options;
              options.keep_alive = buffers;  // after an error nobody waits for these two
              const int left = (c->rank() + 2) % 3, right = (c->rank() + 1) % 3;
              auto got = c->recv(buffers->got.data(), count, DType::float32, left, i % 2, options);
              auto sent = c->send(buffers->sent.data(), count, DType::float32, right, i % 2, options);
              c->all_gather(buffers->sent.data(), buffers->all.data(), count, DType::float32, blocking());
              sent->wait();
              got->wait();
            }
          } catch (const Error&) {
          }
          try {
            c->abort("the end of this round");
          } catch (const Error&) {
          }
          ++check::checks();
        },
        Milliseconds(300), noise);
  }
}

TEST(hosts_operations_that_differ) {
  on_hosts(4, 2, [](Comm c, Net&) {
    std::vector<float> x(10);
    const std::size_t count = c->rank() == 2 ? 9 : 10;
    CHECK_THROWS(Mismatch, "", c->all_reduce(x.data(), x.data(), count, DType::float32, ReduceOp::sum, blocking()));
  });
}

TEST(hosts_a_time_limit_names_who_is_missing) {
  on_hosts(
      4, 2,
      [](Comm c, Net&) {
        if (c->rank() == 1) {
          while (!c->failure()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          CHECK_THROWS(Aborted, "timed out after", c->barrier(blocking()));  // it took no part in what was late
          return;
        }
        CHECK_THROWS(Timeout, "not arrived: rank 1 (host host0)", c->barrier(blocking()));
      },
      Milliseconds(300));
}

TEST(hosts_empty_messages_need_no_memory) {
  on_hosts(2, 1, [](Comm c, Net&) {
    WorkPtr got = c->recv(nullptr, 0, DType::float32, 1 - c->rank(), 1, {});
    c->send(nullptr, 0, DType::float32, 1 - c->rank(), 1, blocking());
    got->wait();
    c->barrier(blocking());
  });
}

// Neither issuing nor abort waits for a peer that does not read, however much waits to be read there.
TEST(hosts_abort_does_not_wait_behind_unread_frames) {
  std::atomic<int> through{0};
  std::atomic<bool> done{false};
  on_hosts(2, 1, [&](Comm c, Net& net) {
    c->barrier(blocking());
    ++through;
    if (c->rank() == 1) {
      for (int i = 0; i < 4000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      net.deaf = -1;  // so that a sender that waits goes on, and the test ends
      CHECK_THROWS(Aborted, "enough", c->barrier(blocking()));
      return;
    }
    while (through.load() < 2) std::this_thread::yield();
    net.deaf = 1;
    std::vector<float> x(400);
    std::vector<WorkPtr> works;
    const auto start = std::chrono::steady_clock::now();
    for (float& v : x) works.push_back(c->recv(&v, 1, DType::float32, 1, 5, {}));
    c->abort("enough");
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
    done = true;
    for (const auto& work : works) CHECK_THROWS(Aborted, "enough", work->wait());
  });
}

TEST(hosts_a_rank_that_gives_up_is_lost_to_its_peers_with_its_error) {
  on_hosts(4, 2, [](Comm c, Net&) {
    c->barrier(blocking());
    if (c->rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return c->give_up("raised ValueError: bad batch");
    }
    try {
      c->barrier(blocking());
      CHECK(false);
    } catch (const PeerLost& e) {
      CHECK_EQ(e.peer(), 3);
      CHECK(std::string(e.what()).find("rank 3 (host host1) raised ValueError: bad batch") != std::string::npos);
    }
  });
}

// It ends as soon as its peers know why, and not before: what it has not sent by then is lost.
TEST(hosts_a_rank_that_gives_up_stays_until_its_peers_know) {
  std::atomic<int> through{0};
  on_hosts(4, 2, [&](Comm c, Net& net) {
    c->barrier(blocking());
    ++through;
    if (c->rank() == 3) {
      while (through.load() < 4) std::this_thread::yield();
      net.mute = 3;
      std::atomic<bool> ended{false};
      std::thread network([&] {
        for (int i = 0; i < 50 && !ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        net.mute = -1;
      });
      c->give_up("raised ValueError: bad batch");
      c->until_heard(std::chrono::minutes(1));
      net.cut(3);
      ended = true;
      return network.join();
    }
    CHECK_THROWS(PeerLost, "rank 3 (host host1) raised ValueError: bad batch", c->barrier(blocking()));
  });
}

// A send of which the network does not tell that the peer is gone. The others go on, on what they share.
TEST(hosts_a_send_that_hangs_ends_with_its_peer) {
  std::atomic<bool> receives{false};
  on_hosts(3, 1, [&](Comm c, Net& net) {
    Comm pair = c->split(c->rank() < 2 ? 0 : -1, c->rank(), "pair");
    std::vector<float> x(5000, 1.0f);
    c->barrier(blocking());
    if (c->rank() == 2) {
      const WorkPtr got = c->recv(x.data(), x.size(), DType::float32, 0, 4, {});
      net.deaf = 2;
      receives = true;
      float y;
      CHECK_THROWS(PeerLost, "", c->recv(&y, 1, DType::float32, 0, 5, blocking()));
      CHECK_THROWS(Error, "", got->wait());
      return;
    }
    if (c->rank() == 0) {
      while (!receives) std::this_thread::yield();
      const WorkPtr sent = c->send(x.data(), x.size(), DType::float32, 2, 4, {});
      while (net.held == 0) std::this_thread::yield();
      net.cut(2);
      CHECK_THROWS(PeerLost, "rank 2 (host host2)", sent->wait());
    }
    pair->barrier(blocking());
    pair->shutdown();
  });
}

// Rank 1 leaves and then calls abort, which is not its affair any more; rank 0 frees its own shutdown.
TEST(hosts_abort_after_and_during_shutdown) {
  on_hosts(2, 1, [](Comm c, Net&) {
    Comm pair = c->split(0, c->rank(), "pair");
    float x = 1.0f;
    WorkPtr pending;
    if (c->rank() == 0) {
      pending = pair->recv(&x, 1, DType::float32, 1, 7, {});  // never sent
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        pair->abort("enough");
      });
      pair->shutdown();
      other.join();
      CHECK_THROWS(Aborted, "enough", pending->wait());
    } else {
      CHECK_THROWS(Aborted, "enough", pair->barrier(blocking()));
    }
    Comm third = c->split(0, c->rank(), "third");
    if (c->rank() == 1) {
      third->shutdown();
      third->abort("too late");
    }
    c->barrier(blocking());
    if (c->rank() == 0) CHECK_THROWS(PeerLost, "rank 1 (host host1) left", third->barrier(blocking()));
  });
}

TEST(hosts_a_wait_for_the_link_ends_at_the_time_limit) {
  hosts::simulate_link({0, 30});
  const auto reset = std::shared_ptr<void>(nullptr, [](void*) { hosts::simulate_link({}); });
  const auto start = std::chrono::steady_clock::now();
  on_hosts(
      2, 1,
      [](Comm c, Net&) {
        std::vector<float> x(100);
        CHECK_THROWS(Timeout, "timed out after",
                     c->all_reduce(x.data(), x.data(), 100, DType::float32, ReduceOp::sum, blocking()));
      },
      Milliseconds(1000));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST(hosts_links_that_mean_nothing_are_refused) {
  for (double bad : {-1.0, 0.5, 1e300, std::nan("")}) CHECK_THROWS(Error, "link rate", hosts::simulate_link({bad, 0}));
  for (double bad : {-1.0, 100.0, std::nan("")}) CHECK_THROWS(Error, "link latency", hosts::simulate_link({0, bad}));
}

// A part may arrive before the one that lies in its place has left.
TEST(hosts_all_to_all_in_place) {
  on_hosts(4, 2, [](Comm c, Net&) {
    const std::size_t count = 300'000;
    for (int round = 0; round < 5; ++round) {
      std::vector<float> x(4 * count);
      for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<float>(10 * c->rank() + static_cast<int>(i / count));
      c->all_to_all(x.data(), x.data(), count, DType::float32, blocking());
      for (std::size_t i = 0; i < x.size(); ++i)
        CHECK_EQ(x[i], static_cast<float>(10 * static_cast<int>(i / count) + c->rank()));
    }
  });
}

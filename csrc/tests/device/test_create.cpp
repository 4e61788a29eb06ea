// How communicators come to be: configuration, rendezvous, split, registration.
// Oracle: what the library is told (the stand-in checks size and version of the configuration against real headers),
// and one clear error on every rank.
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

// Thread blocks that are reserved: none where the library takes what it likes.
int kept(int ctas) { return is_hip() ? 0 : ctas; }

TEST(configuration_of_every_version) {
  std::vector<int> all = versions();
  if (!is_old()) all.push_back(23900);  // newer than Axo knows
  for (int version : all) {
    standin::settings().nccl_version = version;
    ranks(2, [&](Rank& me) {
      DeviceOptions options;
      options.min_ctas = 2;
      options.max_ctas = 8;
      options.cga_cluster_size = 2;
      options.zero_cta = true;
      Comm comm = me.connect("versioned", options);
      CHECK_EQ(comm->library_version(), version);
      const std::string calls = text(standin::calls());
      CHECK(calls.find("ncclCommInitRankConfig size=2 rank=" + std::to_string(me.rank) +
                       " blocking=1 minCTAs=2 maxCTAs=8") != std::string::npos);
      CHECK_EQ(comm->reserved_ctas(), kept(8));
      Comm twin = me.connect("twin", options);
      CHECK_EQ(comm->reserved_ctas(), kept(16));
      twin->shutdown();
      CHECK_EQ(comm->reserved_ctas(), kept(8));
      comm->shutdown();
    });
  }
}

// NCCL refuses more thread blocks at least than at most, and takes a limit that is not given for INT_MIN.
TEST(only_the_least_of_the_thread_blocks) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    ranks(2, [](Rank& me) {
      DeviceOptions options;
      options.min_ctas = 2;
      Comm comm = me.connect("least", options);
      auto part = comm->split(0, 0, "part");
      const std::string most = is_hip() ? "256" : "64";
      CHECK(text(standin::calls()).find("minCTAs=2 maxCTAs=" + most) != std::string::npos);
      CHECK_EQ(comm->reserved_ctas(), 0);
      part->shutdown();
      comm->shutdown();
    });
  }
}

// Transfers of NCCL's take a power of two (paths.cc, ncclTopoComputeP2pChannels), so that is what is reserved.
TEST(a_cap_that_is_no_power_of_two) {
  ranks(1, [](Rank& me) {
    DeviceOptions options;
    std::vector<Comm> comms;
    int reserved = 0;
    for (const auto& [most, takes] : {std::pair<int, int>{1, 1}, {2, 2}, {3, 4}, {6, 8}, {16, 16}, {17, 32}}) {
      options.max_ctas = most;
      comms.push_back(me.connect("c" + std::to_string(most), options));
      reserved += kept(takes);
      CHECK_EQ(comms.back()->reserved_ctas(), reserved);
    }
    for (Comm comm : comms) comm->shutdown();
    CHECK_EQ(me.context->reserved_ctas(), 0);
  });
}

TEST(a_version_that_is_too_old) {
  standin::settings().nccl_version = 21703;
  CHECK_THROWS(axo::Error, "got 2.17.3, expected 2.18 or newer", new_context(0));
}

// Where the library orders no launches, or nobody knows whether it does, all communicators share a stream.
TEST(streams_of_their_own_only_where_launches_are_ordered) {
  struct Case {
    int version;
    const char* environment;  // of NCCL_LAUNCH_ORDER_IMPLICIT, before the library was opened
    bool own;
  };
  for (const Case& c : {Case{21801, "1", false}, Case{22105, nullptr, false}, Case{22602, "1", true},
                        Case{22809, "1", true}, Case{22809, "0", false}, Case{23004, "1", true},
                        // Loaded before Axo came: its first communicator may have read the variable already.
                        Case{22809, nullptr, false}, Case{23102, nullptr, true}, Case{23203, "0", true}}) {
    standin::settings().nccl_version = c.version;
    ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (c.environment) ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", c.environment, 1);
    ranks(1, [&](Rank& me) {
      Comm a = me.connect("a"), b = me.connect("b");
      CHECK_EQ(a->stream() != b->stream(), c.own && !is_hip());
      a->shutdown();
      b->shutdown();
    });
    if (!c.environment) CHECK(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT") == nullptr);
  }
  ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
}

TEST(init_that_takes_its_time) {
  standin::settings().init_polls = 5;
  ranks(3, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(Milliseconds(30000));
    CHECK_EQ(x, 3.0f);
    comm->shutdown();
  });
}

TEST(a_rank_that_never_comes) {
  ranks(2, [](Rank& me) {
    if (me.rank == 1) return;
    DeviceOptions options;
    options.timeout = Milliseconds(100);
    CHECK_THROWS(axo::Timeout, "rendezvous of GPU ranks for 'lonely': rank 1 has not come within 100 ms",
                 me.connect("lonely", options));
    // It introduced itself, but does not enter the library.
    me.store->set("half/hello/1", me.store->get("lonely/hello/0", Milliseconds(0)) + "x");
    CHECK_THROWS(axo::Timeout, "ncclCommInitRankConfig could not be launched in time", me.connect("half", options));
  });
}

TEST(two_ranks_on_one_gpu) {
  for (int version : versions()) {
    standin::reset();
    standin::settings().nccl_version = version;
    standin::settings().pci = "0000:17:00.0";
    // Parts of one GPU have its bus id, and UUIDs of their own. NCCL and RCCL compare UUIDs since 2.30. The old family
    // has no driver to ask for UUIDs.
    if (version >= 23000) {
      ranks(2, [](Rank& me) { me.connect()->shutdown(); });
    } else {
      ranks(2, [](Rank& me) {
        CHECK_THROWS(axo::Error,
                     is_old() ? "ranks 0 and 1 are on the same GPU (0000:17:00.0)"
                              : "ranks 0 and 1 are on parts of one GPU (0000:17:00.0), which NCCL takes for the same "
                                "before 2.30",
                     me.connect());
      });
    }
    standin::settings().same_uuid = true;
    ranks(2,
          [](Rank& me) { CHECK_THROWS(axo::Error, "ranks 0 and 1 are on the same GPU (0000:17:00.0)", me.connect()); });
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    ranks(2, [](Rank& me) {
      if (me.context->nccl().version() >= 23000) {
        me.connect()->shutdown();
      } else {
        CHECK_THROWS(axo::Error, "are on the same GPU", me.connect());
      }
    });
    ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  }
}

TEST(hosts_are_told_apart_as_the_library_does) {
  const auto introduced = [](Rank& me, const char* host) {
    ::setenv("NCCL_HOSTID", host, 1);
    DeviceOptions options;
    options.timeout = Milliseconds(50);
    const std::string name = std::string("on ") + host;
    CHECK_THROWS(axo::Timeout, "rank 1 has not come", me.connect(name, options));
    return me.store->get(name + "/hello/0", Milliseconds(0));
  };
  standin::settings().pci = "0000:17:00.0";
  standin::settings().same_uuid = true;
  ranks(2, [&](Rank& me) {
    if (me.rank == 1) return;
    const std::string here = introduced(me, "here"), there = introduced(me, "there");
    CHECK(here != there && introduced(me, "a b\n0000:17:00.0").find('\n') == here.find('\n'));
    const std::string longest(1023, 'x');  // of more NCCL reads nothing
    CHECK_EQ(introduced(me, longest.c_str()), introduced(me, (longest + "y").c_str()));
    ::setenv("NCCL_HOSTID", "here", 1);
    DeviceOptions options;
    options.timeout = Milliseconds(100);
    me.store->set("alone/hello/1", here);
    CHECK_THROWS(axo::Error, "ranks 0 and 1 are on the same GPU (0000:17:00.0)", me.connect("alone", options));
    me.store->set("beside/hello/1", there);
    CHECK_THROWS(axo::Timeout, "ncclCommInitRankConfig could not be launched in time", me.connect("beside", options));
    ::setenv("NCCL_HOSTID", "", 1);  // set to nothing is set
    me.store->set("empty/hello/1", here);
    CHECK_THROWS(axo::Timeout, "ncclCommInitRankConfig could not be launched in time", me.connect("empty", options));
  });
  ::unsetenv("NCCL_HOSTID");
}

TEST(ranks_with_different_libraries) {
  ranks(2, [](Rank& me) {
    if (me.rank == 0) {
      CHECK_THROWS(axo::Error, "rank 1 has nccl 2.1.0, rank 0 has", me.connect());
    } else {
      me.store->set("world/hello/1", "nccl 2.1.0\nhost 0000:01:00.0");
    }
  });
}

TEST(bad_answers_in_the_rendezvous) {
  for (const auto& [answer, said] :
       std::vector<std::pair<std::string, std::string>>{{"ok abc", "bytes of the unique id: got 3, expected 128"},
                                                        {"no way", "rendezvous of GPU ranks: way"},
                                                        {"", "bad answer from rank 0"}}) {
    ranks(1, [&](Rank& me) {
      me.store->set("world/id", answer);
      DeviceOptions options;
      options.context = me.context;
      CHECK_THROWS(axo::Error, said, axo::create_device_communicator(me.store, "world", 1, 2, options));
    });
  }
}

TEST(wrong_options) {
  ranks(1, [](Rank& me) {
    DeviceOptions options;
    options.context = me.context;
    const auto create = [&](int rank, int size) {
      axo::create_device_communicator(me.store, "w", rank, size, options);
    };
    CHECK_THROWS(axo::Error, "size: got 0", create(0, 0));
    CHECK_THROWS(axo::Error, "rank: got 3, expected a rank below 3", create(3, 3));
    CHECK_THROWS(axo::Error, "store: got none", axo::create_device_communicator(nullptr, "w", 0, 2, options));
    options.max_ctas = 4;
    options.min_ctas = 5;
    CHECK_THROWS(axo::Error, "min_ctas: got 5, expected at most max_ctas = 4", create(0, 1));
    options.min_ctas = -1;
    CHECK_THROWS(axo::Error, "CTA limits", create(0, 1));
    CHECK_THROWS(axo::Error, "device: got 99, expected below 8", new_context(99));
    options.min_ctas = 0;
    auto alone = axo::create_device_communicator(nullptr, "w", 0, 1, options);  // needs no store
    CHECK_EQ(std::string(alone->transport()), is_hip() ? "rccl" : "nccl");
    CHECK_EQ(alone->device(), 0);
    CHECK_EQ(alone->name(), "world");
    alone->shutdown();
  });
}

TEST(split_by_color_and_key) {
  ranks(4, [](Rank& me) {
    DeviceOptions options;
    options.max_ctas = 4;
    options.split_share = true;
    Comm world = me.connect("world", options);
    // Two rows of two, in reverse order of rank.
    auto row = std::dynamic_pointer_cast<axo::DeviceCommunicator>(world->split(me.rank / 2, -me.rank, "row"));
    CHECK_EQ(row->size(), 2);
    CHECK_EQ(row->rank(), 1 - me.rank % 2);
    CHECK_EQ(row->name(), "row");
    CHECK_EQ(world->reserved_ctas(), kept(8));
    CHECK(text(standin::calls())
                  .find("ncclCommSplit color=" + std::to_string(me.rank / 2) + " key=-" + std::to_string(me.rank)) !=
              std::string::npos ||
          me.rank == 0);
    float x = static_cast<float>(me.rank), all[2] = {};
    row->all_gather(&x, all, 1, f32, me.on_stream())->wait();
    standin::synchronize(me.stream);
    CHECK_EQ(all[0], static_cast<float>(me.rank / 2 * 2 + 1));
    CHECK_EQ(all[1], static_cast<float>(me.rank / 2 * 2));
    CHECK_THROWS(axo::Error, is_hip() ? "RCCL takes more" : "split_share: got true, expected false",
                 world->capped(16, "wide"));
    // All ranks again, with a cap of its own, which whoever uses it reserves.
    options.split_share = false;
    Comm apart = me.connect("apart", options);
    Comm wide = capped(apart, 16, "wide");
    CHECK_EQ(text(standin::calls()).find("splitShare=0 maxCTAs=16") != std::string::npos, !is_hip());
    CHECK_EQ(wide->rank(), me.rank);
    CHECK_EQ(wide->size(), 4);
    CHECK_EQ(world->reserved_ctas(), kept(12));
    CHECK_THROWS(axo::Error, "max_ctas: got -1, expected at least 0", apart->capped(-1, "none"));
    // At no thread block: by copy engines, where the library has that.
    if (me.context->nccl().has_zero_cta()) {
      auto none = apart->capped(0, "none");
      CHECK(text(standin::calls()).find("CTAPolicy=2") != std::string::npos);
      none->shutdown();
    } else {
      CHECK_THROWS(axo::Error, is_hip() ? "RCCL takes more" : "expected 2.28 or newer", apart->capped(0, "none"));
    }
    float sum = 1;
    wide->all_reduce(&sum, &sum, 1, f32, axo::ReduceOp::sum, me.on_stream())->wait();
    standin::synchronize(me.stream);
    CHECK_EQ(sum, 4.0f);
    wide->shutdown();
    apart->shutdown();
    CHECK_EQ(world->reserved_ctas(), kept(8));
    // Some take no part.
    auto some = world->split(me.rank == 3 ? -1 : 0, 0, "some");
    CHECK_EQ(some == nullptr, me.rank == 3);
    if (some) {
      CHECK_EQ(some->size(), 3);
      CHECK_EQ(some->rank(), me.rank);
      some->shutdown();
    }
    row->shutdown();
    world->shutdown();
  });
}

// On a Hopper NCCL launches clusters of thread blocks, which need multiprocessors of one GPC. What a product leaves
// free may lie anywhere, so communicators with a cap have none, unless the user says so.
TEST(capped_operations_fit_where_a_product_left_room) {
  standin::settings().free_in_a_gpc = 3;
  ranks(2, [](Rank& me) {
    DeviceOptions options;
    options.timeout = Milliseconds(4000);
    Comm world = me.connect("world", options);
    options.max_ctas = 8;
    Comm narrow = me.connect("narrow", options), four = capped(world, 4, "four");
    options.cga_cluster_size = 2;
    Comm clustered = me.connect("clustered", options), both = capped(clustered, 4, "both");
    for (Comm comm : {narrow, four, clustered, both}) {
      float x = 1;
      comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(axo::kNoTimeout);
      CHECK_EQ(x, 2.0f);
    }
    if (me.rank == 0) standin::settings().free_in_a_gpc = 1;
    if (!is_hip()) {  // the user's own word
      float x = 1;
      auto work = both->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      CHECK_THROWS(axo::Timeout, "", work->synchronize(Milliseconds(50)));
      both->abort("it does not fit");
    }
    for (Comm comm : {both, clustered, four, narrow, world}) comm->shutdown();
  });
}

// NCCL reads the parent's splitShare (init.cc, ncclCommInitChildComm), and what shares buffers must not run at once.
TEST(capped_operations_run_beside_those_of_their_parent) {
  Meet issued(2);
  for (const bool share : {false, true}) {
    ranks(2, [&](Rank& me) {
      DeviceOptions options;
      options.split_share = share;
      options.streams = axo::StreamPolicy::own;
      Comm world = me.connect("world", options), four;
      try {
        four = capped(world, 4, "four");
      } catch (const axo::Error&) {
        CHECK(share);
        return world->shutdown();
      }
      if (is_hip() && share) return world->shutdown();  // RCCL's part shares them, and is not for this
      float x = 1, y = 1;
      std::shared_ptr<axo::Work> first;
      if (me.rank == 0) first = world->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      issued.here();  // rank 1 is late for the one, and so rank 0 holds it while the other runs
      auto second = four->all_reduce(&y, &y, 1, f32, ReduceOp::sum, me.on_stream());
      second->synchronize(Milliseconds(10000));
      issued.here();
      if (me.rank == 1) first = world->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      first->synchronize(Milliseconds(10000));
      CHECK_EQ(x + y, 4.0f);
      four->shutdown();
      world->shutdown();
    });
  }
}

// All versions: the handle is there when the call returns, however long the others take.
TEST(a_split_waits_for_its_ranks) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    standin::settings().init_polls = 20;
    ranks(3, [](Rank& me) {
      Comm world = me.connect();
      std::this_thread::sleep_for(Milliseconds(5 * me.rank));
      auto child = world->split(0, 0, "child"), none = world->split(me.rank == 1 ? -1 : 1, 0, "none");
      CHECK_EQ(child->size(), 3);
      CHECK_EQ(none == nullptr, me.rank == 1);
      float x = 1;
      child->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream())->synchronize(Milliseconds(30000));
      CHECK_EQ(x, 3.0f);
      world->barrier(me.on_stream(true));  // the parent is ready again
      if (none) none->shutdown();
      child->shutdown();
      world->shutdown();
    });
  }
}

// A rank that does not come to a split: the call inside the library ends by the time limit, or by an abort.
TEST(a_split_that_hangs) {
  for (const bool aborts : {false, true}) {
    Meet both(2);
    ranks(2, [&](Rank& me) {
      DeviceOptions options;
      options.timeout = aborts ? Milliseconds(60000) : Milliseconds(150);
      Comm world = me.connect("world", options);
      both.here();
      if (me.rank == 0) {
        std::thread impatient([&] {
          std::this_thread::sleep_for(Milliseconds(50));
          if (aborts) world->abort("no longer");
        });
        if (aborts) {
          CHECK_THROWS(axo::Aborted, "no longer", world->split(0, 0, "child"));
        } else {
          CHECK_THROWS(axo::Timeout, "ncclCommSplit could not be launched in time", world->split(0, 0, "child"));
        }
        impatient.join();
        CHECK_THROWS(axo::Aborted, "", world->barrier(me.on_stream()));
      }
      both.here();
      world->shutdown();
    });
  }
}

// NCCL_COMM_BLOCKING=0, of the environment or of nccl.conf, turns every communicator into one that does not block.
TEST(communicators_that_somebody_made_nonblocking) {
  std::atomic<int> told{0};
  ::setenv("NCCL_COMM_BLOCKING", "0", 1);
  ranks(2, [&](Rank& me) {
    try {
      me.connect();
    } catch (const axo::Error& e) {
      told += std::string(e.what()).find("take NCCL_COMM_BLOCKING=0 out") != std::string::npos;
    }
  });
  standin::settings().quick_init = true;  // then nothing was answered too early
  ranks(1, [&](Rank& me) {
    try {
      me.connect();
    } catch (const axo::Error& e) {
      const std::string said = e.what();
      CHECK(said.find("'world': NCCL_COMM_BLOCKING=0 is set") != std::string::npos);
      told += said.find("take NCCL_COMM_BLOCKING=0 out") != std::string::npos;
    }
  });
  ::unsetenv("NCCL_COMM_BLOCKING");
  CHECK_EQ(told.load(), 3);
}

TEST(split_that_fails) {
  ranks(1, [](Rank& me) {
    Comm world = me.connect();
    standin::fail("ncclCommSplit", axo::kNcclInternalError);
    CHECK_THROWS(axo::Error, "ncclCommSplit: some error of the library (3)", world->split(0, 0, "child"));
    CHECK_THROWS(axo::Aborted, "ncclCommSplit", world->barrier(me.on_stream()));
    world->shutdown();
  });
}

TEST(registered_memory) {
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    if (is_old()) {
      CHECK(comm->register_buffer(&x, 4, false) == nullptr);
      CHECK(comm->register_buffer(&x, 4, true) == nullptr);
      CHECK_THROWS(axo::Error, "got 2.21.5, expected 2.27 or newer", comm->allocate(64));
      comm->shutdown();
      return;
    }
    auto local = comm->register_buffer(&x, 4, false);
    auto memory = comm->allocate(4096);
    auto window = comm->register_buffer(memory.get(), 4096, true);
    CHECK(window.get() == memory.get());
    CHECK(text(standin::calls()).find("ncclCommWindowRegister bytes=4096 flags=1") != std::string::npos);
    local.reset();
    CHECK(text(standin::calls()).find("ncclCommDeregister") != std::string::npos);
    auto kept = comm->register_buffer(&x, 4, false);
    standin::settings().register_nothing = true;
    CHECK(comm->register_buffer(&x, 4, false) == nullptr);
    standin::settings().register_nothing = false;
    comm->shutdown();  // drops what is left: the stand-in refuses to destroy a communicator with registrations
    CHECK(text(standin::calls()).find("ncclCommDestroy") != std::string::npos);
    CHECK(text(standin::calls()).find("ncclCommAbort") == std::string::npos);
    window.reset();  // and these have nothing left to do
    kept.reset();
  });
  eventually([] { return standin::live_allocations() == 0; });
}

// On several ranks, and on all versions that have windows: it is there when the call returns.
TEST(windows_of_every_version) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  for (int version : versions()) {
    if (version < 22700) continue;
    standin::settings().nccl_version = version;
    ranks(2, [](Rank& me) {
      Comm comm = me.connect();
      auto memory = comm->allocate(64);
      auto window = comm->register_buffer(memory.get(), 64, true);
      CHECK(window != nullptr);
      float x = 1;
      comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(true));
      comm->shutdown();  // the stand-in refuses to destroy a communicator with a window that nobody has dropped
      CHECK(text(standin::calls()).find("ncclCommAbort") == std::string::npos);
      window.reset();
    });
  }
  eventually([] { return standin::live_allocations() == 0; });
}

// ncclMemFree unmaps at once (allocator.cc), so whoever drops the memory waits for what is in flight.
TEST(memory_goes_when_the_device_is_done_with_it) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    for (const bool window : {false, true}) {
      auto memory = comm->allocate(64);
      auto registered = comm->register_buffer(memory.get(), 64, window);
      standin::Gate gate;
      standin::kernel(me.stream, [] {}, &gate);
      auto* x = static_cast<float*>(memory.get());
      auto work = comm->all_reduce(x, x, 1, f32, ReduceOp::sum, me.on_stream());
      std::atomic<bool> opens{false};
      std::thread later([&] {
        std::this_thread::sleep_for(Milliseconds(50));
        opens = true;
        gate.open();
      });
      registered.reset();
      const bool waited = opens;
      memory.reset();
      later.join();
      CHECK(waited);
    }
    comm->shutdown();
  });
  eventually([] { return standin::live_allocations() == 0; });
}

// The last reference is a work's, which the watchdog drops: it must not wait for a device on which another
// communicator may be stuck.
TEST(memory_that_the_watchdog_drops) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm comm = me.connect("comm"), stuck = me.connect("stuck");
    stuck->set_timeout(Milliseconds(300));
    void* other = standin::create_stream(0);
    CallOptions keeps = me.on_stream(), on_other;
    on_other.stream = other;
    on_other.blocking = true;
    standin::Gate gate;
    standin::kernel(me.stream, [] {}, &gate);
    auto memory = comm->allocate(64);
    auto window = comm->register_buffer(memory.get(), 64, true);
    auto* x = static_cast<float*>(memory.get());
    keeps.keep_alive = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(memory, window);
    memory.reset();
    window.reset();
    comm->all_reduce(x, x, 1, f32, ReduceOp::sum, keeps);
    keeps.keep_alive.reset();
    both.here();
    call_that_is_stuck(me, stuck, on_other, gate);
    both.here();
    stuck->shutdown();
    comm->shutdown();
    standin::destroy_stream(other);
  });
  eventually([] { return standin::live_allocations() == 0; });
}

// A device that captures cannot be waited for: what is dropped then goes later.
TEST(memory_that_is_dropped_during_a_capture) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_windows()); });
  for (const bool blocking : {false, true}) {
    ranks(1, [&](Rank& me) {
      Comm comm = me.connect();
      const int before = standin::live_allocations();
      auto memory = comm->allocate(64);
      auto window = comm->register_buffer(memory.get(), 64, true);
      float x = 1;
      standin::begin_capture(me.stream);
      comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream(blocking))->wait();
      window.reset();
      memory.reset();
      CHECK_EQ(standin::live_allocations(), before + 1);
      std::shared_ptr<standin::Graph> graph;
      CHECK_EQ(standin::end_capture(me.stream, graph), 0);
      graph.reset();
      comm->allocate(64).reset();
      CHECK_EQ(standin::live_allocations(), before);
      comm->shutdown();
    });
  }
}

TEST(deregistration_that_fails) {
  if (is_old()) return ranks(1, [](Rank& me) { CHECK(!me.context->nccl().has_registration()); });
  ranks(1, [](Rank& me) {
    Comm comm = me.connect();
    float x = 1;
    auto buffer = comm->register_buffer(&x, 4, false);
    standin::fail("ncclCommDeregister", axo::kNcclInternalError);
    buffer.reset();
    CHECK_THROWS(axo::Aborted, "deregistration", comm->barrier(me.on_stream()));
    comm->shutdown();
  });
}

}  // namespace
}  // namespace device

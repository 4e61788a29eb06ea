// Ranks that die: named while they meet, while the library connects, and while an operation waits; and communicators
// that are given up before they are made. Deaths are those of a process of the test's own, which a rank says it is.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/identity.h"
#include "device/peers.h"
#include "device_ranks.h"

namespace device {
namespace {

const auto f32 = DType::float32;

// A process that does nothing until it is killed.
class Process {
 public:
  Process() : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) ::pause();
  }
  ~Process() {
    die();
    ::waitpid(pid_, nullptr, 0);
  }
  void die() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  std::string number() const { return std::to_string(pid_); }
  // What it would have written into the store.
  std::string card() const { return number() + " " + axo::process_space() + " " + axo::host_identity(); }

 private:
  const pid_t pid_;
};

// Lets `what` happen a little later, on a thread of its own.
class Later {
 public:
  explicit Later(std::function<void()> what)
      : thread_([what = std::move(what)] {
          std::this_thread::sleep_for(Milliseconds(150));
          what();
        }) {}
  ~Later() { thread_.join(); }

 private:
  std::thread thread_;
};

// All ranks connect; rank 1 is taken for `process`.
Comm connect_beside(const Process& process, Rank& me, Meet& all) {
  if (me.rank == 0) me.store->pretend("world/process/1", process.card());
  all.here();
  Comm comm = me.connect();
  all.here();
  return comm;
}

void lost(const std::function<void()>& call, int peer, const std::string& said) {
  try {
    call();
  } catch (const axo::PeerLost& e) {
    CHECK_EQ(e.peer(), peer);
    if (std::string(e.what()).find(said) == std::string::npos) throw check::Failed(std::string("it said ") + e.what());
    return;
  }
  throw check::Failed("no PeerLost: " + said);
}

}  // namespace

TEST(a_peer_that_dies_is_named_though_the_library_is_silent) {
  Process process;
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm comm = connect_beside(process, me, both);
    if (me.rank == 0) {
      float x = 1;
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      Later later([&] { process.die(); });
      lost([&] { work->synchronize(axo::kNoTimeout); }, 1,
           "all_reduce(float32[1], sum) #1 on 'world' (rank 0 of 2), after");
      lost([&] { work->wait(); }, 1, ": rank 1 (process " + process.number() + ") died");
      CHECK(comm->failure() != nullptr);
      CHECK_THROWS(axo::Aborted, "died", comm->barrier(me.on_stream()));
    } else {
      CHECK(comm->failure() == nullptr);
    }
    both.here();
    comm->shutdown();
  });
}

TEST(the_librarys_own_news_of_a_loss_get_a_name) {
  Process process;
  Meet both(2);
  ranks(2, [&](Rank& me) {
    Comm comm = connect_beside(process, me, both);
    if (me.rank == 0) {
      process.die();
      float x = 1;
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      __atomic_store_n(&standin::settings().async_error, int{axo::kNcclRemoteError}, __ATOMIC_SEQ_CST);
      lost([&] { work->synchronize(axo::kNoTimeout); }, 1, "died");
    }
    both.here();
    comm->shutdown();
  });
}

TEST(a_rank_that_dies_while_others_meet) {
  for (int dead : {0, 1}) {
    Process process;
    ranks(2, [&](Rank& me) {
      if (me.rank == dead) return me.store->set("early/process/" + std::to_string(dead), process.card());
      Later later([&] { process.die(); });
      lost([&] { me.connect("early"); }, dead, "died before all had come");
    });
  }
}

TEST(the_others_hear_of_it_from_rank_0) {
  Process process;
  process.die();
  ranks(3, [&](Rank& me) {
    if (me.rank == 2) return me.store->set("heard/process/2", process.card());
    lost([&] { me.connect("heard"); }, 2, "died before all had come");
  });
}

TEST(a_rank_that_dies_while_the_library_connects) {
  Process process;
  ranks(2, [&](Rank& me) {
    if (me.rank == 1) return;
    me.store->set("half/process/1", process.card());
    me.store->set("half/hello/1", std::string(me.context->nccl().transport()) + " " +
                                      me.context->nccl().version_text() + "\nanother 0000:00:00.0");
    Later later([&] { process.die(); });
    lost([&] { me.connect("half"); }, 1, "ncclCommInitRankConfig on 'half': rank 1 (process ");
  });
}

TEST(a_communicator_that_is_given_up_before_it_is_made) {
  for (const bool met : {false, true}) {
    auto cancelled = std::make_shared<std::atomic<bool>>(false);
    ranks(2, [&](Rank& me) {
      if (me.rank == 1) return;
      if (met) {
        me.store->set("given/hello/1", std::string(me.context->nccl().transport()) + " " +
                                           me.context->nccl().version_text() + "\nanother 0000:00:00.0");
      }
      DeviceOptions options;
      options.cancelled = cancelled;
      Later later([&] { cancelled->store(true); });
      CHECK_THROWS(axo::Aborted, "aborted while its ranks met", me.connect("given", options));
    });
  }
}

TEST(what_another_rank_has_told_comes_before_its_own_death) {
  Process process;
  Meet all(3);
  ranks(3, [&](Rank& me) {
    Comm comm = connect_beside(process, me, all);
    if (me.rank == 0) {  // rank 1 has seen rank 2 die, said so, and ended
      me.store->set("world/abort", "lost:2 rank 1: rank 2 (process 77) died");
      process.die();
      float x = 1;
      auto work = comm->all_reduce(&x, &x, 1, f32, ReduceOp::sum, me.on_stream());
      lost([&] { work->synchronize(axo::kNoTimeout); }, 2, "'world': rank 1: rank 2 (process 77) died");
    }
    all.here();
    comm->shutdown();
  });
}

TEST(ranks_of_other_hosts_end_the_look) {
  auto store = std::make_shared<MapStore>();
  Process process;
  process.die();
  const std::string far = "1 " + axo::process_space() + " another host";
  axo::DevicePeers peers(store, "k", 1, 9);
  store->set("k/process/0", process.card().replace(0, process.number().size(), std::to_string(::getpid())));
  store->set("k/process/2", far);
  store->set("k/process/3", process.card());
  CHECK_EQ(peers.lost(), -1);  // rank 3 is behind another host
  axo::DevicePeers from_4(store, "k", 4, 9);
  CHECK_EQ(from_4.lost(), 3);
  axo::DevicePeers::leave_all();
  CHECK_EQ(store->get("k/process/4", Milliseconds(0)), "left");
  CHECK_EQ(store->get("k/process/1", Milliseconds(0)), "left");
}

TEST(what_the_store_says_of_peers_is_not_believed_blindly) {
  auto store = std::make_shared<MapStore>();
  Process process;
  process.die();
  const std::string dead = process.number(), here = axo::process_space(), host = axo::host_identity();
  for (const std::string& told : {std::string(), std::string("x y z"), "-" + dead + " " + here + " " + host, dead,
                                  dead + " " + here, dead + " " + here + " another host", dead + " pid:[1] " + host,
                                  std::string("99999999999999999999 a b"), std::string("left")}) {
    axo::DevicePeers peers(store, "k", 0, 2);
    store->set("k/process/1", told);
    CHECK_EQ(peers.lost(), -1);
  }
  axo::DevicePeers peers(store, "k", 0, 3);
  store->set("k/process/1", process.card());
  CHECK_EQ(peers.lost(), 1);
  CHECK_EQ(peers.title(1), "rank 1 (process " + dead + ")");
  axo::DevicePeers(store, "k", 1, 3).leave();  // in peace, before it died
  CHECK_EQ(peers.lost(), -1);
  store->break_down();
  CHECK_EQ(peers.lost(), -1);
  CHECK_EQ(axo::DevicePeers(nullptr, "k", 0, 1).lost(), -1);
}

}  // namespace device

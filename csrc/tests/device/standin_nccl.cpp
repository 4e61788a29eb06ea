// libnccl (librccl with AXO_STANDIN_HIP) over the simulator: communicators of threads that really reduce and move.
//
// AXO_STANDIN_OLD leaves out what version 2.21 has not: one-call gather, scatter and all-to-all, windows.
// An operation runs when it has been reached on the streams of all ranks. Ranks that differ in kind or size never
// finish, as on a GPU.
// As NCCL 2.18 to 2.30 do it (read in their sources; facts, no code): with blocking=1 a call returns when it is done,
// or when another thread aborts the communicator. With blocking=0 a split, and from 2.28.9 on a window, say success at
// once and fill the caller's slot later from a thread; from 2.23 on every launch makes a thread; before 2.24 a lone
// send or recv says success before its kernel is on the stream. Where the launch order is implicit a kernel begins
// after every one that was launched before it on its device has begun.
// RCCL 2.20 to 2.31 (ROCm 6.2 to 10; likewise read) does as NCCL of its number does, but for this: the implicit order,
// from 2.28.3 on, is one operation after the other; an exchange of one rank hangs in 2.27 and 2.28.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "device/nccl_api.h"
#include "standin.h"
#include "standin_math.h"

#ifdef AXO_STANDIN_OLD
constexpr int kOwnVersion = 22105;
#elif defined(AXO_STANDIN_HIP)
constexpr int kOwnVersion = 23102;
#else
constexpr int kOwnVersion = 23203;
#endif

using axo::NcclConfig;
using axo::NcclUniqueId;
using standin::Action;

namespace {

enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, recv, all_to_all, gather, scatter };

struct Comm;

struct Call {
  Kind kind;
  const void* in;
  void* out;
  std::size_t count;
  int type;
  int op;
  int root;  // or peer
  double factor = 1;
};

// One operation of one rank that the rank's stream has reached.
struct Arrival {
  Call call;
  Comm* comm;
  bool done = false;
};
using ArrivalPtr = std::shared_ptr<Arrival>;

struct Clique {
  int size = 0;
  std::string id;         // where ranks are processes
  bool all_here = false;  // the same
  std::vector<Comm*> members;
  std::vector<std::vector<ArrivalPtr>> collectives;                     // [n][rank]
  std::map<std::pair<int, int>, std::vector<ArrivalPtr>> sends, recvs;  // (from, to)
  struct Split {
    std::map<int, std::pair<int, int>> wishes;  // rank -> (color, key)
    std::map<int, Comm*> children;              // once all have come
    std::map<int, NcclConfig> configs;
    bool done = false;
  };
  std::vector<Split> splits;
  std::set<std::string> gpus;
  bool duplicate = false;  // two ranks on one GPU, as the version tells them apart
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int device = 0;
  NcclConfig config{};
  std::size_t collectives = 0, splits = 0;
  int polls = 0;  // "in progress" answers still to give
  int jobs = 0;   // threads that still work for a call that has returned
  // Kernels on the device that use the same buffers: its own, and those of relatives that share them.
  std::shared_ptr<int> running = std::make_shared<int>(0);
  int graphs = 0;  // that hold launches of it (localPersistentRefs)
  bool blocking() const { return config.blocking != 0; }
  bool finalized = false;
  int async = 0;
  std::vector<std::pair<standin::Stream*, standin::Maker>> held;  // launches that wait for the polls
  std::map<int, double> factors;
  int next_op = 5;
  std::set<void*> registered;
};

struct Library {
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::set<Comm*> live;
  std::vector<Comm*> disposed;  // their memory stays: a kernel in flight may still name it
  int ids = 0;
  std::atomic<int> inside[standin::kDevices]{};
  std::shared_ptr<bool> last_begun[standin::kDevices];  // whether the last launch has, where the order is implicit
  int resident[standin::kDevices]{};
};
Library& library() {
  static Library* the = new Library;
  return *the;
}

struct Group {
  int depth = 0;
  std::vector<std::tuple<Comm*, void*, Call>> calls;
};
Group& group() {
  static thread_local Group the;
  return the;
}

// NCCL must not be entered by two threads for one device at a time.
class Inside {
 public:
  explicit Inside(const char* name) : device_(standin::current_device()) {
    if (library().inside[device_]++ > 0)
      standin::violation(std::string(name) + ": two threads in the library for one device");
  }
  ~Inside() { --library().inside[device_]; }

 private:
  int device_;
};

#define ENTER(name, ...)                                     \
  do {                                                       \
    char text[160];                                          \
    std::snprintf(text, sizeof text, name __VA_ARGS__);      \
    standin::note(text);                                     \
  } while (0);                                               \
  if (const int code = standin::injected(name)) return code; \
  Inside inside(name);                                       \
  std::unique_lock<std::recursive_mutex> hold(standin::lock())
using Hold = std::unique_lock<std::recursive_mutex>;

bool alive(Comm* comm) { return library().live.count(comm) > 0; }
void open_clique(Comm* comm, const std::shared_ptr<Clique>& clique, int rank, const NcclConfig& config);
void run(const std::vector<ArrivalPtr>& ranks);

#include "standin_peers.inc"

bool complete(Clique& clique) {
  if (!peers::folder().empty()) return peers::all_here(clique);
  return static_cast<int>(clique.members.size()) == clique.size;
}

int state_of(Comm& comm) {
  if (comm.async) return comm.async;
  return !complete(*comm.clique) || comm.polls > 0 || comm.jobs > 0 ? axo::kNcclInProgress : axo::kNcclSuccess;
}

int version() { return standin::settings().nccl_version ? standin::settings().nccl_version : kOwnVersion; }

// The caller waits inside the library until `done`, and then as long as the test says; an abort frees it.
int block(Comm* comm, const std::function<bool()>& done) {
  standin::wait_until([&] { return !alive(comm) || done(); });
  while (true) {
    {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      if (!alive(comm)) return axo::kNcclInternalError;
      if (comm->polls == 0) return axo::kNcclSuccess;
      --comm->polls;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// A thread does `fill` once `done`, after the call has returned. It does so even when the communicator is aborted.
void later(Comm* comm, const std::function<bool()>& done, const std::function<void()>& fill) {
  ++comm->jobs;
  std::thread([comm, done, fill] {
    standin::wait_until([&] { return !alive(comm) || done(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::lock_guard<std::recursive_mutex> hold(standin::lock());
    fill();
    --comm->jobs;
    standin::progress();
  }).detach();
}

// Whether NCCL orders this communicator's launches against those of others on the device.
bool ordered(const Comm& comm) {
#ifdef AXO_STANDIN_HIP
  (void)comm;
  return false;
#else
  if (version() >= 23100) return comm.config.launchOrderImplicit == 1;
  if (version() < 22600) return false;
  int& read = standin::settings().launch_order_read;  // once a process
  if (read < 0) {
    const char* text = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    read = text && std::strcmp(text, "1") == 0;
  }
  return read == 1;
#endif
}

#include "standin_run.inc"

void arrive(const ArrivalPtr& arrival, std::size_t number) {
  Comm& comm = *arrival->comm;
  Clique& clique = *comm.clique;
  const Call& c = arrival->call;
  if (c.kind == Kind::send || c.kind == Kind::recv) {
    const bool sends = c.kind == Kind::send;
    const auto route = sends ? std::make_pair(comm.rank, c.root) : std::make_pair(c.root, comm.rank);
    (sends ? clique.sends : clique.recvs)[route].push_back(arrival);
    auto &from = clique.sends[route], &to = clique.recvs[route];
    while (!from.empty() && !to.empty()) {
      const Call &s = from.front()->call, &r = to.front()->call;
      if (s.count != r.count || s.type != r.type) return;  // never finishes
      if (s.count) std::memcpy(r.out, s.in, s.count * standin::bytes_of(s.type));
      count_sent(from.front()->comm->device, to.front()->comm->device, s.count * standin::bytes_of(s.type));
      from.front()->done = to.front()->done = true;
      from.erase(from.begin());
      to.erase(to.begin());
    }
    return;
  }
  if (clique.collectives.size() <= number) clique.collectives.resize(number + 1);
  auto& ranks = clique.collectives[number];
  ranks.resize(clique.size);
  ranks[comm.rank] = arrival;
  for (const auto& other : ranks) {
    if (!other || !peers::alike(other->call, c)) return;
  }
  run(ranks);
}

// Thread blocks that must begin in one GPC, on a Hopper: those of a cluster. NCCL's default is 4, and 1 where that does
// not divide the grid (init.cc, parseCommConfig; enqueue.cc, ncclLaunchKernel).
int cluster_of(const Comm& comm) {
#ifdef AXO_STANDIN_HIP
  (void)comm;
  return 1;
#else
  const auto given = [](int value, int otherwise) { return value == axo::kNcclUndefined ? otherwise : value; };
  const int cluster = given(comm.config.cgaClusterSize, 4);
  return cluster == 0 || given(comm.config.maxCTAs, 32) % cluster ? 1 : cluster;
#endif
}

// Its place in the implicit order of a device's launches; empty: none.
struct Place {
  std::shared_ptr<bool> after, begun;
};
Place next_place(const Comm& comm) {
  auto& last = library().last_begun[comm.device];
  Place place{last, std::make_shared<bool>(false)};
  last = place.begun;
  return place;
}

// The launch of several calls on one communicator and stream: one kernel, done when all of them are.
Action kernel_of(Comm* comm, const std::vector<Call>& calls, const Place& place) {
  struct State {
    bool resident = false;
    std::vector<ArrivalPtr> arrivals;
    std::vector<std::size_t> numbers;
    std::vector<std::function<bool()>> elsewhere;  // asks for operations with other processes
    bool arrived = false;
  };
  auto state = std::make_shared<State>();
  for (const Call& call : calls) {
    state->arrivals.push_back(std::make_shared<Arrival>(Arrival{call, comm}));
    const bool p2p = call.kind == Kind::send || call.kind == Kind::recv;
    state->numbers.push_back(p2p ? 0 : comm->collectives++);
  }
  Action action;
  for (const Call& call : calls) action.names.insert(action.names.end(), {call.in, call.out});
  action.ready = [state, comm, place] {
    if (place.begun && alive(comm) && place.after && !*place.after) return false;
    int& resident = library().resident[comm->device];
    const int most = standin::settings().resident_kernels;
    if (alive(comm) && !state->resident) {
      if (most > 0 && resident >= most) return false;
      const int free = standin::settings().free_in_a_gpc;
      if (free > 0 && cluster_of(*comm) > free) return false;
      ++resident;
      state->resident = true;
      if ((*comm->running)++ > 0) standin::violation("operations that share buffers run at once");
    }
    if (place.begun) *place.begun = true;
    const auto leave = [&] {
      if (state->resident) --resident, --*comm->running;
      state->resident = false;
      return true;
    };
    if (!alive(comm)) return leave();  // aborted: the kernel ends with nothing done
    if (!state->arrived) {
      state->arrived = true;
      for (std::size_t i = 0; i < state->arrivals.size(); ++i) {
        if (peers::folder().empty()) {
          arrive(state->arrivals[i], state->numbers[i]);
        } else {
          state->elsewhere.push_back(peers::arrive(state->arrivals[i], state->numbers[i]));
        }
      }
    }
    for (const auto& ask : state->elsewhere) ask();
    for (const auto& arrival : state->arrivals) {
      if (!arrival->done) return false;
    }
    return leave();
  };
  return action;
}

int launch(const std::vector<std::tuple<Comm*, void*, Call>>& calls, Hold& hold) {
  std::vector<std::pair<std::pair<Comm*, standin::Stream*>, std::vector<Call>>> kernels;
  for (const auto& [comm, stream, call] : calls) {
    standin::Stream* s = standin::stream_of(stream);
    if (!alive(comm) || !s || s->device != comm->device) return axo::kNcclInvalidArgument;
    if (comm->async) return comm->async;
    if (state_of(*comm) == axo::kNcclInProgress) return axo::kNcclInvalidUsage;
    const auto where = std::make_pair(comm, s);
    if (kernels.empty() || kernels.back().first != where) {
      auto it = kernels.begin();
      while (it != kernels.end() && it->first != where) ++it;
      if (it == kernels.end()) {
        kernels.push_back({where, {call}});
      } else {
        it->second.push_back(call);
      }
    } else {
      kernels.back().second.push_back(call);
    }
  }
  if (kernels.empty()) return axo::kNcclSuccess;
  for (const auto& [where, list] : kernels) {
    if (where.first->blocking() != kernels.front().first.first->blocking()) return axo::kNcclInvalidArgument;
  }
  const bool blocking = kernels.front().first.first->blocking();
  const bool lone_message =
      calls.size() == 1 && (std::get<2>(calls[0]).kind == Kind::send || std::get<2>(calls[0]).kind == Kind::recv);
  int polls = standin::settings().launch_polls, result = axo::kNcclSuccess;
  if (blocking) {
    for (const auto& [where, list] : kernels) {
      where.first->polls = polls;
      hold.unlock();
      result = block(where.first, [] { return true; });
      hold.lock();
      if (result != axo::kNcclSuccess) return result;
    }
    polls = 0;
  } else if (version() >= 22300) {
    standin::count_launch_thread();
    polls = std::max(polls, 1);
  } else if (version() < 22400 && lone_message) {
    polls = std::max(polls, 2);
  }
  if (polls > 0) result = lone_message && version() < 22400 ? axo::kNcclSuccess : axo::kNcclInProgress;
  for (const auto& [where, list] : kernels) {
    Comm* comm = where.first;
    if (where.second->graph) {
      ++comm->graphs;
      standin::at_end_of(*where.second->graph, [comm] { --comm->graphs; });
    }
    const Place place = ordered(*comm) && !where.second->graph ? next_place(*comm) : Place{};
    const standin::Maker make = [comm, calls = list, place] { return kernel_of(comm, calls, place); };
    if (polls > 0) {
      comm->polls = polls;
      comm->held.emplace_back(where.second, make);
    } else {
      standin::enqueue(*where.second, make);
    }
  }
  return result;
}

int issue(Comm* comm, void* stream, Call call, Hold& hold) {
  const auto factor = comm && alive(comm) ? comm->factors.find(call.op) : std::map<int, double>::iterator{};
  if (comm && alive(comm) && call.op > axo::kNcclAvg) {
    if (factor == comm->factors.end()) return axo::kNcclInvalidArgument;
    call.factor = factor->second;
  }
#ifdef AXO_STANDIN_HIP
  const bool parts = call.kind >= Kind::send;
  if (parts && version() >= 22700 && version() < 22900 && alive(comm) && comm->clique->size == 1)
    standin::violation("RCCL 2.27 and 2.28 hang in an exchange of one rank");
#endif
  if (group().depth > 0) {
    group().calls.emplace_back(comm, stream, call);
    return axo::kNcclSuccess;
  }
  return launch({{comm, stream, call}}, hold);
}

// sizeof(ncclConfig_t), as the compiler says from the headers of these versions.
bool valid(const NcclConfig* config) {
  static const std::map<int, std::size_t> kBytes = {{21800, 48}, {22600, 48}, {22700, 72},  {22800, 80},
                                                    {22900, 88}, {23000, 96}, {23100, 112}, {23200, 120}};
  const int minor = std::min(version(), 23203) / 100 * 100;
#ifdef AXO_STANDIN_HIP
  if (minor >= 23100 && config->launchOrderImplicit != axo::kNcclUndefined)
    standin::violation("RCCL is asked for an order that runs one operation after the other");
#endif
  return config && config->magic == 0xcafebeef && config->size == std::prev(kBytes.upper_bound(minor))->second &&
         static_cast<int>(config->version) == std::min(version(), 23203) &&
         (config->blocking == 0 || config->blocking == 1) &&
         // parseCommConfig; what is undefined is INT_MIN, and compared like a number
         (config->minCTAs == axo::kNcclUndefined || config->minCTAs > 0) &&
         (config->maxCTAs == axo::kNcclUndefined || config->maxCTAs > 0) && config->minCTAs <= config->maxCTAs;
}

}  // namespace

// The rest of the library's functions: communicators and registration.
#include "standin_nccl_comm.inc"

extern "C" {

int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int op, void* comm, void* stream) {
  ENTER("ncclAllReduce", " count=%zu type=%d op=%d", count, type, op);
  return issue(static_cast<Comm*>(comm), stream, {Kind::all_reduce, in, out, count, type, op, 0}, hold);
}
int ncclAllGather(const void* in, void* out, std::size_t count, int type, void* comm, void* stream) {
  ENTER("ncclAllGather", " count=%zu type=%d", count, type);
  return issue(static_cast<Comm*>(comm), stream, {Kind::all_gather, in, out, count, type, 0, 0}, hold);
}
int ncclReduceScatter(const void* in, void* out, std::size_t count, int type, int op, void* comm, void* stream) {
  ENTER("ncclReduceScatter", " count=%zu type=%d op=%d", count, type, op);
  return issue(static_cast<Comm*>(comm), stream, {Kind::reduce_scatter, in, out, count, type, op, 0}, hold);
}
int ncclBroadcast(const void* in, void* out, std::size_t count, int type, int root, void* comm, void* stream) {
  ENTER("ncclBroadcast", " count=%zu type=%d root=%d", count, type, root);
  return issue(static_cast<Comm*>(comm), stream, {Kind::broadcast, in, out, count, type, 0, root}, hold);
}
int ncclReduce(const void* in, void* out, std::size_t count, int type, int op, int root, void* comm, void* stream) {
  ENTER("ncclReduce", " count=%zu type=%d op=%d root=%d", count, type, op, root);
  return issue(static_cast<Comm*>(comm), stream, {Kind::reduce, in, out, count, type, op, root}, hold);
}
int ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  ENTER("ncclSend", " count=%zu type=%d peer=%d", count, type, peer);
  return issue(static_cast<Comm*>(comm), stream, {Kind::send, data, nullptr, count, type, 0, peer}, hold);
}
int ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  ENTER("ncclRecv", " count=%zu type=%d peer=%d", count, type, peer);
  return issue(static_cast<Comm*>(comm), stream, {Kind::recv, nullptr, data, count, type, 0, peer}, hold);
}
#ifndef AXO_STANDIN_OLD
int ncclAlltoAll(const void* in, void* out, std::size_t count, int type, void* comm, void* stream) {
  ENTER("ncclAlltoAll", " count=%zu type=%d", count, type);
  if (in == out && count) return axo::kNcclInvalidArgument;
  return issue(static_cast<Comm*>(comm), stream, {Kind::all_to_all, in, out, count, type, 0, 0}, hold);
}
#ifdef AXO_STANDIN_HIP
int ncclAllToAll(const void* in, void* out, std::size_t count, int type, void* comm, void* stream) {
  if (version() >= 22800) standin::violation("RCCL warns of its older name for ncclAlltoAll, at every call");
  return ncclAlltoAll(in, out, count, type, comm, stream);
}
#endif
int ncclGather(const void* in, void* out, std::size_t count, int type, int root, void* comm, void* stream) {
  ENTER("ncclGather", " count=%zu type=%d root=%d", count, type, root);
  return issue(static_cast<Comm*>(comm), stream, {Kind::gather, in, out, count, type, 0, root}, hold);
}
int ncclScatter(const void* in, void* out, std::size_t count, int type, int root, void* comm, void* stream) {
  ENTER("ncclScatter", " count=%zu type=%d root=%d", count, type, root);
  return issue(static_cast<Comm*>(comm), stream, {Kind::scatter, in, out, count, type, 0, root}, hold);
}
#endif
int ncclGroupStart() {
  ENTER("ncclGroupStart");
  ++group().depth;
  return 0;
}
int ncclGroupEnd() {
  ENTER("ncclGroupEnd");
  if (group().depth == 0) return axo::kNcclInvalidUsage;
  if (--group().depth > 0) return 0;
  const auto calls = std::move(group().calls);
  group().calls.clear();
  return launch(calls, hold);
}

}  // extern "C"

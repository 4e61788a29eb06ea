// The stand-in library itself, called as Axo no longer calls it: with blocking=0. There it does what NCCL's versions
// do. Otherwise "no launch makes a thread" and its like would hold because nothing could break them. Oracle: NCCL's
// sources, as standin_nccl.cpp says. The simulator's lock is held during a call and until its result has been looked
// at, so that no thread of the stand-in's can be faster than the look.
#include "device_ranks.h"

namespace device {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

int state(const axo::NcclApi& nccl, axo::NcclComm comm) {
  int result = 0;
  CHECK_EQ(nccl->CommGetAsyncError(comm, &result), 0);
  return result;
}

void settle(const axo::NcclApi& nccl, axo::NcclComm comm) {
  eventually([&] { return state(nccl, comm) != axo::kNcclInProgress; });
  CHECK_EQ(state(nccl, comm), int{axo::kNcclSuccess});
}

axo::NcclConfig not_blocking(const axo::NcclApi& nccl) {
  axo::NcclConfig config = axo::make_nccl_config(nccl.version());
  config.blocking = 0;
  return config;
}

void finish(const axo::NcclApi& nccl, axo::NcclComm comm) {
  CHECK_EQ(nccl->CommFinalize(comm), 0);
  CHECK_EQ(nccl->CommDestroy(comm), 0);
}

// What a call says at once, and whether its work is on the stream then.
struct Launched {
  int result;
  bool queued;
};
Launched launched(void* stream, const std::function<int()>& call) {
  Lock hold(standin::lock());
  const standin::NodePtr before = standin::stream_of(stream)->last;
  const int result = call();
  return {result, standin::stream_of(stream)->last != before};
}

TEST(without_blocking_the_library_answers_early) {
  for (int version : versions()) {
    standin::reset();
    standin::settings().nccl_version = version;
    // The thread of a launch, since 2.23; a lone transfer that is called done too early, before 2.24; a window that
    // comes late, since 2.28.9.
    const bool threads = version >= 22300, late_window = version >= 22809;
    const Launched usual = threads ? Launched{axo::kNcclInProgress, false} : Launched{axo::kNcclSuccess, true};
    const Launched lone = version < 22400 ? Launched{axo::kNcclSuccess, false} : usual;
    axo::NcclUniqueId id{};
    Meet both(2);
    ranks(2, [&](Rank& me) {
      const axo::NcclApi& nccl = me.context->nccl();
      axo::NcclConfig config = not_blocking(nccl);
      axo::NcclComm comm = nullptr;
      if (me.rank == 0) CHECK_EQ(nccl->GetUniqueId(&id), 0);
      both.here();
      CHECK_EQ(nccl->CommInitRankConfig(&comm, 2, id, me.rank, &config), int{axo::kNcclInProgress});
      CHECK(comm != nullptr);  // a handle, not yet a communicator
      settle(nccl, comm);

      float x = 1, y = 5.0f - me.rank;
      const auto reduce = [&] { return nccl->AllReduce(&x, &x, 1, axo::kNcclFloat32, axo::kNcclSum, comm, me.stream); };
      const auto transfer = [&] {
        return me.rank == 0 ? nccl->Send(&y, 1, axo::kNcclFloat32, 1, comm, me.stream)
                            : nccl->Recv(&y, 1, axo::kNcclFloat32, 0, comm, me.stream);
      };
      const auto grouped = [&] {
        nccl->GroupStart();
        reduce();
        transfer();
        return nccl->GroupEnd();
      };
      const std::vector<std::pair<std::function<int()>, Launched>> cases = {
          {reduce, usual}, {transfer, lone}, {grouped, usual}};
      for (const auto& [call, expected] : cases) {
        const Launched seen = launched(me.stream, call);
        CHECK_EQ(seen.result, expected.result);
        CHECK_EQ(seen.queued, expected.queued);
        settle(nccl, comm);
      }
      standin::synchronize(me.stream);
      CHECK_EQ(x, 4.0f);
      CHECK_EQ(y, 5.0f);

      axo::NcclComm child = nullptr;
      {
        Lock hold(standin::lock());
        CHECK_EQ(nccl->CommSplit(comm, 0, 0, &child, &config), int{axo::kNcclSuccess});
        CHECK(child == nullptr);
        CHECK_EQ(state(nccl, comm), int{axo::kNcclInProgress});
        CHECK(reduce() != axo::kNcclSuccess);  // one after the other
      }
      settle(nccl, comm);
      int size = 0;
      CHECK_EQ(nccl->CommCount(child, &size), 0);
      CHECK_EQ(size, 2);

      if (nccl.has_windows()) {
        void *memory = nullptr, *window = nullptr;
        CHECK_EQ(nccl->MemAlloc(&memory, 64), 0);
        {
          Lock hold(standin::lock());
          CHECK_EQ(nccl->CommWindowRegister(comm, memory, 64, &window, axo::kNcclWindowSymmetric), 0);
          CHECK_EQ(window == nullptr, late_window);
          CHECK_EQ(state(nccl, comm), late_window ? int{axo::kNcclInProgress} : int{axo::kNcclSuccess});
        }
        settle(nccl, comm);
        CHECK_EQ(nccl->CommWindowDeregister(comm, window), 0);
        CHECK_EQ(nccl->MemFree(memory), 0);
      }
      both.here();
      finish(nccl, child);
      finish(nccl, comm);
    });
    CHECK_EQ(standin::launch_threads(), threads ? 2 * 3 : 0);
  }
}

// So a handle on a stack would be written when its frame has gone.
TEST(without_blocking_a_split_writes_its_handle_after_an_abort) {
  axo::NcclUniqueId id{};
  Meet both(2);
  ranks(2, [&](Rank& me) {
    const axo::NcclApi& nccl = me.context->nccl();
    axo::NcclConfig config = not_blocking(nccl);
    axo::NcclComm comm = nullptr, child = nullptr;
    if (me.rank == 0) CHECK_EQ(nccl->GetUniqueId(&id), 0);
    both.here();
    nccl->CommInitRankConfig(&comm, 2, id, me.rank, &config);
    settle(nccl, comm);
    both.here();
    if (me.rank == 0) {  // the other never comes
      CHECK_EQ(nccl->CommSplit(comm, 0, 0, &child, &config), int{axo::kNcclSuccess});
      CHECK_EQ(nccl->CommAbort(comm), 0);
      eventually([&] { return __atomic_load_n(&child, __ATOMIC_ACQUIRE) != nullptr; });
      int size = 0;
      CHECK(nccl->CommCount(child, &size) != axo::kNcclSuccess);  // it is no communicator
    }
    both.here();
    if (me.rank == 1) finish(nccl, comm);
  });
}

// What a version has not, the stand-in has not either.
TEST(functions_of_every_version) {
  for (int version : versions()) {
    standin::settings().nccl_version = version;
    ranks(1, [&](Rank& me) {
      const axo::NcclApi& nccl = me.context->nccl();
      CHECK_EQ(nccl.has_registration(), !is_old() && version >= 21900);
      CHECK_EQ(nccl->MemAlloc != nullptr, !is_old() && version >= 21900);
      CHECK_EQ(nccl.has_windows(), !is_old() && version >= 22700);
      for (const bool has : {nccl->AlltoAll != nullptr, nccl->Gather != nullptr, nccl->Scatter != nullptr}) {
        CHECK_EQ(has, is_hip() || version >= 22800);  // RCCL's own
      }
    });
  }
}

}  // namespace
}  // namespace device

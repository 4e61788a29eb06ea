// The communicator of GPUs: turns calls into device_core requests. See device/communicator.h.
#include "device/communicator.h"

#include <algorithm>

#include "device/core.h"
#include "device/group.h"

namespace axo {
namespace {

using Sizes = std::vector<std::size_t>;

void* at(void* data, std::size_t bytes) { return static_cast<char*>(data) + bytes; }
const void* at(const void* data, std::size_t bytes) { return static_cast<const char*>(data) + bytes; }

class Impl final : public DeviceCommunicator {
 public:
  explicit Impl(std::shared_ptr<DeviceCore> core) : core_(std::move(core)) {}

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  const std::string& name() const override { return core_->name(); }
  const char* transport() const override { return core_->nccl().transport(); }
  int device() const override { return core_->context().device(); }
  void* stream() const override { return core_->stream(); }
  int reserved_ctas() const override { return core_->context().reserved_ctas(); }
  int library_version() const override { return core_->nccl().version(); }

  WorkPtr all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                     const CallOptions& options) override {
    const int type = nccl_reduced("all_reduce", dtype, op), nccl_op_ = nccl_op(dtype, op);
    need("all_reduce: in and out", in && out, count);
    return launch(
        {"all_reduce", dtype, count, name_of(op)},
        {{}, [=, c = core_](GpuStream s) { return api(c)->AllReduce(in, out, count, type, nccl_op_, c->comm(), s); }},
        options);
  }

  WorkPtr all_gather(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override {
    const auto moved = nccl_moved(dtype, count);
    need("all_gather: in and out", in && out, count);
    return launch(
        {"all_gather", dtype, count},
        {{}, [=, c = core_](GpuStream s) { return api(c)->AllGather(in, out, moved.count, moved.type, c->comm(), s); }},
        options);
  }

  WorkPtr reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                         const CallOptions& options) override {
    const int type = nccl_reduced("reduce_scatter", dtype, op), nccl_op_ = nccl_op(dtype, op);
    need("reduce_scatter: in and out", in && out, count);
    return launch(
        {"reduce_scatter", dtype, count, name_of(op)},
        {{},
         [=, c = core_](GpuStream s) { return api(c)->ReduceScatter(in, out, count, type, nccl_op_, c->comm(), s); }},
        options);
  }

  WorkPtr broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override {
    check_root("broadcast", root);
    const auto moved = nccl_moved(dtype, count);
    need("broadcast: data", data, count);
    return launch({"broadcast", dtype, count, nullptr, root},
                  {{},
                   [=, c = core_](GpuStream s) {
                     return api(c)->Broadcast(data, data, moved.count, moved.type, root, c->comm(), s);
                   }},
                  options);
  }

  WorkPtr reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op, int root,
                 const CallOptions& options) override {
    check_root("reduce", root);
    const int type = nccl_reduced("reduce", dtype, op), nccl_op_ = nccl_op(dtype, op);
    need("reduce: in, and out at the root", in && (out || root != rank()), count);
    return launch(
        {"reduce", dtype, count, name_of(op), root},
        {{},
         [=, c = core_](GpuStream s) { return api(c)->Reduce(in, out, count, type, nccl_op_, root, c->comm(), s); }},
        options);
  }

  WorkPtr gather(const void* in, void* out, std::size_t count, DType dtype, int root,
                 const CallOptions& options) override {
    check_root("gather", root);
    need("gather: in, and out at the root", in && (out || root != rank()), count);
    const auto m = nccl_moved(dtype, count);
    Launch how;
    if (core_->nccl()->Gather) {
      how.call = [=, c = core_](GpuStream s) { return api(c)->Gather(in, out, m.count, m.type, root, c->comm(), s); };
    } else {
      const std::size_t part = count * item_size(dtype);
      how.several_calls = true;
      if (rank() == root)
        how.before = [=, c = core_](GpuStream s) { c->gpu().copy(at(out, root * part), in, part, s); };
      how.call = [=, c = core_](GpuStream s) {
        if (c->rank() != root) return api(c)->Send(in, m.count, m.type, root, c->comm(), s);
        return for_peers(*c, [&](int r) { return api(c)->Recv(at(out, r * part), m.count, m.type, r, c->comm(), s); });
      };
    }
    return launch({"gather", dtype, count, nullptr, root}, std::move(how), options);
  }

  WorkPtr scatter(const void* in, void* out, std::size_t count, DType dtype, int root,
                  const CallOptions& options) override {
    check_root("scatter", root);
    need("scatter: out, and in at the root", out && (in || root != rank()), count);
    const auto m = nccl_moved(dtype, count);
    Launch how;
    if (core_->nccl()->Scatter) {
      how.call = [=, c = core_](GpuStream s) { return api(c)->Scatter(in, out, m.count, m.type, root, c->comm(), s); };
    } else {
      const std::size_t part = count * item_size(dtype);
      how.several_calls = true;
      if (rank() == root)
        how.before = [=, c = core_](GpuStream s) { c->gpu().copy(out, at(in, root * part), part, s); };
      how.call = [=, c = core_](GpuStream s) {
        if (c->rank() != root) return api(c)->Recv(out, m.count, m.type, root, c->comm(), s);
        return for_peers(*c, [&](int r) { return api(c)->Send(at(in, r * part), m.count, m.type, r, c->comm(), s); });
      };
    }
    return launch({"scatter", dtype, count, nullptr, root}, std::move(how), options);
  }

  WorkPtr all_to_all(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override {
    need("all_to_all: in and out", in && out, count);
    const auto m = nccl_moved(dtype, count);
    const std::size_t part = count * item_size(dtype);
    const auto from = std::make_shared<const void*>(in);
    Launch how;
    if (in == out) stage(how, from, part * size());
    how.several_calls = !core_->nccl()->AlltoAll;
    how.call = [=, c = core_](GpuStream s) {
      if (api(c)->AlltoAll) return api(c)->AlltoAll(*from, out, m.count, m.type, c->comm(), s);
      return for_all(*c, [&](int r) {
        const int sent = api(c)->Send(at(*from, r * part), m.count, m.type, r, c->comm(), s);
        return sent == kNcclSuccess ? api(c)->Recv(at(out, r * part), m.count, m.type, r, c->comm(), s) : sent;
      });
    };
    return launch({"all_to_all", dtype, count}, std::move(how), options);
  }

  WorkPtr all_to_all_v(const void* in, const Sizes& send_counts, const Sizes& send_offsets, void* out,
                       const Sizes& recv_counts, const Sizes& recv_offsets, DType dtype,
                       const CallOptions& options) override {
    const std::size_t ranks = size();
    for (const Sizes* sizes : {&send_counts, &send_offsets, &recv_counts, &recv_offsets}) {
      AXO_CHECK(sizes->size() == ranks, "all_to_all_v: entries of counts and offsets", sizes->size(),
                std::to_string(ranks));
    }
    const std::size_t item = item_size(dtype);
    std::size_t sent = 0, received = 0, extent = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      sent += send_counts[r];
      received += recv_counts[r];
      extent = std::max(extent, send_offsets[r] + send_counts[r]);
    }
    need("all_to_all_v: in", in, sent);
    need("all_to_all_v: out", out, received);
    const auto from = std::make_shared<const void*>(in);
    Launch how;
    if (in == out) stage(how, from, extent * item);
    how.several_calls = true;
    how.call = [=, c = core_](GpuStream s) {
      return for_all(*c, [&](int r) {
        const auto out_part = nccl_moved(dtype, send_counts[r]), in_part = nccl_moved(dtype, recv_counts[r]);
        int result = kNcclSuccess;
        if (out_part.count) {
          result = api(c)->Send(at(*from, send_offsets[r] * item), out_part.count, out_part.type, r, c->comm(), s);
        }
        if (in_part.count && result == kNcclSuccess) {
          result = api(c)->Recv(at(out, recv_offsets[r] * item), in_part.count, in_part.type, r, c->comm(), s);
        }
        return result;
      });
    };
    return launch({"all_to_all_v", dtype, 0}, std::move(how), options);  // counts differ between ranks
  }

  WorkPtr send(const void* data, std::size_t count, DType dtype, int peer, int tag,
               const CallOptions& options) override {
    check_peer("send", peer);
    need("send: data", data, count);
    const auto m = nccl_moved(dtype, count);
    return launch({"send", dtype, count, nullptr, -1, peer, tag},
                  {{}, [=, c = core_](GpuStream s) { return api(c)->Send(data, m.count, m.type, peer, c->comm(), s); }},
                  options);
  }

  WorkPtr recv(void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options) override {
    if (peer == kAnyPeer) {
      throw Error("recv on '" + name() + "': " + std::string(transport()) +
                  " matches messages by rank and cannot receive from any; name the peer, or move a CPU tensor");
    }
    check_peer("recv", peer);
    need("recv: data", data, count);
    const auto m = nccl_moved(dtype, count);
    return launch({"recv", dtype, count, nullptr, -1, peer, tag},
                  {{}, [=, c = core_](GpuStream s) { return api(c)->Recv(data, m.count, m.type, peer, c->comm(), s); }},
                  options);
  }

  // An all_reduce of one word that is zero on all ranks. The blocking form holds the host, as its name promises.
  WorkPtr barrier(const CallOptions& options) override {
    auto work = launch({"barrier", DType::int32, 1},
                       {{},
                        [c = core_](GpuStream s) {
                          return api(c)->AllReduce(c->scratch(), c->scratch(), 1, kNcclInt32, kNcclMax, c->comm(), s);
                        }},
                       options);
    if (options.blocking && !core_->gpu().capture_info(options.stream).active()) work->synchronize(kNoTimeout);
    return work;
  }

  WorkPtr all_reduce_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                            const CallOptions& options) override {
    need("all_reduce_scaled: in and out", in && out, count);
    return launch_scaled("all_reduce", dtype, count, scale, options, [=, c = core_](int op, int type, GpuStream s) {
      return api(c)->AllReduce(in, out, count, type, op, c->comm(), s);
    });
  }

  WorkPtr reduce_scatter_scaled(const void* in, void* out, std::size_t count, DType dtype, double scale,
                                const CallOptions& options) override {
    need("reduce_scatter_scaled: in and out", in && out, count);
    return launch_scaled("reduce_scatter", dtype, count, scale, options, [=, c = core_](int op, int type, GpuStream s) {
      return api(c)->ReduceScatter(in, out, count, type, op, c->comm(), s);
    });
  }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    AXO_CHECK(!inside_group(), "split", "a call inside a group", "one outside: ranks must meet at once");
    auto child = core_->split(color, key, name);
    return child ? std::make_shared<Impl>(std::move(child)) : nullptr;
  }
  void abort(const std::string& reason) override {
    core_->fail(std::make_exception_ptr(Aborted("communicator '" + name() + "' was aborted: " + reason)));
  }
  std::exception_ptr failure() override { return core_->failure(); }
  void shutdown() override { core_->shutdown(); }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    AXO_CHECK(core_->nccl().has_windows(), ("allocate: version of " + core_->nccl().path()).c_str(),
              core_->nccl().version_text(), "2.27 or newer");
    const auto turn = core_->context().queue().turn();
    DeviceGuard guard(core_->gpu(), device());
    void* data = nullptr;
    core_->nccl().check(core_->nccl()->MemAlloc(&data, bytes), "ncclMemAlloc");
    // Without a turn: the last reference may be a work's, which ends inside one.
    return std::shared_ptr<void>(data, [c = core_](void* p) { api(c)->MemFree(p); });
  }
  std::shared_ptr<void> register_buffer(void* data, std::size_t bytes, bool symmetric) override {
    AXO_CHECK(data && bytes, "register_buffer: bytes", bytes, "some memory");
    return core_->register_buffer(data, bytes, symmetric);
  }

  void follow(void* stream) override {
    on_stream([&] { core_->order(core_->stream(), stream, true, core_->gpu().capture_info(stream)); });
  }
  void wait_flag(const void* address, std::uint32_t value) override {
    check_flag("wait_flag", address);
    on_stream([&] { core_->gpu().wait_value(core_->stream(), address, value); });
  }
  void write_flag(void* address, std::uint32_t value) override {
    check_flag("write_flag", address);
    on_stream([&] { core_->gpu().write_value(core_->stream(), address, value); });
  }

 private:
  static const NcclApi::Table* api(const std::shared_ptr<DeviceCore>& core) { return core->nccl().operator->(); }

  // Calls `one(r)` for ranks in order until one fails.
  template <class One>
  static int for_all(const DeviceCore& core, const One& one) {
    int result = kNcclSuccess;
    for (int r = 0; r < core.size() && result == kNcclSuccess; ++r) result = one(r);
    return result;
  }
  template <class One>
  static int for_peers(const DeviceCore& core, const One& one) {
    return for_all(core, [&](int r) { return r == core.rank() ? kNcclSuccess : one(r); });
  }

  WorkPtr launch(Operation operation, Launch how, const CallOptions& options) {
    core_->check_usable();
    auto work = std::make_shared<DeviceWork>(core_, std::move(operation), std::move(how), options);
    AXO_CHECK(!options.blocking || !inside_group(), work->operation.kind, "a blocking call inside a group",
              "a non-blocking one");
    if (!record_in_group(work)) core_->context().queue().issue({work});
    return work;
  }

  template <class Call>
  WorkPtr launch_scaled(const char* kind, DType dtype, std::size_t count, double scale, const CallOptions& options,
                        Call call) {
    const int type = nccl_reduced(kind, dtype, ReduceOp::sum);
    const NcclScalar scalar(dtype, scale);  // throws for integers
    const auto op = std::make_shared<int>(0);
    Launch how;
    how.before = [c = core_, op, type, scalar](GpuStream) {
      NcclScalar factor = scalar;
      const int result =
          api(c)->RedOpCreatePreMulSum(op.get(), factor.bytes, type, kNcclScalarHostImmediate, c->comm());
      c->nccl().check(result, "ncclRedOpCreatePreMulSum", c->comm());
    };
    how.call = [op, type, call](GpuStream s) { return call(*op, type, s); };
    how.after = [c = core_, op](GpuStream) {
      c->nccl().check(api(c)->RedOpDestroy(*op, c->comm()), "ncclRedOpDestroy");
    };
    return launch({kind, dtype, count, "sum", -1, -1, 0, scale}, std::move(how), options);
  }

  // The library cannot exchange parts in place: `from` becomes a copy, on loan from the stream's memory.
  void stage(Launch& how, const std::shared_ptr<const void*>& from, std::size_t bytes) {
    if (bytes == 0) return;
    how.before = [c = core_, from, bytes](GpuStream s) {
      void* copy = c->gpu().allocate(bytes, s);
      c->gpu().copy(copy, *from, bytes, s);
      *from = copy;
    };
    how.after = [c = core_, from](GpuStream s) { c->gpu().release(const_cast<void*>(*from), s); };
  }

  template <class Action>
  void on_stream(const Action& action) {
    core_->check_usable();
    const auto turn = core_->context().queue().turn();
    DeviceGuard guard(core_->gpu(), device());
    action();
  }

  static void need(const char* what, bool present, std::size_t count) {
    AXO_CHECK(present || count == 0, what, "null", "a device address");
  }
  void check_root(const char* what, int root) const {
    AXO_CHECK(root >= 0 && root < size(), (std::string(what) + ": root").c_str(), root,
              "a rank below " + std::to_string(size()));
  }
  void check_peer(const char* what, int peer) const {
    AXO_CHECK(peer >= 0 && peer < size() && peer != rank(), (std::string(what) + ": peer").c_str(), peer,
              "another rank below " + std::to_string(size()));
  }
  static void check_flag(const char* what, const void* address) {
    AXO_CHECK(address && reinterpret_cast<std::uintptr_t>(address) % 4 == 0, (std::string(what) + ": address").c_str(),
              address, "a device address, 4-byte aligned");
  }

  std::shared_ptr<DeviceCore> core_;
};

}  // namespace

std::shared_ptr<DeviceCommunicator> create_device_communicator(std::shared_ptr<Store> store, const std::string& key,
                                                               int rank, int size, const DeviceOptions& options) {
  return std::make_shared<Impl>(create_device_core(store, key, rank, size, options));
}

}  // namespace axo

// The public face of the host transport: checks arguments and issues operations. The machinery is in host_core.h.
#include "host_communicator.h"

#include <limits>

#include "host_create.h"

namespace axo {
namespace {

using host::HostCore;
using host::HostWork;
using host::Kind;
using host::Request;

class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(std::shared_ptr<HostCore> core) : core_(std::move(core)) {}
  ~HostCommunicator() override { core_->release(); }

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  const std::string& name() const override { return core_->name(); }
  const char* transport() const override { return "shared-memory"; }

  WorkPtr all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                     const CallOptions& options) override {
    Request r = request(Kind::all_reduce, in, out, count, dtype);
    set_op(r, op);
    check_pointers(r, true, true);
    return issue(std::move(r), options);
  }

  WorkPtr all_gather(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override {
    Request r = request(Kind::all_gather, in, out, count, dtype);
    check_pointers(r, true, true);
    return issue(std::move(r), options);
  }

  WorkPtr reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                         const CallOptions& options) override {
    Request r = request(Kind::reduce_scatter, in, out, count, dtype);
    set_op(r, op);
    check_pointers(r, true, true);
    return issue(std::move(r), options);
  }

  WorkPtr broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override {
    Request r = request(Kind::broadcast, data, data, count, dtype);
    set_root(r, root);
    check_pointers(r, true, true);
    return issue(std::move(r), options);
  }

  WorkPtr reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op, int root,
                 const CallOptions& options) override {
    Request r = request(Kind::reduce, in, out, count, dtype);
    set_op(r, op);
    set_root(r, root);
    check_pointers(r, true, rank() == root);
    return issue(std::move(r), options);
  }

  WorkPtr gather(const void* in, void* out, std::size_t count, DType dtype, int root,
                 const CallOptions& options) override {
    Request r = request(Kind::gather, in, out, count, dtype);
    set_root(r, root);
    check_pointers(r, true, rank() == root);
    return issue(std::move(r), options);
  }

  WorkPtr scatter(const void* in, void* out, std::size_t count, DType dtype, int root,
                  const CallOptions& options) override {
    Request r = request(Kind::scatter, in, out, count, dtype);
    set_root(r, root);
    check_pointers(r, rank() == root, true);
    return issue(std::move(r), options);
  }

  WorkPtr all_to_all(const void* in, void* out, std::size_t count, DType dtype, const CallOptions& options) override {
    Request r = request(Kind::all_to_all, in, out, count, dtype);
    check_pointers(r, true, true);
    return issue(std::move(r), options);
  }

  WorkPtr all_to_all_v(const void* in, const std::vector<std::size_t>& send_counts,
                       const std::vector<std::size_t>& send_offsets, void* out,
                       const std::vector<std::size_t>& recv_counts, const std::vector<std::size_t>& recv_offsets,
                       DType dtype, const CallOptions& options) override {
    Request r = request(Kind::all_to_all_v, in, out, 0, dtype);
    r.send_bytes = to_bytes("all_to_all_v: send_counts", send_counts, dtype);
    r.send_offsets = to_bytes("all_to_all_v: send_offsets", send_offsets, dtype);
    r.recv_bytes = to_bytes("all_to_all_v: recv_counts", recv_counts, dtype);
    r.recv_offsets = to_bytes("all_to_all_v: recv_offsets", recv_offsets, dtype);
    for (std::size_t p = 0; p < static_cast<std::size_t>(size()); ++p) {
      if (in == nullptr && r.send_bytes[p] > 0) throw Error("all_to_all_v: in: got null, expected a pointer");
      if (out == nullptr && r.recv_bytes[p] > 0) throw Error("all_to_all_v: out: got null, expected a pointer");
    }
    return issue(std::move(r), options);
  }

  WorkPtr send(const void* data, std::size_t count, DType dtype, int peer, int tag,
               const CallOptions& options) override {
    Request r = request(Kind::send, data, nullptr, count, dtype);
    set_root(r, peer);
    r.tag = tag;
    check_pointers(r, true, false);
    return issue(std::move(r), options);
  }

  WorkPtr recv(void* data, std::size_t count, DType dtype, int peer, int tag, const CallOptions& options) override {
    Request r = request(Kind::recv, nullptr, data, count, dtype);
    set_root(r, peer);
    r.tag = tag;
    check_pointers(r, false, true);
    return issue(std::move(r), options);
  }

  WorkPtr barrier(const CallOptions& options) override {
    return issue(request(Kind::barrier, nullptr, nullptr, 0, DType::uint8), options);
  }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    if (host::inside_group()) throw Error("split: got a call inside a group, expected one outside");
    const auto gather = [this](const std::string& mine) {
      std::string all(mine.size() * static_cast<std::size_t>(size()), '\0');
      CallOptions options;
      options.blocking = true;
      all_gather(mine.data(), all.data(), mine.size(), DType::uint8, options);
      return all;
    };
    auto core = host::split_core(*core_, gather, color, key, name);
    return core ? std::make_shared<HostCommunicator>(std::move(core)) : nullptr;
  }

  void abort(const std::string& reason) override { core_->abort(reason); }
  void shutdown() override { core_->shutdown(); }

 private:
  Request request(Kind kind, const void* in, void* out, std::size_t count, DType dtype) const {
    AXO_CHECK(static_cast<int>(dtype) < kDTypeCount, name_of(kind), static_cast<int>(dtype), "a dtype");
    const std::size_t most =
        std::numeric_limits<std::size_t>::max() / item_size(dtype) / static_cast<std::size_t>(size()) / 2;
    AXO_CHECK(count <= most, name_of(kind), count, "a count of at most " + std::to_string(most));
    Request r;
    r.kind = kind;
    r.in = in;
    r.out = out;
    r.count = count;
    r.dtype = dtype;
    return r;
  }

  static void set_op(Request& r, ReduceOp op) {
    AXO_CHECK(static_cast<int>(op) < kReduceOpCount, name_of(r.kind), static_cast<int>(op), "a reduce op");
    if (!can_reduce(r.dtype, op)) {
      throw Error(std::string(name_of(r.kind)) + ": " + name_of(op) + " is not defined on " + name_of(r.dtype));
    }
    r.op = op;
  }

  void set_root(Request& r, int root) const {
    const bool message = r.point_to_point();
    AXO_CHECK(root >= 0 && root < size(), (std::string(name_of(r.kind)) + (message ? ": peer" : ": root")).c_str(),
              root, "a rank from 0 to " + std::to_string(size() - 1));
    r.root = root;
  }

  static void check_pointers(const Request& r, bool needs_in, bool needs_out) {
    if (r.count == 0) return;
    if (needs_in && r.in == nullptr) throw Error(std::string(name_of(r.kind)) + ": in: got null, expected a pointer");
    if (needs_out && r.out == nullptr)
      throw Error(std::string(name_of(r.kind)) + ": out: got null, expected a pointer");
  }

  std::vector<std::size_t> to_bytes(const char* what, const std::vector<std::size_t>& counts, DType dtype) const {
    AXO_CHECK(counts.size() == static_cast<std::size_t>(size()), what, counts.size(),
              std::to_string(size()) + " entries, one a rank");
    std::vector<std::size_t> bytes;
    const std::size_t most = std::numeric_limits<std::size_t>::max() / item_size(dtype) / 2;
    for (std::size_t c : counts) {
      AXO_CHECK(c <= most, what, c, "at most " + std::to_string(most));
      bytes.push_back(c * item_size(dtype));
    }
    return bytes;
  }

  WorkPtr issue(Request r, const CallOptions& options) {
    core_->check_usable(name_of(r.kind));
    if (options.blocking && host::inside_group()) {
      throw Error(std::string(name_of(r.kind)) + ": got a blocking call inside a group, expected a non-blocking one");
    }
    core_->engine().drain_graveyard();
    const Milliseconds timeout = options.timeout == kNoTimeout ? core_->timeout() : options.timeout;
    auto work = std::make_shared<HostWork>(core_, std::move(r), options, timeout);
    if (host::record_in_group(core_, work)) return work;
    core_->submit({work});
    if (options.blocking) {
      try {
        work->wait();
      } catch (...) {
        // Interrupted (set_interrupt_check): the caller's buffers are its own again, so the operation must end.
        if (!work->is_completed()) core_->abort(core_->describe(*work) + " was interrupted");
        throw;
      }
    } else {
      core_->engine().watch();
    }
    return work;
  }

  std::shared_ptr<HostCore> core_;
};

}  // namespace

std::shared_ptr<Communicator> create_host_communicator(Store& store, const std::string& key, int rank, int size,
                                                       const HostOptions& options) {
  return std::make_shared<HostCommunicator>(host::create_core(store, key, rank, size, options));
}

}  // namespace axo

// How a device communicator comes to be: the library's configuration, the rendezvous, split, registration.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "base/deadline.h"
#include "device/core.h"

namespace axo {
namespace {

bool check_wanted(const DeviceOptions& options) {
  if (options.check >= 0) return options.check > 0;
  const char* text = std::getenv("AXO_CHECK");
  return text && *text && std::strcmp(text, "0") != 0;
}

// The machine, for "two ranks on one GPU"; a container has its own hostname but the kernel's boot id.
std::string host_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? "unknown-host" : id;
}

std::string to_hex(const NcclUniqueId& id) {
  static const char* kDigits = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : id.bytes) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

NcclUniqueId from_hex(const std::string& text) {
  NcclUniqueId id{};
  AXO_CHECK(text.size() == 2 * sizeof id.bytes, "rendezvous: hex digits of the unique id", text.size(), "256");
  const auto digit = [](char c) {
    AXO_CHECK((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'), "rendezvous: a digit of the unique id", c,
              "0-9 or a-f");
    return c <= '9' ? c - '0' : c - 'a' + 10;
  };
  for (std::size_t i = 0; i < sizeof id.bytes; ++i) {
    id.bytes[i] = static_cast<char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  }
  return id;
}

// What must agree between ranks, and the GPU, which must not: "<library and version>\n<host and device>".
std::string introduction(const DeviceContext& context) {
  return std::string(context.nccl().transport()) + " " + context.nccl().version_text() + "\n" + host_id() + " " +
         context.gpu().pci_bus_id(context.device());
}

// Rank 0's verdict over all introductions: empty, or what is wrong.
std::string verdict(const std::vector<std::string>& introductions, bool shared_gpus) {
  std::map<std::string, std::size_t> owners;
  const auto library = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  for (std::size_t rank = 0; rank < introductions.size(); ++rank) {
    const std::string& text = introductions[rank];
    if (library(text) != library(introductions[0])) {
      return "rank " + std::to_string(rank) + " has " + library(text) + ", rank 0 has " + library(introductions[0]) +
             "; all ranks need the same version";
    }
    const auto [owner, first] = owners.emplace(text, rank);
    if (!first && !shared_gpus) {
      return "ranks " + std::to_string(owner->second) + " and " + std::to_string(rank) + " are on the same GPU (" +
             text.substr(text.rfind(' ') + 1) +
             "); give each its own device (NCCL 2.30 and newer can share one with "
             "NCCL_MULTI_RANK_GPU_ENABLE=1)";
    }
  }
  return "";
}

NcclUniqueId new_id(DeviceContext& context) {
  const auto turn = context.queue().turn();
  NcclUniqueId id{};
  context.nccl().check(context.nccl()->GetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

// A rank that waits for the others to come.
struct Rendezvous {
  Store& store;
  const std::string& key;
  const DeviceOptions& options;
  int rank, size;
  DevicePeers& peers;

  // The value of a key, once it is there; a rank that dies and a caller who gives up end the wait.
  std::string await(const std::string& part, Clock::time_point deadline) const {
    constexpr auto kLook = std::chrono::milliseconds(250);  // between looks at who has died
    const auto longest = std::clamp(std::chrono::milliseconds(size), std::chrono::milliseconds(50), 4 * kLook);
    auto pause = std::chrono::milliseconds(1);
    auto next_look = Clock::now() + kLook / 2;
    while (!store.has(key + part)) {
      check_interrupt();
      if (options.cancelled && options.cancelled->load()) {
        throw Aborted("aborted while its ranks met");
      }
      const bool looks = Clock::now() >= next_look;
      if (looks) next_look = Clock::now() + kLook;
      if (const int lost = looks ? peers.lost() : -1; lost >= 0) {
        throw PeerLost(peers.title(lost) + " died before all had come", lost);
      }
      if (Clock::now() >= deadline) throw Timeout("no rank has set '" + part + "'");
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, longest);
    }
    return store.get(key + part, limited(options.timeout));
  }

  // The introductions of all ranks.
  std::vector<std::string> introductions() const {
    const auto deadline = deadline_after(options.timeout);
    std::vector<std::string> all;
    try {
      for (int r = 0; r < size; ++r) all.push_back(await("/hello/" + std::to_string(r), deadline));
      return all;
    } catch (const Timeout&) {
      std::string missing;
      int count = 0;
      for (int r = 0; r < size; ++r) {
        if (store.has(key + "/hello/" + std::to_string(r))) continue;
        missing += (count++ ? ", " : "") + std::to_string(r);
      }
      throw Timeout((count > 1 ? "ranks " + missing + " have" : "rank " + missing + " has") + " not come within " +
                    std::to_string(limited(options.timeout).count()) + " ms");
    }
  }

  // Rank 0's answer to all.
  std::string answer(DeviceContext& context) const {
    const auto all = introductions();
    const char* multi = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const bool shared = context.nccl().version() >= 23000 && multi && std::strcmp(multi, "1") == 0;
    const std::string wrong = verdict(all, shared);
    return wrong.empty() ? "ok " + to_hex(new_id(context)) : "no " + wrong;
  }

  // What `wait` gives, or an error as the text that says it to other ranks too.
  static std::string told(const std::function<std::string()>& wait) {
    try {
      return wait();
    } catch (const Timeout& e) {
      return std::string("late ") + e.what();
    } catch (const PeerLost& e) {
      return "lost " + std::to_string(e.peer()) + " " + e.what();
    } catch (const Aborted& e) {
      return std::string("stop ") + e.what();
    } catch (const Error& e) {
      return std::string("no ") + e.what();
    }
  }

  // Every rank learns the unique id, or the same error.
  NcclUniqueId meet(DeviceContext& context) const {
    store.set(key + "/hello/" + std::to_string(rank), introduction(context));
    if (rank == 0) store.set(key + "/id", told([&] { return answer(context); }));
    // Rank 0 may take the whole timeout to find out who is missing: its answer is worth waiting for.
    const auto deadline = deadline_after(2 * limited(options.timeout));
    const std::string answered = told([&] { return await("/id", deadline); });
    const std::string kind = answered.substr(0, answered.find(' '));
    const std::string text = answered.substr(std::min(kind.size() + 1, answered.size()));
    const std::string who = "rendezvous of GPU ranks for '" + options.name + "': ";
    if (kind == "ok") return from_hex(text);
    if (kind == "late") throw Timeout(who + text);
    if (kind == "stop") throw Aborted(who + text);
    if (kind == "lost") throw PeerLost(who + text.substr(text.find(' ') + 1), std::atoi(text.c_str()));
    throw Error("rendezvous of GPU ranks: " + (kind == "no" ? text : "bad answer from rank 0"));
  }
};

}  // namespace

DeviceCore::DeviceCore(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store, std::string key, int rank,
                       int size, DeviceOptions options)
    : context_(std::move(context)),
      store_(std::move(store)),
      key_(std::move(key)),
      member_{options.name, rank, size},
      options_(std::move(options)) {
  options_.context.reset();  // held once, above
}

NcclConfig DeviceCore::config() const {
  NcclConfig config = make_nccl_config(nccl().version());
  config.blocking = 0;
  if (options_.cga_cluster_size >= 0) config.cgaClusterSize = options_.cga_cluster_size;
  if (options_.min_ctas > 0) config.minCTAs = options_.min_ctas;
  if (options_.max_ctas > 0) config.maxCTAs = options_.max_ctas;
  config.splitShare = options_.split_share ? 1 : 0;
  config.commName = options_.name.c_str();
  if (options_.zero_cta && nccl().has_zero_cta()) config.CTAPolicy = kNcclPolicyZeroCta;
  config.launchOrderImplicit = 1;  // beyond `size` for versions that do not know it
  return config;
}

std::shared_ptr<DeviceCore> DeviceCore::create(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store,
                                               const std::string& key, const NcclUniqueId& id, int rank, int size,
                                               const DeviceOptions& options, std::shared_ptr<DevicePeers> peers) {
  std::shared_ptr<DeviceCore> core(new DeviceCore(std::move(context), std::move(store), key, rank, size, options));
  core->peers_ = std::move(peers);
  const auto turn = core->context_->queue().turn();
  DeviceGuard guard(core->gpu(), core->context_->device());
  NcclConfig config = core->config();
  NcclComm comm = nullptr;
  const int result = core->nccl()->CommInitRankConfig(&comm, size, id, rank, &config);
  core->comm_ = comm;
  const auto deadline = deadline_after(options.timeout);
  core->settle(result, "ncclCommInitRankConfig", deadline);
  core->start();
  return core;
}

void DeviceCore::start() {
  const bool shared = options_.streams == StreamPolicy::shared ||
                      (options_.streams == StreamPolicy::automatic && gpu().vendor() == GpuVendor::hip);
  stream_ = shared ? context_->shared_stream(options_.high_priority) : gpu().create_stream(options_.high_priority);
  owns_stream_ = !shared;
  if (!peers_) peers_ = std::make_shared<DevicePeers>(store_, key_, rank(), size());
  scratch_ = gpu().allocate(sizeof(std::uint32_t));
  gpu().set_bytes(scratch_, 0, sizeof(std::uint32_t), stream_);
  context_->reserve_ctas(options_.max_ctas);
  started_ = true;
  flight_ = std::make_shared<FlightRecorder>(member_);
  FlightLog::get().add(flight_);
  if (store_ && size() > 1 && check_wanted(options_)) {
    order_check_ = std::make_unique<OrderCheck>(store_, key_, member_.name, rank(), size(), options_.timeout);
  }
  context_->watchdog().watch(shared_from_this());
}

std::shared_ptr<DeviceCore> DeviceCore::split(int color, int key, const std::string& name) {
  check_usable();
  const auto turn = context_->queue().turn();
  DeviceGuard guard(gpu(), context_->device());
  DeviceOptions options = options_;
  options.cancelled.reset();  // of the parent's making
  options.name = name;
  const std::string child_key = key_ + "/split/" + std::to_string(++splits_) + "/" + std::to_string(color);
  std::shared_ptr<DeviceCore> child(new DeviceCore(context_, store_, child_key, 0, 0, options));
  try {
    NcclConfig config = child->config();
    NcclComm comm = nullptr;
    const auto deadline = deadline_after(options.timeout);
    const int result = nccl()->CommSplit(comm_, color < 0 ? kNcclNoColor : color, key, &comm, &config);
    settle(result, "ncclCommSplit", deadline);  // the child's handle is not there before the parent is done
    if (color < 0) return nullptr;
    child->comm_ = comm;
    int state = kNcclSuccess;
    nccl().check(nccl()->CommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm);
    child->settle(state, "ncclCommSplit", deadline);
    nccl().check(nccl()->CommUserRank(comm, &child->member_.rank), "ncclCommUserRank", comm);
    nccl().check(nccl()->CommCount(comm, &child->member_.size), "ncclCommCount", comm);
    child->start();
  } catch (...) {
    fail(std::current_exception());  // the ranks no longer agree on what exists
    throw;
  }
  return child;
}

std::shared_ptr<void> DeviceCore::register_buffer(void* data, std::size_t bytes, bool symmetric) {
  check_usable();
  if (symmetric ? !nccl().has_windows() : !nccl().has_registration()) return nullptr;
  const auto turn = context_->queue().turn();
  DeviceGuard guard(gpu(), context_->device());
  void* handle = nullptr;
  const auto deadline = deadline_after(options_.timeout);
  if (symmetric) {
    settle(nccl()->CommWindowRegister(comm_, data, bytes, &handle, kNcclWindowSymmetric), "ncclCommWindowRegister",
           deadline);
  } else {
    settle(nccl()->CommRegister(comm_, data, bytes, &handle), "ncclCommRegister", deadline);
  }
  if (!handle) return nullptr;  // the library took note and has no use for it on this system
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (symmetric ? windows_ : registrations_).insert(handle);
  }
  return std::shared_ptr<void>(data, [core = shared_from_this(), handle, symmetric](void*) {
    const auto turn = core->context_->queue().turn();
    core->drop_registration(handle, symmetric);
  });
}

void DeviceCore::drop_registration(void* handle, bool symmetric) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if ((symmetric ? windows_ : registrations_).erase(handle) == 0 || !comm_) return;
  }
  const int result = symmetric ? nccl()->CommWindowDeregister(comm_, handle) : nccl()->CommDeregister(comm_, handle);
  if (result != kNcclSuccess) fail(error_from(result, "deregistration"));
}

void DeviceCore::drop_registrations() {
  for (bool symmetric : {false, true}) {
    auto& handles = symmetric ? windows_ : registrations_;
    while (!handles.empty()) drop_registration(*handles.begin(), symmetric);
  }
}

std::shared_ptr<DeviceCore> create_device_core(const std::shared_ptr<Store>& store, const std::string& key, int rank,
                                               int size, const DeviceOptions& options) {
  AXO_CHECK(size > 0, "size", size, "at least 1");
  AXO_CHECK(rank >= 0 && rank < size, "rank", rank, "a rank below " + std::to_string(size));
  AXO_CHECK(store || size == 1, "store", "none", "one that all ranks reach");
  AXO_CHECK(options.min_ctas >= 0 && options.max_ctas >= 0, "CTA limits",
            std::to_string(options.min_ctas) + " and " + std::to_string(options.max_ctas), "0 or more");
  AXO_CHECK(options.max_ctas == 0 || options.min_ctas <= options.max_ctas, "min_ctas", options.min_ctas,
            "at most max_ctas = " + std::to_string(options.max_ctas));
  const auto context = options.context ? options.context : DeviceContext::of(options.device);
  DeviceGuard guard(context->gpu(), context->device());
  const auto peers = std::make_shared<DevicePeers>(store, key, rank, size);
  const NcclUniqueId id =
      size == 1 ? new_id(*context) : Rendezvous{*store, key, options, rank, size, *peers}.meet(*context);
  return DeviceCore::create(context, store, key, id, rank, size, options, peers);
}

}  // namespace axo

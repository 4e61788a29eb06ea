// A device communicator's life: made, used, looked after ten times a second by the watchdog. Its end: core_end.cpp.
#include "device/core.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/failure.h"
#include "device/rendezvous.h"

namespace axo {
namespace {

constexpr std::chrono::seconds kSuspicious{1};       // pending for longer: other ranks may have aborted
constexpr std::chrono::milliseconds kSlow{100};      // the same: a peer of this host may have died, a call may hang
constexpr Milliseconds kGlance{20};                  // for a key that is probably absent
constexpr std::chrono::milliseconds kReports{1500};  // for all peers' reports together

bool check_wanted(const DeviceOptions& options) {
  if (options.check >= 0) return options.check > 0;
  const char* given = std::getenv("AXO_CHECK");
  const std::string text = given ? given : "";
  AXO_CHECK(text.empty() || text == "0" || text == "1", "AXO_CHECK", "'" + text + "'", "0 or 1, or no such variable");
  return text == "1";
}

}  // namespace

// --- Made. ---

DeviceCore::DeviceCore(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store, std::string key, int rank,
                       int size, DeviceOptions options)
    : context_(std::move(context)),
      store_(std::move(store)),
      key_(std::move(key)),
      member_{options.name, rank, size},
      options_(std::move(options)),
      timeout_(options_.timeout) {
  options_.context.reset();  // held once, above
}

NcclConfig DeviceCore::config(int cap) const {
  NcclConfig config = make_nccl_config(nccl().version());
  // Without blocking every launch makes and joins a thread (since 2.23), a split answers before its handle is there, a
  // window likewise, and a lone transfer before it is launched (until 2.23). A call that hangs is the watchdog's.
  config.blocking = 1;
  // On a Hopper the library launches clusters of four thread blocks, each of which needs as many free multiprocessors
  // of one GPC. Those that computation leaves to a capped communicator may lie anywhere.
  if (cap > 0) config.cgaClusterSize = 0;
  if (options_.cga_cluster_size >= 0) config.cgaClusterSize = options_.cga_cluster_size;
  if (options_.min_ctas > 0) config.minCTAs = options_.min_ctas;
  if (cap > 0) config.maxCTAs = cap;
  // The library refuses a least number above the greatest, and takes one that is undefined for INT_MIN.
  if (cap == 0 && options_.min_ctas > 0) config.maxCTAs = std::max(options_.min_ctas, nccl().most_ctas());
  config.splitShare = options_.split_share ? 1 : 0;
  config.commName = options_.name.c_str();
  if (options_.zero_cta && nccl().has_zero_cta()) config.CTAPolicy = kNcclPolicyZeroCta;
  if (nccl().orders_launches()) config.launchOrderImplicit = 1;  // beyond `size` for versions that do not know it
  return config;
}

std::shared_ptr<DeviceCore> DeviceCore::create(std::shared_ptr<DeviceContext> context, std::shared_ptr<Store> store,
                                               const std::string& key, const NcclUniqueId& id, int rank, int size,
                                               const DeviceOptions& options, std::shared_ptr<DevicePeers> peers) {
  std::shared_ptr<DeviceCore> core(new DeviceCore(std::move(context), std::move(store), key, rank, size, options));
  core->peers_ = std::move(peers);
  const auto turn = core->context_->queue().turn();
  DeviceGuard guard(core->gpu(), core->context_->device());
  core->prepare();
  NcclConfig config = core->config(options.max_ctas);
  core->call("ncclCommInitRankConfig", [&] {
    core->making_ = true;
    const int result = core->nccl()->CommInitRankConfig(&core->slot_, size, id, rank, &config);
    if (core->making_.exchange(false)) core->comm_ = core->slot_;  // else it has been aborted
    return result;
  });
  // It may have been done before it was asked; what nccl.conf says the library has put into the environment.
  const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
  if (blocking && *blocking && std::strtoll(blocking, nullptr, 0) == 0)
    core->refuse_nonblocking("NCCL_COMM_BLOCKING=0 is set, with which the library answers before it is done");
  core->start();
  return core;
}

// Before the making, which may hang: the watchdog ends it.
void DeviceCore::prepare() {
  if (!peers_) peers_ = std::make_shared<DevicePeers>(store_, key_, rank(), size());
  flight_ = std::make_shared<FlightRecorder>(member_);
  if (store_ && size() > 1 && check_wanted(options_)) {
    order_check_ = std::make_unique<OrderCheck>(store_, key_, member_.name, rank(), size(), timeout());
  }
  context_->watchdog().watch(shared_from_this());
}

void DeviceCore::start() {
  const bool shared = options_.streams == StreamPolicy::shared ||
                      (options_.streams == StreamPolicy::automatic && !nccl().orders_launches());
  stream_ = shared ? context_->shared_stream(options_.high_priority) : gpu().create_stream(options_.high_priority);
  owns_stream_ = !shared;
  if (shared) last_ = &context_->last_shared_launch();
  scratch_ = context_->zero_word(stream_);
  context_->reserve_ctas(reserved_ctas());
  FlightLog::get().add(flight_);
  started_ = true;
}

std::shared_ptr<DeviceCore> DeviceCore::split(int color, int key, const std::string& name, int max_ctas) {
  check_usable();
  const auto turn = context_->queue().turn();
  DeviceGuard guard(gpu(), context_->device());
  DeviceOptions options = options_;
  options.cancelled.reset();  // of the parent's making
  options.name = name;
  options.timeout = timeout();
  if (max_ctas != 0) options.min_ctas = options.max_ctas = 0, options.split_share = false;  // it runs beside the parent
  if (max_ctas < 0) options.zero_cta = true;
  const std::string child_key = key_ + "/split/" + std::to_string(++splits_) + "/" + std::to_string(color);
  std::shared_ptr<DeviceCore> child(new DeviceCore(context_, store_, child_key, 0, 0, options));
  try {
    NcclConfig config = child->config(max_ctas > 0 ? max_ctas : options.max_ctas);
    call("ncclCommSplit",
         [&] { return nccl()->CommSplit(comm_, color < 0 ? kNcclNoColor : color, key, &child->slot_, &config); });
    if (color < 0) return nullptr;
    child->comm_ = child->slot_;
    nccl().check(nccl()->CommUserRank(child->comm_, &child->member_.rank), "ncclCommUserRank", child->comm_);
    nccl().check(nccl()->CommCount(child->comm_, &child->member_.size), "ncclCommCount", child->comm_);
    child->prepare();
    child->start();
  } catch (...) {
    fail(std::current_exception());  // the ranks no longer agree on what exists
    throw;
  }
  return child;
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

// --- Used. ---

void DeviceCore::check_usable() const {
  if (!failed() && !closed_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) throw Aborted("communicator '" + member_.name + "' has been shut down");
  throw Aborted("communicator '" + member_.name + "' is aborted: " + failure_of(error_).text);
}

std::exception_ptr DeviceCore::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

std::exception_ptr DeviceCore::error_from(int result, const char* function) const {
  const std::string text = "communicator '" + member_.name + "': " + nccl().error_text(function, result, comm_);
  switch (result) {
    case kNcclRemoteError:
      return std::make_exception_ptr(PeerLost(text, -1));
    case kNcclTimeout:
      return std::make_exception_ptr(Timeout(text));
    default:
      return std::make_exception_ptr(Error(text));
  }
}

std::exception_ptr DeviceCore::peer_lost(const std::string& where, int peer) const {
  return std::make_exception_ptr(PeerLost(where + ": " + peers_->title(peer) + " died", peer));
}

void DeviceCore::enter(const char* function, Clock::time_point deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  inside_ = {function, Clock::now(), deadline};
}

void DeviceCore::leave(int result) {
  const char* function = nullptr;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    function = std::exchange(inside_.function, nullptr);
    error = error_;
  }
  if (!function) return;  // of several operations in one launch
  if (error) std::rethrow_exception(error);
  if (result == kNcclInProgress) refuse_nonblocking(std::string(function) + " answers before it is done");
  if (result != kNcclSuccess) std::rethrow_exception(error_from(result, function));
}

void DeviceCore::refuse_nonblocking(const std::string& why) const {
  throw Error("communicator '" + member_.name + "': " + why +
              ", which a communicator that blocks never does: take NCCL_COMM_BLOCKING=0 out of the environment and of "
              "nccl.conf");
}

void DeviceCore::order(GpuStream stream, GpuStream caller, bool after_caller, const Capture& capture) {
  const Capture own = stream == caller ? capture : gpu().capture_info(stream);
  if (own.active() && own != capture) {
    throw Error("communicator '" + member_.name +
                "' is part of a graph that is being captured; use it on the capturing stream only, "
                "until the capture ends");
  }
  // In a capture the communicator's stream must join, or the operation would run now instead of in the graph.
  const bool join = stream != caller && (after_caller || (capture.active() && !own.active()));
  if (join) {
    const EventPtr event = context_->events().take(false);
    if (capture.active()) event->set_captured();
    gpu().record(event->handle(), caller);
    gpu().wait(stream, event->handle());
  }
  // An event from outside a graph has no meaning inside it, and the other way round.
  if (last_->event && last_->stream != stream && last_->capture == capture) gpu().wait(stream, last_->event->handle());
}

// Transfers take a power of two (paths.cc of NCCL, ncclTopoComputeP2pChannels).
int DeviceCore::reserved_ctas() const {
  int ctas = options_.max_ctas > 0 && nccl().keeps_caps() ? 1 : 0;
  while (ctas > 0 && ctas < options_.max_ctas) ctas *= 2;
  return ctas;
}

bool DeviceCore::captures() const {
  if (!started_ || closed_ || !last_->capture.active()) return false;
  try {
    return gpu().capture_info(last_->stream).active();
  } catch (const Error&) {  // a stream of the caller's that is no more
    return false;
  }
}

void DeviceCore::launched(const DeviceWorkPtr& work, EventPtr start, EventPtr done, const Capture& capture) {
  *last_ = {work->stream, done, capture};
  if (capture.active() && capture.id != counted_capture_) {
    // A graph that ends is taken off once for each time that it was counted: captures may alternate.
    if (gpu().at_end_of_graph(work->stream, [graphs = graphs_] { --*graphs; })) ++*graphs_;
    counted_capture_ = capture.id;
  }
  work->launched(std::move(start), std::move(done), capture.active());
  if (capture.active()) return;
  std::exception_ptr error;
  bool many = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = error_;
    pending_.push_back(work);
    many = pending_.size() % 256 == 0;
  }
  if (many) context_->watchdog().wake();  // events and tensors come back sooner
  if (error) work->finish(error);
}

void DeviceCore::fail(std::exception_ptr error) {
  std::deque<DeviceWorkPtr> works;
  std::shared_ptr<const Levels> levels;
  std::shared_ptr<DeviceCore> whole;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ || closed_) return;
    error_ = error;
    failed_.store(true, std::memory_order_release);
    works = pending_;  // kept until the library has aborted: the device may still use their tensors
    levels = levels_;
    whole = whole_.lock();
  }
  if (whole) whole->fail(error);
  for (const auto& work : works) work->finish(error);
  for (const auto& part : levels ? std::vector{levels->inside, levels->between} : std::vector<decltype(whole)>{}) {
    part->fail(error);
  }
  context_->watchdog().wake();
}

void DeviceCore::drop_finished() {
  while (true) {
    DeviceWorkPtr first;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (pending_.empty()) return;
      first = pending_.front();
    }
    if (!first->is_completed() || failed()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_.empty() && pending_.front() == first) pending_.pop_front();
  }
}

std::shared_ptr<void> DeviceCore::register_buffer(void* data, std::size_t bytes, bool symmetric) {
  check_usable();
  if (symmetric ? !nccl().has_windows() : !nccl().has_registration()) return nullptr;
  const auto turn = context_->queue().turn();
  DeviceGuard guard(gpu(), context_->device());
  void* handle = nullptr;
  try {
    call(symmetric ? "ncclCommWindowRegister" : "ncclCommRegister", [&] {
      return symmetric ? nccl()->CommWindowRegister(comm_, data, bytes, &handle, kNcclWindowSymmetric)
                       : nccl()->CommRegister(comm_, data, bytes, &handle);
    });
  } catch (...) {
    if (symmetric) fail(std::current_exception());  // peers may wait in it
    throw;
  }
  if (!handle) return nullptr;  // the library took note and has no use for it on this system
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (symmetric ? windows_ : registrations_).insert(handle);
  }
  return std::shared_ptr<void>(data, [core = shared_from_this(), handle, symmetric](void*) {
    DeviceContext::release_when_idle(core->context_, [weak = std::weak_ptr<DeviceCore>(core), handle, symmetric] {
      const auto core = weak.lock();  // without it the library has freed what was registered
      if (!core) return;
      const auto turn = core->context_->queue().turn();
      core->drop_registration(handle, symmetric);
    });
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

// --- Looked after. ---

bool DeviceCore::look() {
  drop_finished();
  if (!failed()) check_call();
  if (!failed()) check_library();
  if (!failed()) check_deadline();
  if (!failed()) check_peers();
  if (!failed()) hear_abort();
  if (failed()) clean_up_failure();
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(pending_.begin(), pending_.end(), [](const auto& work) { return work->has_callbacks(); });
}

// A call that waits inside the library: for peers, at the first operation of a kind, or for room on the device. It
// holds its turn, and nothing but an abort frees it.
void DeviceCore::check_call() {
  const auto now = Clock::now();
  Inside inside;
  bool slow = false;
  int result = kNcclSuccess;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inside = inside_;
    if (!inside.function) return;
    slow = now - inside.since >= kSlow && now >= next_roll_;
    if (slow) next_roll_ = now + kSlow;
    // It reads a word and enters nothing. Under the lock: the call cannot be left, nor the communicator destroyed.
    if (const NcclComm comm = slow ? comm_.load() : nullptr) nccl()->CommGetAsyncError(comm, &result);
  }
  const std::string where = std::string(inside.function) + " on '" + member_.name + "'";
  if (!started_ && options_.cancelled && options_.cancelled->load()) {
    fail(std::make_exception_ptr(Aborted("communicator '" + member_.name + "' was aborted while its ranks met")));
  } else if (result != kNcclSuccess && result != kNcclInProgress) {
    fail(error_from(result, ("asynchronous error in " + where).c_str()));
  } else if (now >= inside.deadline) {
    fail(std::make_exception_ptr(Timeout("communicator " + member_.words() + ": " + inside.function +
                                         " could not be launched in time: a peer has not come")));
  } else if (const int peer = slow ? peers_->lost() : -1; peer >= 0) {
    if (!started_ || !adopt_failure()) fail(peer_lost(where, peer));
  }
}

bool DeviceCore::hangs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inside_.function && Clock::now() - inside_.since >= kSlow;
}

void DeviceCore::check_library() {
  const auto turn = context_->queue().try_turn();  // what is under way is check_call()'s
  if (!turn || !comm_) return;
  int result = kNcclSuccess;
  const int query = nccl()->CommGetAsyncError(comm_, &result);
  if (query != kNcclSuccess) result = query;
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  const int peer = result == kNcclRemoteError ? peers_->lost() : -1;
  const std::string what = "asynchronous error" + oldest_pending();
  fail(peer < 0 ? error_from(result, what.c_str()) : peer_lost(what, peer));
}

// Deaths that the library does not see: it may wait for ever for memory that nobody writes any more.
void DeviceCore::check_peers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    if (pending_.empty() || now - pending_.front()->issue_time() < kSlow || now < next_roll_) return;
    next_roll_ = now + kSlow;
  }
  const int peer = peers_->lost();
  if (peer < 0) return;
  if (adopt_failure()) return;  // it has told why it ended: another rank's death, perhaps
  drop_finished();              // what was complete before the death counts as done
  const std::string what = oldest_pending();
  if (!what.empty()) fail(peer_lost("communicator '" + member_.name + "'" + what, peer));
}

// What an error of the library, which names no operation, has caught first; "" when nothing is pending.
std::string DeviceCore::oldest_pending() const {
  DeviceWorkPtr first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return "";
    first = pending_.front();
  }
  return " in " + first->describe() + ", after " + seconds_since(first->issue_time());
}

void DeviceCore::check_deadline() {
  DeviceWorkPtr first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    const auto late =
        std::find_if(pending_.begin(), pending_.end(), [&](const auto& w) { return now >= w->deadline(); });
    if (late == pending_.end()) return;
    first = *late;
  }
  const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - first->issue_time());
  fail(std::make_exception_ptr(Timeout(first->describe() + " did not complete in " + std::to_string(waited.count()) +
                                       " ms" + arrivals(first->sequence()))));
}

// Peers' own reports, which those that time out as well write at about the same time.
std::string DeviceCore::arrivals(std::uint64_t sequence) {
  if (!store_) return "";
  std::string here, late, silent;
  const auto note = [](std::string& list, int rank) { list += (list.empty() ? "" : ", ") + std::to_string(rank); };
  try {
    store_->set(key_ + "/issued/" + std::to_string(rank()), std::to_string(issued()));
    const auto until = Clock::now() + kReports;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const auto left = std::chrono::duration_cast<Milliseconds>(until - Clock::now());
      try {
        const std::string text = store_->get(key_ + "/issued/" + std::to_string(peer), std::max(left, kGlance));
        note(std::strtoull(text.c_str(), nullptr, 10) >= sequence ? here : late, peer);
      } catch (const Timeout&) {
        note(silent, peer);
      }
    }
  } catch (const std::exception& e) {
    return std::string("; the other ranks could not be asked: ") + e.what();
  }
  std::string text;
  if (!here.empty()) text += "; also in it: rank " + here;
  if (!late.empty()) text += "; has not arrived: rank " + late;
  if (!silent.empty()) text += "; no report (late, or gone): rank " + silent;
  return text;
}

void DeviceCore::hear_abort() {
  if (!store_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    auto since = pending_.empty() ? now : pending_.front()->issue_time();
    if (inside_.function && started_) since = std::min(since, inside_.since);
    if (now - since < kSuspicious || now < next_hearing_) return;
    next_hearing_ = now + kSuspicious;
  }
  adopt_failure();
}

// Takes over the failure that another rank has told; false when there is none.
bool DeviceCore::adopt_failure() {
  std::string told;
  try {
    told = store_->get(key_ + "/abort", kGlance);
  } catch (const std::exception&) {  // nobody has aborted, or the store is gone; the timeout remains
    return false;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_ = true;
  }
  const auto space = std::min(told.find(' '), told.size());
  const std::string text = told.substr(std::min(space + 1, told.size()));
  const int peer = told.rfind(kToldLost, 0) == 0 ? std::atoi(told.c_str() + std::strlen(kToldLost)) : -1;
  if (peer >= 0 && peer < size() && peer != rank()) {
    fail(std::make_exception_ptr(PeerLost("communicator '" + member_.name + "': " + text, peer)));
  } else {
    fail(std::make_exception_ptr(Aborted("communicator '" + member_.name + "' was aborted by another rank: " + text)));
  }
  return true;
}

}  // namespace axo

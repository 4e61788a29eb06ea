// C10dBackend: see torch/c10d_backend.h. Its life and its communicators: of the host, of the GPU, and of pairs of
// ranks.
#include "base/failure.h"
#include "torch/c10d_launch.h"

namespace axo {
namespace {

constexpr const char* kAborted = "aborted through torch.distributed";

}  // namespace

C10dBackend::C10dBackend(c10::intrusive_ptr<c10d::Store> store, std::string key,
                         std::shared_ptr<Communicator> communicator, Milliseconds timeout)
    : BackendOfTorch(communicator->rank(), communicator->size()),
      store_(std::move(store)),
      key_(std::move(key)),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<C10dOptions>("axo", timeout)) {
  init();
}

C10dBackend::~C10dBackend() = default;

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  // torch asks again for each type of device that this backend serves, with one store a split.
  if (store && split_store_._unsafe_get_target() == store.get()) return split_part_.lock();
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  const int color = mine == ranks.end() ? -1 : *std::min_element(ranks.begin(), ranks.end());
  const std::string name = options ? options->group_name : "split";
  const std::string key = key_ + "/split" + std::to_string(++splits_) + "/" + std::to_string(color);
  auto part = communicator_->split(color, int(mine - ranks.begin()), name);
  std::shared_ptr<Communicator> device_part;
  if (const auto there = device_communicator()) device_part = there->split(color, int(mine - ranks.begin()), name);
  split_store_ = c10::weak_intrusive_ptr<c10d::Store>(store);
  split_part_.reset();
  if (!part) return nullptr;
  auto child = c10::make_intrusive<C10dBackend>(store ? store : store_, key, part,
                                                options ? options->timeout : options_->timeout);
  child->device_communicator_ = std::static_pointer_cast<DeviceCommunicator>(device_part);
  std::lock_guard<std::mutex> one(connect_mutex_);
  child->device_ = device_;
  child->options_->group_name = name;
  split_part_ = c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>(child));
  return child;
}

void C10dBackend::startCoalescing() {
  TORCH_CHECK(!coalesced_, "axo: startCoalescing inside startCoalescing");
  coalesced_ = c10::make_intrusive<C10dWork>(getRank(), c10d::OpType::COALESCED, "axo:coalesced", Tensors{},
                                             sequence_.load(), options_->timeout);
  group_start();
}

C10dBackend::WorkHandle C10dBackend::endCoalescing() {
  TORCH_CHECK(coalesced_, "axo: endCoalescing without startCoalescing");
  const auto work = std::move(coalesced_);
  coalesced_ = nullptr;
  group_end();
  work->launched();
  return work;
}

std::shared_ptr<DeviceCommunicator> C10dBackend::connect(const std::string& key, int rank, int size,
                                                         at::Device device) {
  TORCH_CHECK(store_, "axo: this group has no store, over which the ranks of ", device, " could meet");
  DeviceOptions options;
  options.name = key.substr(4);  // without "axo/"
  options.timeout = options_->timeout;
  options.cancelled = cancelled_;
  options.device = device.index();
  // A connection of its own: the watchdog asks while the program may be waiting for a key.
  return create_device_communicator(std::make_shared<C10dStore>(store_->clone()), key + "/device", rank, size, options);
}

std::shared_ptr<DeviceCommunicator> C10dBackend::made(std::shared_ptr<DeviceCommunicator>& place,
                                                      std::shared_ptr<DeviceCommunicator> communicator) {
  std::lock_guard<std::mutex> lock(device_mutex_);
  place = std::move(communicator);
  if (cancelled_->load()) place->abort(kAborted);  // abort() came before it was here to be seen
  return place;
}

Communicator& C10dBackend::communicator_of(at::Device device) {
  if (device.is_cpu()) return *communicator_;
  std::lock_guard<std::mutex> one(connect_mutex_);
  std::shared_ptr<DeviceCommunicator> there = device_communicator();
  if (!there) {
    there = made(device_communicator_, connect(key_, getRank(), getSize(), device));
    device_ = device;
  }
  TORCH_CHECK_VALUE(device == device_, "axo: a tensor on ", device, " in a group of ", device_,
                    "; a process uses one GPU in a group");
  return *there;
}

Communicator& C10dBackend::communicator_with(at::Device device, int& peer) {
  // Several transfers at once may go round in a ring, where pairs would wait for each other: all ranks meet then.
  if (device.is_cpu() || device_communicator() || coalesced_) return communicator_of(device);
  TORCH_CHECK_VALUE(peer >= 0 && peer < getSize() && peer != getRank(), "axo: rank ", peer,
                    " is not another rank of this group of ", getSize());
  std::lock_guard<std::mutex> one(connect_mutex_);
  const int low = std::min(peer, getRank()), high = std::max(peer, getRank());
  std::shared_ptr<DeviceCommunicator>* place = nullptr;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    place = &pairs_[peer];  // stays where it is when others come
  }
  if (!*place) {
    const std::string key = key_ + "/pair" + std::to_string(low) + "-" + std::to_string(high);
    made(*place, connect(key, getRank() == low ? 0 : 1, 2, device));
  }
  peer = peer == low ? 0 : 1;
  return **place;
}

std::shared_ptr<DeviceCommunicator> C10dBackend::device_communicator() {
  std::lock_guard<std::mutex> lock(device_mutex_);
  return device_communicator_;
}

std::vector<std::shared_ptr<Communicator>> C10dBackend::communicators() {
  std::vector<std::shared_ptr<Communicator>> all;
  std::lock_guard<std::mutex> lock(device_mutex_);
  for (const auto& [peer, pair] : pairs_) {
    if (pair) all.push_back(pair);
  }
  if (device_communicator_) all.push_back(device_communicator_);
  all.push_back(communicator_);
  return all;
}

void C10dBackend::abort() {
  cancelled_->store(true);  // frees a rank inside its first connection too
  for (const auto& each : communicators()) each->abort(kAborted);
}

void C10dBackend::shutdown() {
  std::exception_ptr first;  // an interrupt, say: the others close all the same
  for (const auto& each : communicators()) {
    try {
      each->shutdown();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

c10d::ErrorType C10dBackend::getError() {
  std::exception_ptr failure;
  for (const auto& each : communicators()) {
    if (!failure) failure = each->failure();
  }
  if (!failure) return c10d::ErrorType::SUCCESS;
  const FailureKind kind = failure_of(failure).kind;
  return kind == FailureKind::timeout     ? c10d::ErrorType::TIMEOUT
         : kind == FailureKind::peer_lost ? c10d::ErrorType::REMOTE_ERROR
                                          : c10d::ErrorType::COMM_ERROR;
}

}  // namespace axo

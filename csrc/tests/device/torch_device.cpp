// A torch device over the simulator ("standin", torch's PrivateUse1), so that tensors, streams, events and everything
// of Axo that sees torch can run on a GPU that is not there. Memory is host memory. A tensor operation waits for the
// current stream and then computes on the CPU, so it sees what the stream's order gives it and nothing else: a result
// that was not waited for shows as a wrong value. Copies on a capturing stream become nodes of the graph.
// tests/standin.py builds and loads it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "standin.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kType = c10::DeviceType::PrivateUse1;

void*& stream_now() {
  static thread_local void* streams[standin::kDevices] = {};
  return streams[standin::current_device()];
}

bool capturing() {
  std::lock_guard<std::recursive_mutex> hold(standin::lock());
  return standin::stream_of(stream_now())->graph != nullptr;
}

// Freed memory is torn up in the order of the stream that it was made on, as torch's caching allocator reuses it: who
// reads it on another stream, without having ordered the two, reads rubbish.
struct Block {
  void* data;
  std::size_t bytes;
  void* stream;
  int device;
};

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard<std::recursive_mutex> hold(standin::lock());
  const int before = standin::current_device();
  standin::current_device() = block->device;
  standin::Stream* stream = standin::stream_of(block->stream);
  const auto tear = [b = *block] {
    std::memset(b.data, 0xA5, b.bytes);
    standin::release(b.data);
  };
  if (!stream) {
    tear();
  } else if (!stream->graph) {  // what a graph uses stays
    standin::enqueue(*stream, [tear] { return standin::Action{{}, tear}; });
  }
  standin::current_device() = before;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = standin::allocate(bytes);
    auto* block = new Block{data, bytes, stream_now(), standin::current_device()};
    return {data, block, &release, Device(kType, static_cast<DeviceIndex>(standin::current_device()))};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

// Pinned memory of the host: copies from and to it run in the order of a stream, while the host goes on.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    char* data = new char[bytes ? bytes : 1];
    std::lock_guard<std::mutex> hold(lock_);
    blocks_[data] = bytes;
    return {data, data, &PinnedAllocator::free, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* address) {
    const auto* at = static_cast<const char*>(address);
    std::lock_guard<std::mutex> hold(lock_);
    const auto after = blocks_.upper_bound(at);
    return after != blocks_.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void free(void* data);
  std::mutex lock_;
  std::map<const char*, std::size_t> blocks_;
};
PinnedAllocator pinned;

void PinnedAllocator::free(void* data) {
  std::lock_guard<std::mutex> hold(pinned.lock_);
  const auto block = pinned.blocks_.find(static_cast<char*>(data));
  std::memset(data, 0xA5, block->second);
  pinned.blocks_.erase(block);
  delete[] static_cast<char*>(data);
}

// What the next stream of the pool begins with: work that waits until `*pool_gate` is not zero.
thread_local const std::int32_t* pool_gate = nullptr;

void enqueue_hold(standin::Stream& stream, const std::int32_t* gate) {
  standin::enqueue(stream, [gate] {
    return standin::Action{[gate] { return *static_cast<const volatile std::int32_t*>(gate) != 0; }, {}};
  });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kType, static_cast<DeviceIndex>(standin::current_device())}; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { standin::current_device() = device.index(); }
  Stream wrap(void* handle, Device device) const {
    if (!device.has_index()) device.set_index(static_cast<DeviceIndex>(standin::current_device()));
    return Stream(Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(handle));
  }
  template <class Fn>
  auto on(Device device, const Fn& fn) const {
    const int before = standin::current_device();
    if (device.has_index()) standin::current_device() = device.index();
    auto result = fn();
    standin::current_device() = before;
    return result;
  }
  Stream getStream(Device device) const override {
    return wrap(on(device, [] { return stream_now(); }), device);
  }
  Stream getDefaultStream(Device device) const override { return wrap(nullptr, device); }
  Stream getNewStream(Device device, int priority) const override {
    return wrap(on(device, [&] { return standin::create_stream(priority); }), device);
  }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    const Stream stream = getNewStream(device, high ? -5 : 0);
    if (const std::int32_t* gate = std::exchange(pool_gate, nullptr)) {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      enqueue_hold(*standin::stream_of(reinterpret_cast<void*>(stream.id())), gate);
    }
    return stream;
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    on(stream.device(), [&] { return stream_now() = reinterpret_cast<void*>(stream.id()); });
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    return on(stream.device(), [&] { return standin::is_idle(reinterpret_cast<void*>(stream.id())); });
  }
  void synchronizeStream(const Stream& stream) const override {
    on(stream.device(), [&] { return standin::synchronize(reinterpret_cast<void*>(stream.id())), 0; });
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = standin::create_event(true);
    on(stream.device(), [&] {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      void* handle = reinterpret_cast<void*>(stream.id());
      return standin::record(*standin::event_of(*event), *standin::stream_of(handle));
    });
  }
  void block(void* event, const Stream& stream) const override {
    const int code = on(stream.device(), [&] {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      void* handle = reinterpret_cast<void*>(stream.id());
      return standin::wait(*standin::stream_of(handle), *standin::event_of(event));
    });
    TORCH_CHECK(code == 0, "standin: a stream cannot wait for this event (", code, ")");
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> hold(standin::lock());
    standin::progress();
    const auto& node = standin::event_of(event)->node;
    return !node || node->done;
  }
  void synchronizeEvent(void* event) const override {
    standin::wait_until([&] { return queryEvent(event); });
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) standin::destroy_event(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 250; }
  DeviceIndex deviceCount() const noexcept override { return standin::kDevices; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return standin::kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { standin::current_device() = device; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(standin::current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    standin::current_device() = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return {kType, getCurrentDevice()}; }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  // Operations compute on the CPU, so they draw from its generators.
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// --- Operations: memory and views here, everything else on the CPU once the current stream is done. ---

at::Device place_of(std::optional<at::Device> device) {
  const auto now = static_cast<DeviceIndex>(standin::current_device());
  return {kType, device && device->has_index() ? device->index() : now};
}

template <class Make>
at::Tensor on_device(std::optional<at::Device> device, const Make& make) {
  const int before = standin::current_device();
  standin::current_device() = place_of(device).index();
  at::Tensor tensor(make());
  standin::current_device() = before;
  return tensor;
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return on_device(device, [&] {
    return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
  });
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return on_device(device, [&] {
    return at::detail::empty_strided_generic(
        sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
  });
}

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& t) {
  if (t.device().is_cpu()) return t;
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

// Whether the host need not wait for a copy of this tensor.
bool stays(const at::Tensor& t) { return !t.device().is_cpu() || pinned.holds(t.const_data_ptr()); }

// A tensor's memory, as a tensor of the CPU that is made when it is asked for: one that Python has made must not be
// held by a stream, since its end would want the GIL, under the lock. Memory of the device is not kept: whoever copies
// keeps it until then, as on a GPU. Pinned memory is, as torch's allocator does.
auto seen(const at::Tensor& t) {
  return [data = t.mutable_data_ptr(), sizes = t.sizes().vec(), strides = t.strides().vec(), type = t.scalar_type(),
          held = t.device().is_cpu() ? t.storage() : at::Storage()] {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(type).device(at::kCPU));
  };
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool plain = from.sizes() == to.sizes() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (plain && (from.device() == to.device() || (non_blocking && stays(from) && stays(to)))) {
    const auto run = [to = seen(to), from = seen(from)] { to().copy_(from()); };
    {
      std::lock_guard<std::recursive_mutex> hold(standin::lock());
      standin::enqueue(*standin::stream_of(stream_now()), [run] { return standin::Action{{}, run}; });
    }
    return to;  // a new reference: torch may take the GIL for it
  }
  TORCH_CHECK(!capturing(), "standin: only plain copies can be captured");
  standin::synchronize(stream_now());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Scalar local_scalar(const at::Tensor& t) {
  TORCH_CHECK(!capturing(), "standin: a value is read during a capture");
  standin::synchronize(stream_now());
  return on_host(t).item();
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) { return at::cpu::view(self, sizes); }
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<std::int64_t> offset) {
  return at::cpu::as_strided(self, sizes, strides, offset);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  return at::cpu::set_(self, source, offset, sizes, strides);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(!capturing(), "standin: ", op.schema().name(), " cannot be captured");
  standin::synchronize(stream_now());
  at::native::cpu_fallback(op, stack);
  standin::synchronize(stream_now());  // its results were copied in the order of the stream
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("view", &view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("as_strided", &as_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

}  // namespace

// For tests/standin.py, through ctypes.
extern "C" {

void standin_install() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int standin_current_device() { return standin::current_device(); }
void standin_set_device(int device) { standin::current_device() = device; }
void standin_synchronize() { standin::synchronize(stream_now()); }
// Work of the test's own on the current stream, which waits until `*gate` is not zero.
void standin_hold(const std::int32_t* gate) {
  std::lock_guard<std::recursive_mutex> hold(standin::lock());
  enqueue_hold(*standin::stream_of(stream_now()), gate);
}
void standin_hold_next_of_pool(const std::int32_t* gate) { pool_gate = gate; }
void standin_begin_capture() { standin::begin_capture(stream_now()); }
// The graph, or null when a stream that joined was not joined back.
void* standin_end_capture() {
  auto graph = std::make_unique<std::shared_ptr<standin::Graph>>();
  return standin::end_capture(stream_now(), *graph) == 0 ? graph.release() : nullptr;
}
void standin_replay(void* graph) {
  standin::replay(*static_cast<std::shared_ptr<standin::Graph>*>(graph), stream_now());
}
void standin_drop_graph(void* graph) { delete static_cast<std::shared_ptr<standin::Graph>*>(graph); }
int standin_nodes(void* graph) {
  return static_cast<int>(standin::nodes_in(**static_cast<std::shared_ptr<standin::Graph>*>(graph)));
}
// The calls of this thread since the last time, one a line; valid until the next call.
const char* standin_calls() {
  static thread_local std::string text;
  text.clear();
  for (const auto& call : standin::calls()) text += call + "\n";
  standin::clear_calls();
  return text.c_str();
}
const char* standin_violations() {
  static thread_local std::string text;
  text.clear();
  for (const auto& rule : standin::violations()) text += rule + "\n";
  return text.c_str();
}
void standin_fail(const char* function, int code, int times) { standin::fail(function, code, times); }
}

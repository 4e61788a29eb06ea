// libcudart (or, with AXO_STANDIN_HIP, libamdhip64) over the simulator.
#include <cstdio>
#include <cstring>

#include "standin.h"

#ifdef AXO_STANDIN_HIP
#define FN(name) hip##name
#define NAME(name) "hip" name
#else
#define FN(name) cuda##name
#define NAME(name) "cuda" name
#endif

// Every call is noted, may be made to fail, and runs under the simulator's lock.
#define ENTER(name)                                                \
  standin::note(NAME(name));                                       \
  if (const int code = standin::injected(NAME(name))) return code; \
  std::lock_guard<std::recursive_mutex> hold(standin::lock())

using standin::Event;
using standin::Stream;

namespace {
constexpr int kInvalidValue = 1;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kCaptureUnsupported = 900;
constexpr int kCapturedEvent = 907;
}  // namespace

extern "C" {

int FN(RuntimeGetVersion)(int* version) {
  ENTER("RuntimeGetVersion");
  *version = 12090;
  return 0;
}
int FN(GetDeviceCount)(int* count) {
  ENTER("GetDeviceCount");
  *count = standin::kDevices;
  return 0;
}
int FN(GetDevice)(int* device) {
  ENTER("GetDevice");
  *device = standin::current_device();
  return 0;
}
int FN(SetDevice)(int device) {
  ENTER("SetDevice");
  if (device < 0 || device >= standin::kDevices) return 101;
  standin::current_device() = device;
  standin::make_context(device);
  return 0;
}
int FN(DeviceGetStreamPriorityRange)(int* least, int* greatest) {
  ENTER("DeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return 0;
}
int FN(DeviceGetPCIBusId)(char* text, int length, int device) {
  ENTER("DeviceGetPCIBusId");
  const auto& pci = standin::settings().pci;
  if (pci.empty()) {
    std::snprintf(text, length, "0000:%02x:00.0", device);
  } else {
    std::snprintf(text, length, "%s", pci.c_str());
  }
  return 0;
}
int FN(StreamCreateWithPriority)(void** stream, unsigned flags, int priority) {
  ENTER("StreamCreateWithPriority");
  if (flags != 1) return kInvalidValue;  // Axo's streams must not be ordered against the default stream
  *stream = standin::create_stream(priority);
  return 0;
}
int FN(StreamDestroy)(void* stream) {
  ENTER("StreamDestroy");
  return standin::destroy_stream(stream) ? 0 : kInvalidHandle;
}
int FN(StreamSynchronize)(void* stream) {
  standin::note(NAME("StreamSynchronize"));
  if (const int code = standin::injected(NAME("StreamSynchronize"))) return code;
  standin::synchronize(stream);
  return 0;
}
int FN(DeviceSynchronize)() {
  standin::note(NAME("DeviceSynchronize"));
  if (const int code = standin::injected(NAME("DeviceSynchronize"))) return code;
  if (standin::captures()) {
    standin::violation("the device was waited for during a capture");
    return kCaptureUnsupported;
  }
  standin::synchronize_device(standin::current_device());
  return 0;
}
int FN(StreamWaitEvent)(void* stream, void* event, unsigned) {
  ENTER("StreamWaitEvent");
  Stream* s = standin::stream_of(stream);
  Event* e = standin::event_of(event);
#ifdef AXO_STANDIN_HIP
  // Then hipStreamEndCapture goes on until its stack is full; ROCm 10.0 has two of three guards.
  if (s && e && standin::forks_in_a_circle(*s, *e)) standin::violation("the streams of a capture form a circle");
#endif
  return s && e ? standin::wait(*s, *e) : kInvalidHandle;
}
int FN(StreamIsCapturing)(void* stream, int* status) {
  ENTER("StreamIsCapturing");
  const Stream* s = standin::stream_of(stream);
  if (!s) return kInvalidHandle;
  *status = s->graph ? 1 : 0;
  return 0;
}

static int capture_info(void* stream, int* status, unsigned long long* id, void** graph = nullptr) {
  const Stream* s = standin::stream_of(stream);
  if (!s) return kInvalidHandle;
  *status = s->graph ? 1 : 0;
  *id = s->graph ? standin::graph_id(*s->graph) : 0;
  if (graph) *graph = s->graph.get();
  return 0;
}
#if defined(AXO_STANDIN_HIP)
int hipStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
  ENTER("StreamGetCaptureInfo");
  return capture_info(stream, status, id);
}
int hipStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void** needs,
                               std::size_t* count) {
  ENTER("StreamGetCaptureInfo");
  if (needs || count) return kInvalidValue;
  return capture_info(stream, status, id, graph);
}
#elif defined(AXO_STANDIN_CUDA13)
int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph, const void** needs,
                             const void** edges, std::size_t* count) {
  ENTER("StreamGetCaptureInfo");
  if (needs || edges || count) return kInvalidValue;
  return capture_info(stream, status, id, graph);
}
#else
// CUDA 12: the plain name has three arguments and must not be called.
int cudaStreamGetCaptureInfo(void*, int*, unsigned long long*) {
  standin::violation("cudaStreamGetCaptureInfo of CUDA 12 was called with the wrong arguments");
  return kInvalidValue;
}
int cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void** needs,
                                std::size_t* count) {
  ENTER("StreamGetCaptureInfo");
  if (needs || count) return kInvalidValue;
  return capture_info(stream, status, id, graph);
}
#endif

struct UserObject {
  void* data;
  void (*destroy)(void*);
};
int FN(UserObjectCreate)(void** object, void* data, void (*destroy)(void*), unsigned references, unsigned flags) {
  ENTER("UserObjectCreate");
  if (references != 1 || flags != 1) return kInvalidValue;
  *object = new UserObject{data, destroy};
  standin::count_user_object(1);
  return 0;
}
static void destroy_user_object(UserObject* object) {
  object->destroy(object->data);
  delete object;
  standin::count_user_object(-1);
}
int FN(UserObjectRelease)(void* object, unsigned references) {
  ENTER("UserObjectRelease");
  if (references != 1) return kInvalidValue;
  destroy_user_object(static_cast<UserObject*>(object));
  return 0;
}
int FN(GraphRetainUserObject)(void* graph, void* object, unsigned references, unsigned flags) {
  ENTER("GraphRetainUserObject");
  if (!graph || references != 1 || flags != 1) return kInvalidValue;  // 1: the graph takes over the only reference
  standin::at_end_of(*static_cast<standin::Graph*>(graph),
                     [own = static_cast<UserObject*>(object)] { destroy_user_object(own); });
  return 0;
}

int FN(ThreadExchangeStreamCaptureMode)(int* mode) {
  ENTER("ThreadExchangeStreamCaptureMode");
  standin::relax(*mode == 2);
  *mode = 0;
  return 0;
}
int FN(EventCreateWithFlags)(void** event, unsigned flags) {
  ENTER("EventCreateWithFlags");
  *event = standin::create_event((flags & 2) == 0);
  return 0;
}
int FN(EventDestroy)(void* event) {
  ENTER("EventDestroy");
  return standin::destroy_event(event) ? 0 : kInvalidHandle;
}
int FN(EventRecord)(void* event, void* stream) {
  ENTER("EventRecord");
  Stream* s = standin::stream_of(stream);
  Event* e = standin::event_of(event);
  return s && e ? standin::record(*e, *s) : kInvalidHandle;
}
int FN(EventQuery)(void* event) {
  ENTER("EventQuery");
  Event* e = standin::event_of(event);
  if (!e) return kInvalidHandle;
  if (standin::captures_forbid_queries()) {
    standin::violation("an event was asked during a capture by a thread that had not relaxed its rules");
    return kCaptureUnsupported;
  }
  if (e->graph) return kCapturedEvent;
  standin::progress();
  return !e->node || e->node->done ? 0 : kNotReady;
}
int FN(EventElapsedTime)(float* ms, void* start, void* end) {
  ENTER("EventElapsedTime");
  Event *a = standin::event_of(start), *b = standin::event_of(end);
  if (!a || !b || !a->timing || !b->timing) return kInvalidHandle;
  *ms = 250;
  return 0;
}
int FN(Malloc)(void** address, std::size_t bytes) {
  ENTER("Malloc");
  *address = standin::allocate(bytes);
  return 0;
}
int FN(Free)(void* address) {
  standin::note(NAME("Free"));
  if (const int code = standin::injected(NAME("Free"))) return code;
  standin::synchronize_device(standin::current_device());  // as CUDA's does, whoever the work belongs to
  return standin::release(address) ? 0 : kInvalidValue;
}
int FN(MallocAsync)(void** address, std::size_t bytes, void* stream) {
  ENTER("MallocAsync");
  if (!standin::stream_of(stream)) return kInvalidHandle;
  *address = standin::allocate(bytes);
  return 0;
}
int FN(FreeAsync)(void* address, void* stream) {
  ENTER("FreeAsync");
  Stream* s = standin::stream_of(stream);
  if (!s) return kInvalidHandle;
  if (s->graph) {  // every replay has it at the same address
    standin::at_end_of(*s->graph, [address] { standin::release(address); });
    return 0;
  }
  standin::enqueue(*s, [address] { return standin::Action{{}, [address] { standin::release(address); }}; });
  return 0;
}
int FN(MemcpyAsync)(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  ENTER("MemcpyAsync");
  Stream* s = standin::stream_of(stream);
  if (!s || kind != 4) return kInvalidValue;
  standin::enqueue(*s, [=] { return standin::Action{{}, [=] { std::memmove(to, from, bytes); }, {to, from}}; });
  return 0;
}
int FN(MemsetAsync)(void* address, int byte, std::size_t bytes, void* stream) {
  ENTER("MemsetAsync");
  Stream* s = standin::stream_of(stream);
  if (!s) return kInvalidHandle;
  standin::enqueue(*s, [=] { return standin::Action{{}, [=] { std::memset(address, byte, bytes); }, {address}}; });
  return 0;
}
int FN(GetLastError)() { return 0; }
const char* FN(GetErrorString)(int code) {
  switch (code) {
    case kInvalidValue:
      return "invalid argument";
    case kInvalidHandle:
      return "invalid resource handle";
    case 700:
      return "an illegal memory access was encountered";
    default:
      return code == 12345 ? nullptr : "some error";
  }
}

#ifdef AXO_STANDIN_HIP
// As HIP has them: a plain compare, and where it is the command processor's, in signal memory only, which nobody here
// allocates.
int hipStreamWaitValue32(void*, void*, std::uint32_t, unsigned, std::uint32_t) {
  ENTER("StreamWaitValue32");
  return kInvalidValue;
}
int hipStreamWriteValue32(void*, void*, std::uint32_t, unsigned) {
  ENTER("StreamWriteValue32");
  return kInvalidValue;
}
int hipDeviceGet(int* device, int index) {
  ENTER("DeviceGet");
  *device = index;
  return 0;
}
int hipDeviceGetUuid(unsigned char* bytes, int device) {
  ENTER("DeviceGetUuid");
  return standin::device_uuid(bytes, device);
}
#endif

}  // extern "C"

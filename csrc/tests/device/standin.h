// A GPU that is not there: streams, events, captures and the calls made, for machines without one.
//
// The stand-in libraries (libcudart, libcuda, libnccl; libamdhip64, librccl) are opened through the same tables as the
// real ones and share this simulator, which the tests link too. "Device memory" is host memory. Work on a stream is a
// node that runs when what it depends on has run, and only then: an event edge that is missing, or recorded too early,
// shows as a wrong value or as an operation that completes while its gate is shut. Nothing depends on time. It proves
// sequences, orders and error paths. It says nothing about speed, and it is not the vendors' code.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace standin {

// --- The simulator. Everything below holds `lock()` while it looks. ---

std::recursive_mutex& lock();

// One piece of work. `ready` is asked when the dependencies have run, again and again; `run` follows once.
struct Action {
  std::function<bool()> ready = {};
  std::function<void()> run = {};
  std::vector<const void*> names = {};  // memory that it touches
};
struct Node {
  std::vector<std::shared_ptr<Node>> needs;
  Action action;
  int device = 0;
  bool done = false;
};
using NodePtr = std::shared_ptr<Node>;
// Made anew for every replay of a graph.
using Maker = std::function<Action()>;

struct Graph;
struct Stream {
  int device = 0;
  int priority = 0;
  NodePtr last;
  std::shared_ptr<Graph> graph;  // set while it captures
  std::vector<int> tails;        // the graph's nodes that the next one follows
};
struct Event {
  NodePtr node;
  bool timing = false;
  bool recorded = false;
  std::shared_ptr<Graph> graph;
  std::vector<int> tails;
  const Stream* stream = nullptr;  // that recorded it
};

// Null: the default stream of the current device. Throws nothing; a dead handle gives null.
Stream* stream_of(void* handle);
Event* event_of(void* handle);
void enqueue(Stream& stream, const Maker& make);
void progress();
void wait_until(const std::function<bool()>& done);
// Until nothing is left of what streams of the device hold. Not with lock() held.
void synchronize_device(int device);

void* create_stream(int priority);
bool destroy_stream(void* handle);
void* create_event(bool timing);
bool destroy_event(void* handle);
int record(Event& event, Stream& stream);  // runtime error codes
int wait(Stream& stream, Event& event);
// Whether HIP's end of the capture, which goes down from stream to stream that waited for it, would not end.
bool forks_in_a_circle(const Stream& waiting, const Event& event);
int wait_value(void* stream, const void* address, std::uint32_t value);  // cyclic
int device_uuid(unsigned char* bytes, int device);
int write_value(void* stream, void* address, std::uint32_t value);
unsigned long long graph_id(const Graph& graph);
// `fn` is called when nobody has the graph of end_capture() any more. Events do not hold it.
void at_end_of(Graph& graph, const std::function<void()>& fn);
bool captures();                 // one is under way
bool captures_forbid_queries();  // a capture is under way and this thread has not relaxed its rules
void relax(bool relaxed);

void* allocate(std::size_t bytes);
// Memory that is freed while work in flight names it is a broken rule.
bool release(void* address);

int& current_device();
void make_context(int device);  // as cudaSetDevice does since CUDA 12
inline constexpr int kDevices = 8;

// --- For the tests. ---

// Forgets the calls, injected errors and settings of the test before.
void reset();
// Every call of this thread since the last reset, e.g. "cudaEventRecord", "ncclAllReduce count=4 type=7 op=0".
std::vector<std::string> calls();
void clear_calls();
void note(const std::string& call);
// Rules that were broken: two threads in the library for one device, a query during a capture, ...
std::vector<std::string> violations();
void violation(const std::string& text);

// The next `times` calls of `function` ("cudaEventRecord" or "ncclAllReduce"), after `skip` good ones, give `code`.
void fail(const std::string& function, int code, int times = 1, int skip = 0);
int injected(const std::string& function);

struct Settings {
  int nccl_version = 0;     // 0: the library's own
  int init_polls = 0;       // "in progress" answers after everybody has come
  bool quick_init = false;  // the thread that makes a communicator is done before its caller asks
  int finalize_polls = 0;   // the same for the end of a communicator
  int launch_polls = 0;     // the same for a launch; the work is on the stream only after them
  // Collective kernels that fit beside each other on a device, 0: all. One that is there stays until its peers come.
  int resident_kernels = 0;
  // Multiprocessors that computation has left free in each GPC of a Hopper, 0: it runs nothing. A cluster of thread
  // blocks needs one GPC.
  int free_in_a_gpc = 0;
  int launch_order_read = -1;  // NCCL_LAUNCH_ORDER_IMPLICIT as the first communicator found it, -1: none was made yet
  bool register_nothing = false;
  std::string last_error;   // ncclGetLastError
  int async_error = 0;      // of every communicator; a watchdog reads it: __atomic_store_n
  std::string pci;          // non-empty: every device's bus id
  bool same_uuid = false;   // of every device; else each has its own, as parts of one GPU do
  int ranks_of_a_host = 0;  // device d is then on host d / ranks_of_a_host, and sent_between() counts
};
Settings& settings();

// Work of the test's own on a stream: `fn` runs when the stream gets there and the gate, if any, is open.
class Gate {
 public:
  void open();
  bool is_open() const { return open_; }

 private:
  bool open_ = false;
};
void kernel(void* stream, const std::function<void()>& fn, const Gate* gate = nullptr);
void synchronize(void* stream);
bool is_idle(void* stream);

void begin_capture(void* stream);
// Returns a runtime error code: 904 when a stream that joined has not been joined back.
int end_capture(void* stream, std::shared_ptr<Graph>& graph);
void replay(const std::shared_ptr<Graph>& graph, void* stream);
std::size_t nodes_in(const Graph& graph);

// Bytes that collectives have sent between hosts, the least that each can: of communicators with one rank a host. Those
// of others that span hosts are a broken rule.
std::size_t sent_between();
void count_sent_between(std::size_t bytes);
void clear_sent_between();
int aborts();  // of communicators, since the last reset
void count_abort();
int launch_threads();  // that launches have made, since the last reset
void count_launch_thread();
std::set<int> contexts();  // devices on which this process has one, since the last reset
int live_streams();
int live_events();
int live_allocations();
int live_user_objects();
void count_user_object(int change);
int stream_priority(void* stream);

}  // namespace standin

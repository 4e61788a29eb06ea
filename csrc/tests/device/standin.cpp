#include "standin.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <map>
#include <set>

namespace standin {

struct Graph {
  struct Item {
    std::vector<int> needs;
    Maker make;
  };
  unsigned long long id = 0;
  std::vector<Item> items;
  std::set<Stream*> members;
  const Stream* origin = nullptr;
  std::map<const Stream*, const Stream*> parents;           // as HIP keeps them: whose event a stream waited for last
  std::map<const Stream*, std::set<const Stream*>> forked;  // and which streams have ever waited for its own
  std::vector<std::function<void()>> at_end;
};

namespace {

constexpr int kInvalidHandle = 400;
constexpr int kCaptureUnjoined = 904;
constexpr int kCaptureIsolation = 905;
constexpr int kCapturedEvent = 907;

struct World {
  std::recursive_mutex mutex;
  std::condition_variable_any changed;
  std::list<NodePtr> open;
  std::map<void*, std::unique_ptr<Stream>> streams;
  std::map<void*, std::unique_ptr<Event>> events;
  std::map<int, Stream> defaults;
  std::map<void*, std::size_t> memory;
  std::map<std::string, std::vector<int>> injections;
  std::vector<std::string> broken;
  std::vector<std::vector<std::string>*> logs;
  Settings settings;
  unsigned long long next_graph = 1;
  int captures = 0;
  std::set<int> contexts;
  int aborts = 0;
  std::size_t sent_between = 0;
  int launch_threads = 0;
  int user_objects = 0;
  bool progressing = false;
};

World& world() {
  static World* the = new World;  // outlives the watchdog's thread at exit
  return *the;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int device_of_thread = 0;
thread_local bool thread_is_relaxed = false;

struct Log {
  std::vector<std::string> calls;
};
Log& log() {
  static thread_local Log the;
  return the;
}

}  // namespace

std::recursive_mutex& lock() { return world().mutex; }
int& current_device() { return device_of_thread; }
void relax(bool relaxed) { thread_is_relaxed = relaxed; }

Stream* stream_of(void* handle) {
  if (!handle) {
    Stream& stream = world().defaults[device_of_thread];
    stream.device = device_of_thread;
    return &stream;
  }
  const auto found = world().streams.find(handle);
  return found == world().streams.end() ? nullptr : found->second.get();
}

Event* event_of(void* handle) {
  const auto found = world().events.find(handle);
  return found == world().events.end() ? nullptr : found->second.get();
}

void progress() {
  Lock hold(world().mutex);
  if (world().progressing) return;  // work that ends may enqueue more: the loop below finds it
  world().progressing = true;
  auto& open = world().open;
  for (bool moved = true; moved;) {
    moved = false;
    for (auto it = open.begin(); it != open.end();) {
      Node& node = **it;
      const bool free = std::all_of(node.needs.begin(), node.needs.end(), [](const NodePtr& n) { return n->done; });
      if (!free || (node.action.ready && !node.action.ready())) {
        ++it;
        continue;
      }
      if (node.action.run) node.action.run();
      node.done = true;
      node.needs.clear();
      node.action = {};
      it = open.erase(it);
      moved = true;
    }
  }
  world().progressing = false;
  world().changed.notify_all();
}

void wait_until(const std::function<bool()>& done) {
  std::unique_lock<std::recursive_mutex> hold(world().mutex);
  progress();
  while (!done()) {
    if (!std::getenv("AXO_STANDIN_PEERS")) {
      world().changed.wait(hold);
    } else {  // what other processes do wakes nobody here
      world().changed.wait_for(hold, std::chrono::microseconds(200));
      progress();
    }
  }
}

void synchronize_device(int device) {
  wait_until([&] {
    const auto& open = world().open;
    return std::none_of(open.begin(), open.end(), [&](const NodePtr& node) { return node->device == device; });
  });
}

void enqueue(Stream& stream, const Maker& make) {
  Lock hold(world().mutex);
  if (stream.graph) {
    stream.graph->items.push_back({stream.tails, make});
    stream.tails = {static_cast<int>(stream.graph->items.size()) - 1};
    return;
  }
  auto node = std::make_shared<Node>();
  node->device = stream.device;
  if (stream.last && !stream.last->done) node->needs.push_back(stream.last);
  node->action = make();
  stream.last = node;
  world().open.push_back(node);
  progress();
}

void make_context(int device) {
  Lock hold(world().mutex);
  world().contexts.insert(device);
}

void* create_stream(int priority) {
  Lock hold(world().mutex);
  make_context(device_of_thread);
  auto stream = std::make_unique<Stream>();
  stream->device = device_of_thread;
  stream->priority = priority;
  void* handle = stream.get();
  world().streams.emplace(handle, std::move(stream));
  return handle;
}

bool destroy_stream(void* handle) {
  Lock hold(world().mutex);
  return world().streams.erase(handle) > 0;
}

void* create_event(bool timing) {
  Lock hold(world().mutex);
  auto event = std::make_unique<Event>();
  event->timing = timing;
  void* handle = event.get();
  world().events.emplace(handle, std::move(event));
  return handle;
}

bool destroy_event(void* handle) {
  Lock hold(world().mutex);
  return world().events.erase(handle) > 0;
}

int record(Event& event, Stream& stream) {
  Lock hold(world().mutex);
  event.recorded = true;
  event.graph = stream.graph;
  event.tails = stream.tails;
  event.stream = &stream;
  event.node = stream.graph ? nullptr : stream.last;
  return 0;
}

bool forks_in_a_circle(const Stream& waiting, const Event& event) {
  Lock hold(world().mutex);
  Graph* const graph = event.graph.get();
  if (!graph || graph->origin == &waiting || graph->parents[event.stream] == &waiting) return false;
  graph->parents[&waiting] = event.stream;
  graph->forked[event.stream].insert(&waiting);
  std::set<const Stream*> below = {&waiting};
  for (std::size_t before = 0; before != below.size();) {
    before = below.size();
    for (const Stream* each : std::set<const Stream*>(below)) {
      below.insert(graph->forked[each].begin(), graph->forked[each].end());
    }
  }
  return graph->forked[&waiting].count(&waiting) > 0 || below.count(event.stream) > 0;
}

int wait(Stream& stream, Event& event) {
  Lock hold(world().mutex);
  if (event.graph) {
    if (stream.graph && stream.graph != event.graph) return kCaptureIsolation;
    if (!world().captures) return kCapturedEvent;
    if (!stream.graph) stream.tails.clear();
    stream.graph = event.graph;
    stream.graph->members.insert(&stream);
    for (int tail : event.tails) {
      if (std::find(stream.tails.begin(), stream.tails.end(), tail) == stream.tails.end()) stream.tails.push_back(tail);
    }
    return 0;
  }
  if (stream.graph) return event.recorded ? kCaptureIsolation : kInvalidHandle;
  if (!event.node || event.node->done) return 0;
  auto node = std::make_shared<Node>();
  node->device = stream.device;
  node->needs.push_back(event.node);
  if (stream.last && !stream.last->done) node->needs.push_back(stream.last);
  stream.last = node;
  world().open.push_back(node);
  return 0;
}

int wait_value(void* stream, const void* address, std::uint32_t value) {
  Lock hold(world().mutex);
  Stream* s = stream_of(stream);
  if (!s) return kInvalidHandle;
  enqueue(*s, [=] {
    const auto* word = static_cast<const volatile std::uint32_t*>(address);
    return Action{[=] { return static_cast<std::int32_t>(*word - value) >= 0; }, {}};
  });
  return 0;
}

int write_value(void* stream, void* address, std::uint32_t value) {
  Lock hold(world().mutex);
  Stream* s = stream_of(stream);
  if (!s) return kInvalidHandle;
  enqueue(*s, [=] { return Action{{}, [=] { *static_cast<volatile std::uint32_t*>(address) = value; }}; });
  return 0;
}

int device_uuid(unsigned char* bytes, int device) {
  if (device < 0 || device >= kDevices) return 101;
  std::fill(bytes, bytes + 16, static_cast<unsigned char>(settings().same_uuid ? 7 : device));
  return 0;
}

bool captures() {
  Lock hold(world().mutex);
  return world().captures > 0;
}

bool captures_forbid_queries() {
  Lock hold(world().mutex);
  return world().captures > 0 && !thread_is_relaxed;
}

void* allocate(std::size_t bytes) {
  Lock hold(world().mutex);
  void* address = std::calloc(1, bytes ? bytes : 1);
  world().memory[address] = bytes;
  return address;
}

bool release(void* address) {
  Lock hold(world().mutex);
  const auto found = world().memory.find(address);
  if (found == world().memory.end()) return false;
  const char *begin = static_cast<char*>(address), *end = begin + found->second;
  for (const NodePtr& node : world().open) {
    for (const void* named : node->action.names) {
      if (named >= begin && named < end) violation("memory is freed that work in flight names");
    }
  }
  world().memory.erase(found);
  std::free(address);
  return true;
}

void reset() {
  Lock hold(world().mutex);
  world().injections.clear();
  world().broken.clear();
  world().settings = {};
  world().contexts.clear();
  world().aborts = 0;
  world().sent_between = 0;
  world().launch_threads = 0;
  log().calls.clear();
}

std::vector<std::string> calls() { return log().calls; }
void clear_calls() { log().calls.clear(); }
void note(const std::string& call) { log().calls.push_back(call); }

std::vector<std::string> violations() {
  Lock hold(world().mutex);
  return world().broken;
}

void violation(const std::string& text) {
  Lock hold(world().mutex);
  world().broken.push_back(text);
}

void fail(const std::string& function, int code, int times, int skip) {
  Lock hold(world().mutex);
  auto& answers = world().injections[function];
  answers.assign(skip, 0);
  answers.insert(answers.end(), times, code);
}

int injected(const std::string& function) {
  Lock hold(world().mutex);
  const auto found = world().injections.find(function);
  if (found == world().injections.end() || found->second.empty()) return 0;
  const int code = found->second.front();
  found->second.erase(found->second.begin());
  return code;
}

Settings& settings() { return world().settings; }

void Gate::open() {
  Lock hold(world().mutex);
  open_ = true;
  progress();
}

void kernel(void* stream, const std::function<void()>& fn, const Gate* gate) {
  Lock hold(world().mutex);
  enqueue(*stream_of(stream), [fn, gate] {
    Action action;
    if (gate) action.ready = [gate] { return gate->is_open(); };
    action.run = fn;
    return action;
  });
}

void synchronize(void* stream) {
  wait_until([&] {
    const Stream* s = stream_of(stream);
    return !s || !s->last || s->last->done;
  });
}

bool is_idle(void* stream) {
  Lock hold(world().mutex);
  progress();
  const Stream* s = stream_of(stream);
  return !s->last || s->last->done;
}

void begin_capture(void* stream) {
  Lock hold(world().mutex);
  Stream& s = *stream_of(stream);
  s.graph = std::make_shared<Graph>();
  s.graph->id = world().next_graph++;
  s.graph->members.insert(&s);
  s.graph->origin = &s;
  s.tails.clear();
  ++world().captures;
}

int end_capture(void* stream, std::shared_ptr<Graph>& graph) {
  Lock hold(world().mutex);
  Stream& origin = *stream_of(stream);
  struct Owner {
    std::shared_ptr<Graph> graph;
    ~Owner() {
      Lock hold(world().mutex);
      for (const auto& fn : graph->at_end) fn();
      progress();
    }
  };
  const auto owner = std::make_shared<Owner>();
  owner->graph = origin.graph;
  graph = std::shared_ptr<Graph>(owner, owner->graph.get());
  --world().captures;
  std::set<int> reached;
  std::vector<int> todo = origin.tails;
  while (!todo.empty()) {
    const int item = todo.back();
    todo.pop_back();
    if (!reached.insert(item).second) continue;
    for (int need : graph->items[item].needs) todo.push_back(need);
  }
  bool joined = true;
  for (Stream* member : graph->members) {
    for (int tail : member->tails) joined &= reached.count(tail) > 0;
    member->graph.reset();
    member->tails.clear();
  }
  return joined ? 0 : kCaptureUnjoined;
}

void replay(const std::shared_ptr<Graph>& graph, void* stream) {
  Lock hold(world().mutex);
  Stream& s = *stream_of(stream);
  std::vector<NodePtr> nodes;
  auto last = std::make_shared<Node>();
  last->device = s.device;
  for (const auto& item : graph->items) {
    auto node = std::make_shared<Node>();
    node->device = s.device;
    for (int need : item.needs) node->needs.push_back(nodes[need]);
    if (item.needs.empty() && s.last && !s.last->done) node->needs.push_back(s.last);
    node->action = item.make();
    nodes.push_back(node);
    world().open.push_back(node);
    last->needs.push_back(node);
  }
  s.last = last;
  world().open.push_back(last);
  progress();
}

std::size_t nodes_in(const Graph& graph) { return graph.items.size(); }
unsigned long long graph_id(const Graph& graph) { return graph.id; }
void at_end_of(Graph& graph, const std::function<void()>& fn) {
  Lock hold(world().mutex);
  graph.at_end.push_back(fn);
}

std::size_t sent_between() {
  std::lock_guard<std::recursive_mutex> hold(lock());
  return world().sent_between;
}
void count_sent_between(std::size_t bytes) {
  std::lock_guard<std::recursive_mutex> hold(lock());
  world().sent_between += bytes;
}
void clear_sent_between() {
  std::lock_guard<std::recursive_mutex> hold(lock());
  world().sent_between = 0;
}
int aborts() {
  Lock hold(world().mutex);
  return world().aborts;
}
void count_abort() {
  Lock hold(world().mutex);
  ++world().aborts;
}
int launch_threads() {
  Lock hold(world().mutex);
  return world().launch_threads;
}
void count_launch_thread() {
  Lock hold(world().mutex);
  ++world().launch_threads;
}
std::set<int> contexts() {
  Lock hold(world().mutex);
  return world().contexts;
}
int live_streams() {
  Lock hold(world().mutex);
  return static_cast<int>(world().streams.size());
}
int live_events() {
  Lock hold(world().mutex);
  return static_cast<int>(world().events.size());
}
int live_allocations() {
  Lock hold(world().mutex);
  return static_cast<int>(world().memory.size());
}
int live_user_objects() {
  Lock hold(world().mutex);
  return world().user_objects;
}
void count_user_object(int change) {
  Lock hold(world().mutex);
  world().user_objects += change;
}
int stream_priority(void* stream) {
  Lock hold(world().mutex);
  return stream_of(stream)->priority;
}

}  // namespace standin
